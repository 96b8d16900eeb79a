"""Publication of new policies: what every learner rank encodes, and what rank 0 sends to the actors.

Every rank owns a `ShardEncoder`; rank 0 also owns the `Publisher`, which lives in its trio thread:

    encoder = ShardEncoder(shards, rank=rank, ranks=ranks)          # on every rank
    wire = encoder.encode(anchor=True).to_wire()                    # first publication: everything
    blobs = gather_to_rank_0(wire)                                  # one `bytes` a rank, in rank order

    publisher = Publisher(address=..., layout=encoder.layout, channel="collective", deadline_seconds=30.0)
    async with trio.open_nursery() as nursery:                      # rank 0
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=blobs)
        await publisher.publish(version=1, parent=0, blobs=blobs_of_the_next_encode)
        await publisher.finish()
        nursery.cancel_scope.cancel()

The messages are those of docs/weights.md.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import trio
import zmq

from lachesis_configs.addresses import host_of, on_loopback
from lachesis_learner.broadcaster import Broadcaster
from lachesis_learner.log_writer import LogWriter
from lachesis_learner.member_links import MemberLinks
from lachesis_learner.shards import NonFiniteWeights, Shard, ShardBlob, ShardEncoder
from lachesis_transport.keys import Keys
from lachesis_transport.messages import pack
from lachesis_transport.sockets import Socket, open_socket
from lachesis_transport.weights.checksum import combine
from lachesis_transport.weights.collective import CollectiveFailed, interface_toward
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.membership import Composition, Membership
from lachesis_transport.weights.version_log import Entry, Kept, VersionLog, entry_of

__all__ = ["NonFiniteWeights", "PublishReport", "Publisher", "Shard", "ShardBlob", "ShardEncoder"]

log = logging.getLogger("lachesis.publisher")

EVERYWHERE = "0.0.0.0"
MIN_FRAME_BYTES = 1 << 20
"""What a member may say in one message, at least: a hello carries the layout, about 50 bytes a tensor."""
COLLECTIVE_SHARE = 0.5
"""Part of the deadline that a collective may use; the rest is for members to stream what it did not bring them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication cost."""

    version: int
    checksum: str
    """xxh3-128 of the weights at this version, 32 hex digits."""
    bytes: int
    """Bytes that one member receives."""
    full_bytes: int
    """Bytes of the full bf16 weights."""
    changed: int
    """Elements that changed, over all ranks."""
    total: int
    """Elements of the model."""
    seconds: float
    """From the call of `publish` until the last healthy member staged the version or the deadline passed."""
    members: tuple[str, ...]
    """Actors that staged this version."""
    removed: dict[str, str]
    """Actors that were removed during this publication, and why."""
    unkept: int
    """Versions published since the one that the disk holds, this one included unless it's there already; 0 without."""
    messages_refused: int
    """Since the publisher began: what strangers and members said that it didn't understand."""
    channel: str
    """`collective` (also when some members asked for the stream), `stream`, `collective+stream` (a collective broke and
    the healthy members streamed) or `none`."""


