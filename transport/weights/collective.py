"""The collective channel: a process group of the publisher (rank 0) and the workers of its members.

    rendezvous = Rendezvous("127.0.0.1", epoch=epoch)               # rank 0, until the group is closed
    group = Group(GroupSpec(epoch=epoch, port=rendezvous.port, ...), seconds=10.0)          # every rank
    group.broadcast(buffer, seconds=10.0)
    group.close()

The groups are built directly, without torch's default group: vLLM and DeepSpeed have theirs. `nccl` and `gloo` share
this one path; only the device of the buffer differs. All calls block and end within their time-outs: run them in a
thread. gloo listens at the one address by which a rank reaches rank 0, on loopback where rank 0 is on loopback; NCCL
chooses its interfaces itself.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lachesis_transport.messages import MessageError, take
from lachesis_transport.weights.rendezvous import RendezvousStore

EXIT_SECONDS = 1.0
"""What a call may take beyond its time when the process ends."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Read when a group is built. With it a broadcast that fails or takes too long is aborted and raises where it is waited
for; without it a thread of torch's ends the whole process then."""


class CollectiveFailed(RuntimeError):
    """A group could not be built or a broadcast did not complete: some peer is dead, hangs or was fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One rank's invitation to one group."""

    epoch: int
    """Every group has its own: nobody from an older one can take part."""
    host: str
    """Of rank 0, as this rank reaches it: IPv4 address or name."""
    port: int
    """Of rank 0's rendezvous."""
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
            host=take(wire, "host", str),
            port=take(wire, "port", int),
            rank=take(wire, "rank", int),
            size=take(wire, "size", int),
            backend=take(wire, "backend", str),
        )
        if not 0 <= spec.rank < spec.size or spec.backend not in ("gloo", "nccl"):
            raise MessageError(f"group: {spec}, expected a rank below the size and backend gloo or nccl")
        return spec


class Group:
    """One built group.

    Args:
        spec: this rank's invitation.
        seconds: to meet the other ranks in.
        device: where this rank's tensors live; nccl wants cuda:INDEX, another one for each rank.

    Raises CollectiveFailed.
    """

    def __init__(self, spec: GroupSpec, *, seconds: float, device: str = "cpu") -> None:
        self.spec = spec
        self._group: Any = None
        self._left = False
        self._device = torch.device(device if spec.backend == "nccl" else "cpu")
        self._store = RendezvousStore(spec.host, spec.port, seconds=seconds)
        with _under_way(self, seconds):
            self._build(seconds)

    def _build(self, seconds: float) -> None:
        spec = self.spec
        try:
            keys = dist.PrefixStore(str(spec.epoch), self._store)
            if spec.backend == "nccl":
                self._group = _build_nccl(keys, spec, seconds=seconds, device=self._device)
            else:
                self._group = _build_gloo(keys, spec, seconds=seconds)
            if self._left:
                raise RuntimeError("this rank has left")
        except (RuntimeError, OSError) as error:  # torch's DistError family; no way to the host
            self.close()
            raise CollectiveFailed(f"epoch {spec.epoch}: group not built: {_first_line(error)}") from error

    def broadcast(self, buffer: np.ndarray, *, seconds: float) -> None:
        """Rank 0's bytes (uint8[n]) into everybody's buffer, within `seconds`. Raises CollectiveFailed."""
        if not len(buffer):
            return
        with _under_way(self, seconds):
            self._broadcast(buffer, seconds)

    def _broadcast(self, buffer: np.ndarray, seconds: float) -> None:
        group = self._group
        if group is None:
            raise CollectiveFailed(f"epoch {self.spec.epoch}: this rank has left")
        host = torch.from_numpy(buffer)
        options = _from_rank_0(seconds)
        work = None
        try:
            with _beside(self._device):
                tensor = host if self._device.type == "cpu" else host.to(self._device)
                work = group.broadcast([tensor], options)
                work.wait(options.timeout)
                if tensor is not host and self.spec.rank:
                    host.copy_(tensor)
        except RuntimeError as error:
            raise CollectiveFailed(f"epoch {self.spec.epoch}: broadcast: {_first_line(error)}") from error
        finally:
            # They keep the connections open, and the error's traceback would keep them.
            del work, group

    def close(self) -> None:
        """Leave; peers that still wait for this rank fail at once. May be called while another thread is in a call: a
        group that is being built is given up, a broadcast by gloo ends with its time or a peer's death."""
        self._left = True
        group, self._group = self._group, None
        if group is not None:
            # Connections close with the last reference, here: gloo ends a process in which another thread did this.
            group.abort()
        self._store.close()


