"""Rank 0 of the collective channel: groups of the publisher and its members' workers, one after the other.

broadcaster = Broadcaster(backend="gloo", device="cpu", seconds=15.0)
invitations = broadcaster.invite(composition, entry, host="127.0.0.1", listen="127.0.0.1")
...                                         # tell the members
await broadcaster.send(entry.payload)       # raises CollectiveFailed
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import trio

from lachesis_transport.weights.collective import CollectiveFailed, Group, GroupSpec
from lachesis_transport.weights.membership import Composition
from lachesis_transport.weights.rendezvous import Rendezvous
from lachesis_transport.weights.version_log import Entry


class Broadcaster:
    """Builds the group of a composition once, and sends payloads through it while it lasts.

    Args:
        backend: of the groups.
        device: where tensors live; nccl wants cuda:INDEX.
        seconds: that one payload may take, the building of its group included.
    """

    def __init__(self, *, backend: Literal["gloo", "nccl"], device: str, seconds: float) -> None:
        self._backend = backend
        self._device = device
        self._seconds = seconds
        self._spec: GroupSpec | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None

    def invite(self, composition: Composition, entry: Entry, *, host: str, listen: str) -> dict[int, dict[str, Any]]:
        """What to tell each member of the composition, by token, so that it takes the entry from the next `send`.

        Args:
            host: IPv4 address by which members reach this rank.
            listen: where their rendezvous is to be, `host` or 0.0.0.0.

        Raises CollectiveFailed when nothing can listen there. Neither blocks nor waits.
        """
        if self._spec is None or self._spec.epoch != composition.epoch:
            self.leave()
            try:
                self._rendezvous = Rendezvous(listen, epoch=composition.epoch)
            except OSError as error:
                raise CollectiveFailed(f"epoch {composition.epoch}: {error}") from error
            self._spec = self._place(composition, host=host, rank=0)
        return {
            token: {
                "version": entry.version,
                "parent": entry.parent,
                "checksum": entry.checksum,
                "sizes": list(entry.sizes),
                "seconds": self._seconds,
                "group": self._place(composition, host=self._spec.host, rank=rank).to_wire(),
            }
            for token, rank in composition.ranks.items()
        }

    async def send(self, payload: bytes) -> None:
        """Bring a payload to all who were invited. Raises CollectiveFailed, at the latest when its time is up.

        Then the group is gone.
        """
        spec, began = self._spec, trio.current_time()
        assert spec is not None
        try:
            with trio.fail_after(self._seconds):
                if self._group is None:
                    self._group = await trio.to_thread.run_sync(
                        lambda: Group(spec, seconds=self._seconds, device=self._device), abandon_on_cancel=True
                    )
                group, buffer = self._group, np.frombuffer(bytearray(payload), np.uint8)
                left = max(0.05, began + self._seconds - trio.current_time())
                await trio.to_thread.run_sync(lambda: group.broadcast(buffer, seconds=left), abandon_on_cancel=True)
        except trio.TooSlowError:
            self.leave()
            raise CollectiveFailed(f"the collective took more than {self._seconds:g} s") from None
        except CollectiveFailed:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the group, if there is one; members that wait for this rank fail at once."""
        if self._group is not None:
            self._group.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._spec = self._rendezvous = self._group = None

    def _place(self, composition: Composition, *, host: str, rank: int) -> GroupSpec:
        assert self._rendezvous is not None
        return GroupSpec(
            epoch=composition.epoch,
            host=host,
            port=self._rendezvous.port,
            rank=rank,
            size=composition.size,
            backend=self._backend,
        )