class Publisher:
    """Rank 0's side of publication: membership, announcements, the channels and the newest weights for joiners.

    Args:
        address: tcp://127.0.0.1:PORT of the control socket (weights.address); port 0 takes a free one.
        layout: of the whole model (ShardEncoder.layout).
        channel: how members get deltas (weights.channel).
        deadline_seconds: what a dead or hanging member costs at most, once (weights.deadline_seconds).
        device: where collective tensors live: cpu (gloo) or cuda:INDEX (nccl).
        keys: of this node (run.keys), for an address off loopback.
        trusted_network: whether collectives may go off loopback (weights.trusted_network).
        files: where the versions are kept on disk; None: nowhere.
        kept: what `files` held, to go on from: the first publication may be a delta to its newest version.

    Raises ValueError for an address off loopback without keys, or with collectives and no trusted network.
    """

    def __init__(
        self,
        *,
        address: str,
        layout: Layout,
        channel: Literal["collective", "stream"],
        deadline_seconds: float,
        device: str = "cpu",
        keys: Keys | None = None,
        trusted_network: bool = False,
        files: LogFiles | None = None,
        kept: Kept | None = None,
    ) -> None:
        if not on_loopback(address):
            if keys is None:
                raise ValueError(f"weights.address: {address!r}, expected a loopback address, or keys")
            if channel == "collective" and not trusted_network:
                raise ValueError(
                    f"weights.channel: 'collective' at {address!r}, expected stream, or weights.trusted_network"
                )
        self._keys = keys
        self._address = address
        self._layout = layout
        self._channel = channel
        self._deadline_seconds = deadline_seconds
        self._log = VersionLog(layout, lease_seconds=deadline_seconds, kept=kept)
        self._membership = Membership(deadline_seconds=deadline_seconds, first=secrets.randbits(60))
        self._links = MemberLinks(
            layout=layout,
            log=self._log,
            membership=self._membership,
            deadline_seconds=deadline_seconds,
            on_change=self._notify,
            on_release=lambda: self._fold_soon.set(),
        )
        self._broadcaster = Broadcaster(
            backend="gloo" if device == "cpu" else "nccl",
            device=device,
            seconds=COLLECTIVE_SHARE * deadline_seconds,
        )
        self._changed = trio.Event()
        self._fold_soon = trio.Event()
        self._writer = None if files is None else LogWriter(files, self._log, on_release=lambda: self._fold_soon.set())
        self._socket: Socket | None = None

    @property
    def address(self) -> str:
        """Where the control socket listens, with the real port; known once `serve` has started."""
        return self._socket.address if self._socket is not None else self._address

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the actors that hold the newest version."""
        newest = self._membership.newest
        return tuple(m.actor for m in self._membership.members if newest is not None and m.staged == newest)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve actors until cancelled. Reports started when the socket is bound. Raises OSError when it can't be."""
        # Twice the layout's own message: who serves a model of other, or a few more, tensors shall hear of it.
        most = max(MIN_FRAME_BYTES, 2 * len(pack({"layout": self._layout.to_wire()})))
        async with (
            open_socket(
                zmq.ROUTER,
                bind=self._address,
                max_frame_bytes=most,
                keys=self._keys,
                field="weights.address",
            ) as socket,
            trio.open_nursery() as nursery,
        ):
            self._socket = socket
            nursery.start_soon(self._fold_when_possible)
            if self._writer is not None:
                nursery.start_soon(self._writer.run)
            task_status.started()
            try:
                await self._links.serve(socket)
            finally:
                self._broadcaster.leave()
                if self._writer is not None:
                    await self._writer.close()

    async def publish(self, *, version: int, parent: int | None, blobs: Sequence[bytes | memoryview]) -> PublishReport:
        """Publish one version made of one blob (ShardBlob.to_wire) a rank, in rank order.

        `parent` is the version that the blobs are the difference to, the newest one; of an anchor it says nothing.
        Returns when every healthy member staged it, or when the deadline passed; those that had not are removed and
        heal when they come back. Anchors replace everything. One call at a time; cancelling it leaves the version
        published. Raises ValueError when version, parent or blobs do not fit what was published before.
        """
        began = trio.current_time()
        parts = [ShardBlob.from_wire(blob) for blob in blobs]
        for rank, part in enumerate(parts):
            if (part.rank, part.ranks, part.anchor) != (rank, len(parts), parts[0].anchor):
                raise ValueError(
                    f"blobs[{rank}]: of rank {part.rank} of {part.ranks}, expected rank {rank} of {len(parts)}"
                )
        anchor = parts[0].anchor
        entry = entry_of(
            version=version,
            parent=None if anchor else parent,
            checksum=combine(self._layout, [part.checksums for part in parts]),
            payloads=[part.payload for part in parts],
        )
        self._log.append(entry)
        round_ = self._membership.begin(version, now=began, everyone=anchor)
        if self._writer is not None:
            self._writer.published()
        channel: str = "none" if not round_.waiting else "stream" if anchor else self._channel
        if channel == "collective" and not self._membership.collective:
            channel = "stream"
        try:
            if channel == "collective":
                if not await self._broadcast(entry):
                    channel = "collective+stream"
            else:
                self._links.announce({})
            self._fold_soon.set()
            while not round_.done:
                with trio.move_on_at(round_.deadline) as scope:
                    await self._changed.wait()
                if scope.cancelled_caught:
                    break
        finally:
            self._membership.end(remove_late=not anchor)
            self._links.forget_removed()
        for actor, reason in round_.removed.items():
            log.warning("%s was removed: %s", actor, reason)
        return PublishReport(
            version=version,
            checksum=entry.checksum,
            bytes=len(entry.payload),
            full_bytes=self._log.nbytes,
            changed=sum(part.changed for part in parts),
            total=sum(part.total for part in parts),
            seconds=trio.current_time() - began,
            members=tuple(round_.staged),
            removed=dict(round_.removed),
            unkept=0 if self._writer is None else self._writer.unkept,
            messages_refused=self._links.refused,
            channel=channel,
        )

    async def finish(self) -> None:
        """Tell the members that no more versions come; returns when they know, or after the deadline."""
        self._links.finish()
        with trio.move_on_after(self._deadline_seconds):
            while self._membership.members:
                await self._changed.wait()

    async def _broadcast(self, entry: Entry) -> bool:
        """Send a delta to the current members through a collective, announcing it to the others. False: it broke."""
        composition = self._membership.compose()
        invitations: dict[int, dict[str, Any]] = {}
        try:
            host, listen = self._hosts(composition)
            invitations = self._broadcaster.invite(composition, entry, host=host, listen=listen)
        except (CollectiveFailed, OSError) as error:
            self._broke(entry, error)
        # Nothing may be awaited from the log's append to here: a member that hears of the version without its
        # invitation streams it, and the group would wait for that member in vain.
        self._links.announce(invitations)
        if not invitations:
            return False
        try:
            await self._broadcaster.send(entry.payload)
        except CollectiveFailed as error:
            self._broke(entry, error)
            return False
        return True

    def _hosts(self, composition: Composition) -> tuple[str, str]:
        """Address by which the members reach this process, and the one to listen on for them. Raises OSError."""
        listen = host_of(self.address)
        if listen != EVERYWHERE:
            return listen, listen
        theirs = self._links.hosts(composition.ranks)
        remote = [host for host in theirs if not ipaddress.ip_address(host).is_loopback]
        return interface_toward((remote or theirs)[0]), listen

    def _broke(self, entry: Entry, error: Exception) -> None:
        log.warning("version %d: %s; its members get it by stream", entry.version, error)
        self._membership.broke()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _fold_when_possible(self) -> None:
        while True:
            await self._fold_soon.wait()
            self._fold_soon = trio.Event()
            if entries := self._log.begin_fold(now=trio.current_time()):
                await trio.to_thread.run_sync(self._log.fold, entries)
                self._log.end_fold(entries)
                if self._writer is not None:
                    self._writer.folded()
