"""The collective channel: a process group of the publisher (rank 0) and the workers of its members.

The groups are built directly, without torch's default group: vLLM and DeepSpeed have theirs. `nccl` and `gloo` share
this one path; only the device of the buffer differs. All calls block and end within their time-outs: run them in a
thread.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lachesis_transport.messages import MessageError, take

LOOPBACK = "127.0.0.1"


class CollectiveFailed(RuntimeError):
    """A group could not be built or a broadcast did not complete: some peer is dead, hangs or was fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One rank's invitation to one group."""

    epoch: int
    """Every group has its own: nobody from an older one can take part."""
    port: int
    """Of the publisher's store on loopback."""
    prefix: str
    """Of this group's keys in the store."""
    rank: int
    size: int
    backend: str
    """gloo or nccl."""

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_wire(cls, wire: Any) -> GroupSpec:
        """Decode. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"group: {type(wire).__name__}, expected a map")
        spec = cls(
            epoch=take(wire, "epoch", int),
            port=take(wire, "port", int),
            prefix=take(wire, "prefix", str),
            rank=take(wire, "rank", int),
            size=take(wire, "size", int),
            backend=take(wire, "backend", str),
        )
        if not 0 <= spec.rank < spec.size or spec.backend not in ("gloo", "nccl"):
            raise MessageError(f"group: {spec}, expected a rank below the size and backend gloo or nccl")
        return spec


def open_store(*, seconds: float) -> dist.TCPStore:
    """The publisher's store, on a free loopback port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


class Group:
    """One built group."""

    def __init__(self, spec: GroupSpec, *, seconds: float, store: dist.TCPStore | None = None) -> None:
        """Meet the other ranks, for at most `seconds`. Raises CollectiveFailed."""
        self.spec = spec
        timeout = timedelta(seconds=seconds)
        try:
            if store is None:
                store = dist.TCPStore(LOOPBACK, spec.port, is_master=False, timeout=timeout)
            keys = dist.PrefixStore(spec.prefix, store)
            keys.set_timeout(timeout)
            self._group: Any
            self._group, self._device = _build(keys, spec, timeout)
        except RuntimeError as error:  # torch's DistError family
            raise CollectiveFailed(f"epoch {spec.epoch}: group not built: {_first_line(error)}") from error

    def broadcast(self, buffer: np.ndarray, *, seconds: float) -> None:
        """Rank 0's bytes (uint8[n]) into everybody's buffer, within `seconds`. Raises CollectiveFailed."""
        if not len(buffer):
            return
        group = self._group
        if group is None:
            raise CollectiveFailed(f"epoch {self.spec.epoch}: this rank has left")
        host = torch.from_numpy(buffer)
        tensor = host if self._device.type == "cpu" else host.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=seconds)
        work = None
        try:
            work = group.broadcast([tensor], options)
            work.wait(options.timeout)
            if tensor is not host:
                torch.cuda.synchronize(self._device)
                host.copy_(tensor)
        except RuntimeError as error:
            raise CollectiveFailed(f"epoch {self.spec.epoch}: broadcast: {_first_line(error)}") from error
        finally:
            # They keep the connections open, and the error's traceback would keep them.
            del work, group

    def close(self) -> None:
        """Leave; peers that still wait for this rank fail at once."""
        if self._group is None:
            return
        group, self._group = self._group, None
        # Connections close with the last reference, here: gloo ends a process in which another thread did this.
        group.abort()


def _build(keys: dist.Store, spec: GroupSpec, timeout: timedelta) -> tuple[Any, torch.device]:
    if spec.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(keys, spec.rank, spec.size, options), torch.device("cuda")
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(keys, spec.rank, spec.size, options), torch.device("cpu")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
