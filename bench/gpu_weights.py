"""Checks and times weight deltas on the GPUs of this machine: compare, encode, broadcast by NCCL, apply, copy back.

    python bench/gpu_weights.py [--parameters N] [--ranks R] [--share P] [--runs K]

Needs torch and this repository's packages, neither vLLM nor DeepSpeed. Rank 0 trains (random steps on weights that live
on its GPU) and publishes; each further rank is a process with a GPU of its own that receives. Without a GPU the same
code runs on the CPU with gloo, on a small size, and what that leaves out is said. Ends with 0 when everything that ran
was exact, else with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if not __package__:
    # As a program, this folder is the first in which modules are looked for; its queue.py is not Python's.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np
import torch

from lachesis_learner.device_baseline import DeviceBaseline
from lachesis_learner.shards import Shard, ShardBlob, ShardEncoder
from lachesis_transport.messages import pack, unpack
from lachesis_transport.weights.checksum import combine
from lachesis_transport.weights.collective import Group, GroupSpec
from lachesis_transport.weights.layout import Layout, shard_range
from lachesis_transport.weights.mirror import Mirror
from lachesis_transport.weights.rendezvous import Rendezvous

LOOPBACK = "127.0.0.1"
SECONDS = 120.0
"""What any one step may take."""

ON_GPU, ON_CPU = 135_000_000, 1_000_000
"""Parameters when none are given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what was found, return the exit code."""
    parser = argparse.ArgumentParser(
        description="check and time weight deltas on this machine's GPUs", allow_abbrev=False
    )
    parser.add_argument("--parameters", type=int, help=f"of the model ({ON_GPU:,} with a GPU, {ON_CPU:,} without)")
    parser.add_argument("--ranks", type=int, help="processes in the broadcast and shards (the GPUs; 2 without one)")
    parser.add_argument("--share", type=float, default=0.02, help="of the weights that a step changes")
    parser.add_argument("--runs", type=int, default=5, help="steps that are timed")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.receive is not None:
        receive(GroupSpec.from_wire(json.loads(options.receive)), options.parameters)
        return 0
    parameters = options.parameters or (ON_GPU if gpus else ON_CPU)
    ranks = options.ranks or gpus or 2
    if parameters < 1_000 or ranks < 1 or options.runs < 1:
        parser.error(f"--parameters {parameters} --ranks {ranks} --runs {options.runs}: expected 1000, 1 and 1 or more")
    if gpus:
        print("GPUs: " + ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)))
    else:
        print("no GPU: comparing on the host's own tensors and gloo instead; skipped: NCCL, copies to and from a GPU")
    if gpus and ranks > gpus:
        print(f"skipped: ranks {gpus} to {ranks - 1}, NCCL wants a GPU for each")
        ranks = gpus
    if gpus == 1:
        print("one GPU: NCCL with one rank; skipped: NCCL between GPUs")
    with receivers(parameters, ranks=ranks, backend="nccl" if gpus else "gloo") as (group, others):
        trial = Trial(parameters, ranks=ranks, device=torch.device("cuda", 0) if gpus else torch.device("cpu"))
        trial.anchor(group, others)
        for _ in range(options.runs + 1):
            trial.step(options.share)
            trial.delta(group, others)
        send(group, {}, b"")
    trial.print()
    return 0 if trial.exact else 1


class Trial:
    """Weights on a device, their encoders (one a shard) and everything that is made of their payloads."""

    def __init__(self, parameters: int, *, ranks: int, device: torch.device) -> None:
        self._device = device
        self._where = "on the device" if device.type == "cuda" else "by torch on the host"
        self._random = torch.Generator(device).manual_seed(0)
        self._layout = layout_of(parameters)
        self._live = {
            name: torch.randn(numel, device=device, generator=self._random).to(torch.bfloat16)
            for name, numel in zip(self._layout.names, self._layout.numels, strict=True)
        }
        self._on_device = [
            ShardEncoder(self._shards(r, ranks), rank=r, ranks=ranks, on_device=True) for r in range(ranks)
        ]
        self._on_host = [
            ShardEncoder(self._shards(r, ranks), rank=r, ranks=ranks, on_device=False) for r in range(ranks)
        ]
        self._mirror = Mirror(self._layout)
        self._patched = torch.empty(self._layout.total, dtype=torch.int16, device=device)
        self._baselines: list[DeviceBaseline] = []
        self._seconds: dict[str, list[float]] = {}
        self._checks: dict[str, bool] = {}
        self._bytes = 0

    @property
    def exact(self) -> bool:
        """Whether all that was checked so far was right."""
        return all(self._checks.values())

    def anchor(self, group: Group, others: Sequence[Receiver]) -> None:
        """Publish everything."""
        blobs = [encoder.encode(anchor=True) for encoder in self._on_device]
        for encoder in self._on_host:
            encoder.encode(anchor=True)
        self._publish(blobs, group, others)
        self._patched.copy_(torch.from_numpy(self._mirror.bits.view(np.int16)))
        self._baselines = [DeviceBaseline(flat, _bits(flat)) for flat in self._live.values()]

    def step(self, share: float) -> None:
        """Move a share of the weights by one unit in the last place."""
        for flat in self._live.values():
            bits = flat.view(torch.int16)
            chosen = torch.rand(len(bits), device=self._device, generator=self._random) < share
            bits += (chosen & ((bits & 0x7FFF) > 0xFF)).to(torch.int16)

    def delta(self, group: Group, others: Sequence[Receiver]) -> None:
        """Publish what changed, in every way that there is, and compare the results."""
        before = self._mirror.bits.copy()
        with self._timed(f"compare {self._where}"):
            for baseline in self._baselines:
                baseline.changes()
        for baseline in self._baselines:
            baseline.follow()
        with self._timed(f"encode, compared {self._where}"):
            blobs = [encoder.encode() for encoder in self._on_device]
        with self._timed("encode, compared by Lachesis on the host"):
            same = [encoder.encode() for encoder in self._on_host]
        self._check("both encoders give the same bytes", [b.to_wire() for b in blobs] == [b.to_wire() for b in same])
        self._publish(blobs, group, others)
        live = torch.cat([flat.view(torch.int16) for flat in self._live.values()])
        if self._device.type == "cuda":
            with self._timed("copy all weights to the host"):
                for flat in self._live.values():
                    flat.to("cpu", copy=True)
            with self._timed("copy all weights to the device"):
                copied = torch.from_numpy(self._mirror.bits.view(np.int16)).to(self._device)
            self._check("the copied weights are the live ones", torch.equal(copied, live))
        at = np.flatnonzero(before != self._mirror.bits)
        values = self._mirror.bits[at].view(np.int16)
        with self._timed(f"patch the changed weights {self._where}"):
            self._patched[torch.from_numpy(at).to(self._device)] = torch.from_numpy(values).to(self._device)
        self._check("the patched weights are the live ones", torch.equal(self._patched, live))

    def print(self) -> None:
        """What was checked and how long each part took; the first run of each is left out."""
        print(f"{self._layout.total:,} parameters in {len(self._on_device)} shards, {self._bytes:,} bytes a delta")
        for what, right in self._checks.items():
            print(f"{'exact ' if right else 'WRONG '} {what}")
        for what, seconds in self._seconds.items():
            print(f"{1e3 * statistics.median(seconds[1:]):10.2f} ms  {what}")

    def _publish(self, blobs: Sequence[ShardBlob], group: Group, others: Sequence[Receiver]) -> None:
        sizes = [len(blob.payload) for blob in blobs]
        payload = b"".join(bytes(blob.payload) for blob in blobs)
        checksum = combine(self._layout, [blob.checksums for blob in blobs])
        delta = not blobs[0].anchor
        with self._timed("broadcast") if delta else _untimed():
            send(group, {"sizes": sizes}, payload)
        with self._timed("apply on the host") if delta else _untimed():
            self._mirror.apply(payload, sizes=sizes)
        self._bytes = len(payload)
        self._check("the applied weights have the checksum", self._mirror.checksum(shards=len(blobs)) == checksum)
        if others:
            heard = [other.checksum() for other in others]
            self._check("so have those of the other ranks", all(theirs == checksum for theirs in heard))

    def _check(self, what: str, right: bool) -> None:
        self._checks[what] = self._checks.get(what, True) and right

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        _synchronize(self._device)
        began = time.perf_counter()
        yield
        _synchronize(self._device)
        self._seconds.setdefault(what, []).append(time.perf_counter() - began)

    def _shards(self, rank: int, ranks: int) -> list[Shard]:
        shards = []
        for name, flat in self._live.items():
            start, stop = shard_range(len(flat), rank=rank, ranks=ranks)
            shards.append(Shard(name=name, flat=flat[start:stop], start=start, numel=len(flat)))
        return shards


class Receiver:
    """Another rank's process."""

    def __init__(self, spec: GroupSpec, parameters: int) -> None:
        command = [sys.executable, "-m", "lachesis_bench.gpu_weights", "--parameters", str(parameters)]
        self._process = subprocess.Popen([*command, "--receive", json.dumps(spec.to_wire())], stdout=subprocess.PIPE)

    def checksum(self) -> str:
        """That of the weights after the next payload; "" when the process is gone."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def end(self) -> None:
        """Wait for the process, at most a moment."""
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def receivers(parameters: int, *, ranks: int, backend: str) -> Iterator[tuple[Group, list[Receiver]]]:
    """A group of this process and of `ranks` - 1 others, for the length of the block."""
    rendezvous = Rendezvous(LOOPBACK, epoch=0)

    def spec(rank: int) -> GroupSpec:
        return GroupSpec(epoch=0, host=LOOPBACK, port=rendezvous.port, rank=rank, size=ranks, backend=backend)

    others = [Receiver(spec(rank), parameters) for rank in range(1, ranks)]
    try:
        yield Group(spec(0), seconds=SECONDS, device="cuda:0"), others
    finally:
        for other in others:
            other.end()
        rendezvous.close()


def receive(spec: GroupSpec, parameters: int) -> None:
    """Another rank: applies what comes and prints the checksum of each result."""
    if spec.backend == "nccl":
        torch.cuda.set_device(spec.rank)
    mirror = Mirror(layout_of(parameters))
    group = Group(spec, seconds=SECONDS, device=f"cuda:{spec.rank}")
    while True:
        header = unpack(_take(group).data)
        if not header:
            return
        mirror.apply(_take(group).data, sizes=header["sizes"])
        print(mirror.checksum(shards=len(header["sizes"])), flush=True)


def send(group: Group, header: dict[str, list[int]], payload: bytes) -> None:
    """Broadcast a map and the bytes that it describes; an empty map ends it all."""
    for part in [pack(header), payload] if header else [pack(header)]:
        group.broadcast(np.array([len(part)], np.int64).view(np.uint8), seconds=SECONDS)
        group.broadcast(np.frombuffer(bytearray(part), np.uint8), seconds=SECONDS)


def _take(group: Group) -> np.ndarray:
    size = np.zeros(1, np.int64)
    group.broadcast(size.view(np.uint8), seconds=SECONDS)
    part = np.empty(int(size[0]), np.uint8)
    group.broadcast(part, seconds=SECONDS)
    return part


def layout_of(parameters: int) -> Layout:
    """A large tensor, many of a middle size, and some that are smaller than a rank count."""
    small = {"bias": 3, "norm": 577}
    large = parameters // 5
    middle = (parameters - large - sum(small.values())) // 24
    return Layout.of([*small.items(), ("embed", large), *((f"layer.{i}", middle) for i in range(24))])


def _bits(flat: torch.Tensor) -> np.ndarray:
    return flat.view(torch.int16).cpu().numpy().view(np.uint16)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _untimed() -> Iterator[None]:
    yield


if __name__ == "__main__":
    sys.exit(main())