_ended = threading.Condition()
_calls: dict[Group, float] = {}
"""Which groups are in a call of torch's, and until when at most (monotonic seconds)."""


@contextmanager
def _under_way(group: Group, seconds: float) -> Iterator[None]:
    with _ended:
        _calls[group] = time.monotonic() + seconds
    try:
        yield
    finally:
        with _ended:
            del _calls[group]
            _ended.notify_all()


@atexit.register
def _leave_at_exit() -> None:
    """Wait for calls under way, at most as long as they may take: a thread that comes back from one of torch's while
    the interpreter ends has the process aborted."""
    with _ended:
        calls = dict(_calls)
    for group in calls:
        group.close()
    with _ended:
        _ended.wait_for(
            lambda: not _calls, max([0.0, *(until + EXIT_SECONDS - time.monotonic() for until in calls.values())])
        )


def interface_toward(host: str) -> str:
    """The IPv4 address of this machine by which it reaches `host`; of a loopback one 127.0.0.1. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return str(probe.getsockname()[0])


def _from_rank_0(seconds: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds)
    return options


def _build_gloo(keys: dist.Store, spec: GroupSpec, *, seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface_toward(spec.host))]
    return dist.ProcessGroupGloo(keys, spec.rank, spec.size, options)


def _build_nccl(keys: dist.Store, spec: GroupSpec, *, seconds: float, device: torch.device) -> Any:
    if device.type != "cuda" or device.index is None:
        raise CollectiveFailed(f"device: {device}, expected cuda:INDEX for nccl")
    # NCCL connects in the first broadcast, without a time-out: whoever is not here should be missed before.
    began = time.monotonic()
    meet(keys, spec, gpu=str(torch.cuda.get_device_properties(device).uuid))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        group = dist.ProcessGroupNCCL(keys, spec.rank, spec.size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before

    def connect() -> None:
        with _beside(device):
            work = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], _from_rank_0(seconds))
            work.wait(timedelta(seconds=seconds))

    within(max(0.05, began + seconds - time.monotonic()), connect, what="NCCL connecting")
    return group


def within(seconds: float, call: Callable[[], object], *, what: str) -> None:
    """Call what may hang; after `seconds` it is left to itself. Raises CollectiveFailed then, or the call's error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="lachesis-collective", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CollectiveFailed(f"{what} took more than {seconds:g} s")
    if errors:
        raise errors[0]


def meet(keys: dist.Store, spec: GroupSpec, *, gpu: str) -> None:
    """Wait until all ranks are here, each with a GPU (its UUID) of its own. Raises CollectiveFailed."""
    keys.set(f"here/{spec.rank}", gpu)
    keys.wait([f"here/{rank}" for rank in range(spec.size)])
    seen: dict[str, int] = {}
    for rank in range(spec.size):
        theirs = keys.get(f"here/{rank}").decode()
        if theirs in seen:
            raise CollectiveFailed(
                f"ranks {seen[theirs]} and {rank} are on one GPU, {theirs}: nccl wants one for each rank, "
                "expected weights.channel: stream"
            )
        seen[theirs] = rank


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a stream of its own, so that neither waits for what else the GPU does. A thread begins on cuda:0."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
