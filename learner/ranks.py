"""The ranks of a learner on one node: rank 0 is the learner itself, the others are its children and do as it says.

Rank 0 sends commands (a kind and msgpack bytes, no pickle) that every rank then carries out together. While rank 0
waits for something else it sends `tick` every few seconds, so that nobody waits without news in a collective.

A child dies with rank 0. When a child dies, rank 0 ends with the cause: at once where a collective notices, within
GRACE_SECONDS where none does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from lachesis_configs import schema
from lachesis_configs.cores import usable_cores
from lachesis_configs.load import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch.distributed as dist

logger = logging.getLogger("lachesis.learner")

Kind = Literal["tick", "train", "encode", "rebase", "save", "load", "stop"]
Device = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TICK_SECONDS = 2.0
GRACE_SECONDS = 10.0
COLLECTIVE_SECONDS = 1800.0
"""Deadline of one collective. Long: a rank may be compiling or syncing a checkpoint. A dead peer is noticed at once."""

_MEETING = "LACHESIS_RANKS"
"""Environment variable of a child: the file by which the ranks find each other. It is in rank 0's memory, and goes with
rank 0."""

_PR_SET_PDEATHSIG = 1


class RankDied(RuntimeError):
    """A rank ended before it was told to. The text says which and how."""


def prepare_process(learner: schema.Learner, *, rank: int) -> Device:
    """Restrict this process to its cores, threads and device, and return the kind of device that it is to use.

    Call it before torch and DeepSpeed are imported: threads inherit the cores, and DeepSpeed looks for its device once.
    Raises ConfigError for cores or a device that are not there.
    """
    if learner.cores is not None:
        os.sched_setaffinity(0, usable_cores("learner.cores", learner.cores))
    available = len(os.sched_getaffinity(0))
    threads = learner.threads or max(1, available // learner.ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # A thread that spins at a barrier takes the core from an engine on the same node.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Huge pages for torch's large tensors: the kernel clears fresh small ones at the cost of a tenth of a step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if learner.device != "cpu":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = given.split(",") if given else [str(i) for i in range(1024)]
        gpu = learner.gpus[rank] if learner.gpus is not None else rank
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) else ""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(learner.ranks))

    import torch

    device: Device = "cuda" if learner.device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if learner.device == "cuda":
            raise ConfigError(["learner.device: value 'cuda', but torch finds no CUDA device; expected cpu or auto"])
        torch.set_num_threads(threads)
    os.environ["DS_ACCELERATOR"] = device
    # Without it DeepSpeed counts devices on a CPU by starting a program in every backward pass.
    os.environ["LOCAL_SIZE"] = str(learner.ranks)
    return device


class Ranks:
    """This process's place among the ranks. Make it with `lead` on rank 0 and `follow` on the others."""

    control: dist.ProcessGroup
    """gloo group of all ranks for commands, sums and blobs."""

    def __init__(self, meeting: str, *, device: Device, rank: int, size: int, children: list[_Child]) -> None:
        import torch.distributed as dist

        self.device, self.rank, self.size, self._children = device, rank, size, children
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        backend = "nccl" if device == "cuda" else "gloo"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it listens where the node's name leads
        # Not a TCPStore: it listens on all of the node's addresses, and anybody may write there.
        store = dist.FileStore(meeting, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        assert group is not None
        self.control = group
        _wrap_by_deepspeed(backend)

    @classmethod
    def lead(cls, *, device: Device, size: int, command: Sequence[str]) -> Ranks:
        """Rank 0: start the other `size` - 1 as `command` with `--rank R` behind it, and meet them."""
        meeting = f"/proc/{os.getpid()}/fd/{os.memfd_create('lachesis-ranks')}"
        os.environ[_MEETING] = meeting
        children = [_Child(command, rank=rank) for rank in range(1, size)]
        return cls(meeting, device=device, rank=0, size=size, children=children)

    @classmethod
    def follow(cls, *, device: Device, rank: int, size: int) -> Ranks:
        """Another rank, started by rank 0. Raises ValueError when it was started by hand."""
        meeting = os.environ.get(_MEETING)
        if meeting is None or not 0 < rank < size:
            raise ValueError(f"--rank: value {rank}, expected to be started by rank 0 of {size} ranks")
        return cls(meeting, device=device, rank=rank, size=size, children=[])

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Rank 0: tell the others what all do next. Raises RankDied."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        try:
            dist.broadcast(torch.tensor([KINDS.index(kind), len(payload)]), 0, group=self.control)
            if payload:
                dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, group=self.control)
        except RuntimeError as error:
            self.explain(error)
            raise

    def receive(self) -> tuple[Kind, bytes]:
        """Other ranks: the next command that is not a tick."""
        import torch
        import torch.distributed as dist

        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, 0, group=self.control)
            kind, length = KINDS[int(header[0])], int(header[1])
            payload = torch.zeros(length, dtype=torch.uint8)
            if length:
                dist.broadcast(payload, 0, group=self.control)
            if kind != "tick":
                return kind, payload.numpy().tobytes()

    def gather(self, blob: bytes) -> list[bytes]:
        """Every rank's blob in rank order on rank 0, [] elsewhere."""
        if self.size == 1:
            return [blob]
        import torch
        import torch.distributed as dist

        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(blob)]), group=self.control)
        if self.rank:
            if blob:
                dist.send(torch.frombuffer(bytearray(blob), dtype=torch.uint8), 0, group=self.control)
            return []
        blobs = [blob]
        for rank in range(1, self.size):
            received = torch.empty(int(lengths[rank]), dtype=torch.uint8)
            if len(received):
                dist.recv(received, rank, group=self.control)
            blobs.append(received.numpy().tobytes())
        return blobs

    def scatter(self, part: Callable[[int], np.ndarray] | None = None) -> np.ndarray:
        """This rank's part (uint16) of what rank 0 has: `part` makes that of a rank, on rank 0 only."""
        import numpy as np
        import torch
        import torch.distributed as dist

        if self.rank:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, 0, group=self.control)
            received = np.empty(int(length), np.uint16)
            if len(received):
                dist.recv(torch.from_numpy(received.view(np.int16)), 0, group=self.control)
            return received
        assert part is not None
        for rank in range(1, self.size):
            bits = part(rank)
            dist.send(torch.tensor([len(bits)]), rank, group=self.control)
            if len(bits):
                dist.send(torch.from_numpy(bits.view(np.int16)), rank, group=self.control)
        return part(0)

    def explain(self, error: BaseException) -> None:
        """Raise RankDied in place of `error`, which a collective raised, if a child has died."""
        for child in self._children:
            cause = child.died(wait_seconds=2.0)
            if cause:
                raise RankDied(cause) from error

    def close(self, *, failed: bool) -> None:
        """Leave the group. Rank 0 waits for its children, which it has sent `stop`; it kills those that don't end, and
        all of them when it failed."""
        import torch.distributed as dist

        for child in self._children:
            child.close(kill=failed)
        if not failed:
            dist.destroy_process_group()


class _Child:
    """One spawned rank and the thread that watches it."""

    def __init__(self, command: Sequence[str], *, rank: int) -> None:
        self._rank, self._expected = rank, False
        parent = os.getpid()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True).start()

    def died(self, *, wait_seconds: float) -> str | None:
        """How it ended, if it did within the next `wait_seconds`."""
        try:
            code = self._process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self._rank} {how}"

    def close(self, *, kill: bool) -> None:
        self._expected = True
        if kill:
            self._process.kill()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        self._process.wait()
        if self._expected:
            return
        logger.error("%s; the learner ends", self.died(wait_seconds=0))
        # The main thread may sit in a collective that doesn't notice, where no exception reaches it.
        threading.Event().wait(GRACE_SECONDS)
        if not self._expected:
            os._exit(1)


def _wrap_by_deepspeed(backend: str) -> None:
    import deepspeed
    from deepspeed.utils import logger as deepspeed_logger

    deepspeed_logger.setLevel(logging.WARNING)
    # Its calls of collectives that torch renamed warn at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # It would compile an operator for half a minute that only its inference uses.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
