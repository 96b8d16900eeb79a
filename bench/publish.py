"""What a publication costs, from the end of an optimizer step until every member serves the new weights.

The publisher, its encoder and its members are the real ones, each member a process; only the engines are missing: a
member serves a copy of its mirror (bench/publish_member.py). Limits are measured in the same processes: comparing two
copies of the weights, carrying the same bytes by plain gloo or plain ZeroMQ, copying all weights, and for the whole
what publication replaces: carrying and copying all weights.

Names of figures end in _SIZE_SHARE_CHANNEL_MEMBERS, the share being that of weights that changed. The parts that a
publication takes one after another are diff, encode, transfer, decode, verify and activate; whole is all of them. Each
part of one member's machine is measured with one member. What an activation costs a real engine is publish.pause, which
`lachesis bench activation` measures.
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import trio
from safetensors.torch import save_file

from lachesis_bench.figures import Figure, Length
from lachesis_bench.publish_fleet import Fleet, open_fleet
from lachesis_learner.publisher import Publisher
from lachesis_learner.shards import Shard, ShardEncoder
from lachesis_transport.weights.layout import Layout

Channel = Literal["collective", "stream"]

DEADLINE_SECONDS = 60.0

PROGRAM_BYTES = 400_000_000
"""Memory of a process of ours before it holds weights."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to publish."""

    share: float
    """Of the weights that a step changes."""
    channel: Channel
    members: int


BOTH = (Case(0.01, "collective", 1), Case(0.01, "collective", 2))
FEW = (*BOTH, Case(0.01, "stream", 2))
USUAL = (*FEW, Case(0.01, "collective", 4), Case(0.01, "stream", 4), Case(0.025, "collective", 1))
MANY = (*USUAL, Case(0.01, "collective", 8), Case(0.01, "stream", 8))

CASES: dict[Length, list[tuple[str, Sequence[Case], int]]] = {
    "short": [("1m", FEW, 5)],
    "normal": [("135m", USUAL, 5)],
    "long": [("1m", MANY, 9), ("10m", MANY, 9), ("135m", MANY, 9), ("500m", MANY, 5)],
}
"""Size, cases and publications of each."""

TRAINED_STEPS: dict[Length, int] = {"short": 3, "normal": 5, "long": 20}
"""Of a real run, whose deltas are measured."""

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "1m": (4_096, 128, 384, 64, 3),
    "10m": (16_384, 256, 768, 128, 8),
    "135m": (49_152, 576, 1_536, 192, 30),
    "500m": (151_936, 896, 4_864, 128, 24),
}
"""Vocabulary, hidden size, intermediate size, size of the keys, layers: of two toys, SmolLM2-135M and Qwen2.5-0.5B."""


def run(length: Length) -> list[Figure]:
    """publish.bytes_lr1e-6, publish.unchanged_lr1e-6, and publish.diff, encode, transfer, decode, verify, activate and
    whole."""
    logging.getLogger("lachesis.publisher").setLevel(logging.WARNING)  # who joins is no news here
    figures = trained_bytes("1e-6", TRAINED_STEPS[length])
    for size, cases, runs in CASES[length]:
        if fit := fitting(size, cases):
            with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
                figures += trio.run(measure, Path(folder), size, fit, runs)
    return figures


def fitting(size: str, cases: Sequence[Case], *, free: int | None = None) -> list[Case]:
    """The cases that fit into the memory that is free (bytes; default: asks the system). Says which don't on stderr."""
    free = psutil.virtual_memory().available if free is None else free
    fit = []
    for case in cases:
        needed = memory(size, case.members)
        if needed <= free:
            fit.append(case)
        else:
            print(
                f"publish: {size}, {case.channel}, {case.members} members: left out, needs {needed / 1e9:.0f} GB of "
                f"memory, {free / 1e9:.0f} are free",
                file=sys.stderr,
            )
    return fit


def memory(size: str, members: int) -> int:
    """Bytes that publishing to so many members takes: live weights, those before, the encoder's and the publisher's
    copy here, and for a while an anchor and its message; three copies in each member; and the programs."""
    return 2 * Layout.of(tensor_sizes(size).items()).total * (7 + 3 * members) + PROGRAM_BYTES * (1 + members)


def trained_bytes(rate: str, steps: int) -> list[Figure]:
    """All weights to the deltas of so many consecutive steps of SmolLM2-135M, which are trained here (a second or two
    each, and half a minute before); and the share of its matrices that a step leaves as they are."""
    from lachesis_bench.record_deltas import Training

    training = Training()
    ratios, unchanged = [], []
    for _ in range(steps):
        before = {name: weight.detach().clone() for name, weight in training.live.items() if weight.ndim == 2}
        training.step(float(rate))
        unchanged.append(statistics.mean(torch.equal(was, training.live[name]) for name, was in before.items()))
        blob = training.encoder.encode()
        ratios.append(2 * blob.total / len(blob.payload))
    value = statistics.harmonic_mean(ratios)  # of bytes the mean
    low, _, high = statistics.quantiles(ratios, n=4)
    return [
        Figure(
            figure=f"publish.bytes_lr{rate}",
            value=value,
            unit="times",
            against="fewer bytes than all weights: the mean of consecutive real steps of SmolLM2-135M",
            runs=steps,
            spread=(high - low) / 2 / value,
        ),
        Figure(
            figure=f"publish.unchanged_lr{rate}",
            value=statistics.mean(unchanged),
            unit="share",
            against=f"of {len(before)} matrices, in a step",
            runs=steps,
        ),
    ]


async def measure(folder: Path, size: str, cases: Sequence[Case], runs: int) -> list[Figure]:
    """The figures of one model in all cases. Raises RuntimeError when a member does not serve the exact weights."""
    model = Model(size)
    save_file({name: bits.view(torch.bfloat16) for name, bits in model.tensors()}, folder / "model.safetensors")
    figures = []
    async with open_fleet(folder, max(case.members for case in cases)) as fleet:
        for number, case in enumerate(cases):
            first = number == next(i for i, other in enumerate(cases) if other.share == case.share)
            times = await publications(model, fleet, case, runs)
            gc.collect()  # the publisher's tasks and its copy of the weights refer to each other
            figures += times.figures(f"{size}_{case.share:g}", f"{case.channel}_{case.members}", parts=first)
    return figures


async def publications(model: Model, fleet: Fleet, case: Case, runs: int) -> Times:
    """Publish `runs` steps to the first members of the fleet, and carry and copy raw bytes in between."""
    model.choose(case.share)
    encoder = ShardEncoder(
        [Shard(name=n, flat=bits.view(torch.bfloat16), start=0, numel=len(bits)) for n, bits in model.tensors()],
        rank=0,
        ranks=1,
    )
    times = Times()
    publisher = Publisher(
        address="tcp://127.0.0.1:0",
        layout=encoder.layout,
        channel=case.channel,
        deadline_seconds=DEADLINE_SECONDS,
    )
    members = fleet.members[: case.members]
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=[encoder.encode(anchor=True).to_wire()])
        for member in members:
            await member.order("follow", address=publisher.address)
        for member in members:
            await member.heard("active", version=0)
        async with fleet.raw(case.members, channel=case.channel) as carry:
            for version in range(1, runs + 2):
                began = time.monotonic()
                encoder.encode()  # nothing changed: what is left is the diff
                diff = time.monotonic() - began
                compare = model.step()
                began = time.monotonic()
                blob = encoder.encode().to_wire()
                encoded = time.monotonic()
                report = await publisher.publish(version=version, parent=version - 1, blobs=[blob])
                events = [await member.heard("active", version=version) for member in members]
                for member, event in zip(members, events, strict=True):
                    served = await member.ask("served")
                    if not report.checksum == event["checksum"] == served["checksum"]:
                        raise RuntimeError(
                            f"{member.name}: serves {served['checksum']}, expected {report.checksum} of {version}"
                        )
                if report.removed or report.channel != case.channel:
                    raise RuntimeError(f"version {version}: by {report.channel}, removed {report.removed}")
                raw = await carry(np.frombuffer(bytearray(blob[: report.bytes]), np.uint8), copy=False)
                full = await carry(model.bits.view(np.uint8), copy=True)
                if version == 1:
                    continue  # builds the group and warms the caches
                arrived, applied = max(e["arrived"] for e in events), max(e["applied"] for e in events)
                staged, active = max(e["staged"] for e in events), max(e["active"] for e in events)
                copy = max(e["copy_seconds"] for e in events)
                times.diff.append((diff, compare))
                times.encode.append((encoded - began - diff, None))
                times.transfer.append((arrived - encoded, raw))
                times.decode.append((applied - arrived, copy))
                times.verify.append((staged - applied, None))
                times.activate.append((active - staged, copy))
                times.whole.append((active - began, full))
        nursery.cancel_scope.cancel()
    return times


def tensor_sizes(size: str) -> dict[str, int]:
    """Name -> elements of each tensor of a model."""
    vocabulary, hidden, inner, keys, layers = SHAPES[size]
    sizes = {"embed": vocabulary * hidden, "norm": hidden}
    for i in range(layers):
        sizes |= {f"{i}.{name}": hidden * inner for name in ("up", "gate", "down")}
        sizes |= {f"{i}.{name}": hidden * hidden for name in ("query", "output")}
        sizes |= {f"{i}.{name}": hidden * keys for name in ("key", "value")}
        sizes |= {f"{i}.{name}": hidden for name in ("before", "after")}
    return sizes


class Model:
    """Random weights in the shapes of a transformer; a step moves a share of them by a few units in the last place, and
    the next step moves them back."""

    def __init__(self, size: str) -> None:
        self._layout = Layout.of(tensor_sizes(size).items())
        self._random = np.random.default_rng(0)
        floats = self._random.standard_normal(self._layout.total, dtype=np.float32)
        self.bits = floats.view(np.uint16)[1::2].copy()
        """All weights as they are now, as bits, in layout order."""
        self._before = self.bits.copy()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and bits (a view) of each."""
        for name, offset, numel in zip(self._layout.names, self._layout.offsets, self._layout.numels, strict=True):
            yield name, torch.from_numpy(self.bits.view(np.int16)[offset : offset + numel])

    def choose(self, share: float) -> None:
        """Which weights the following steps move."""
        total = self._layout.total
        at = np.unique(self._random.integers(total, size=round(-np.log1p(-share) * total)))
        self._at = at[(self.bits[at] & 0x7FFF) > 0xFF]  # away from zero, beyond which the bits jump
        steps = self._random.geometric(0.9, len(self._at)) * self._random.choice([-1, 1], len(self._at))
        self._steps = steps.astype(np.int16).view(np.uint16)

    def step(self) -> float:
        """Move them; returns the seconds that comparing all weights with those before takes."""
        self._before[self._at] = self.bits[self._at]
        self.bits[self._at] += self._steps
        self._steps = -self._steps
        now, before = self.bits.view(np.uint64), self._before.view(np.uint64)  # numpy's fastest comparison
        began = time.monotonic()
        same = [
            np.array_equal(now[start // 4 : (start + n) // 4], before[start // 4 : (start + n) // 4])
            for start, n in zip(self._layout.offsets, self._layout.numels, strict=True)
        ]
        seconds = time.monotonic() - began
        assert not all(same)
        return seconds


class Times:
    """Seconds of each part of each publication, beside those of its limit where it has one."""

    def __init__(self) -> None:
        self.diff: list[tuple[float, float | None]] = []
        self.encode: list[tuple[float, float | None]] = []
        self.transfer: list[tuple[float, float | None]] = []
        self.decode: list[tuple[float, float | None]] = []
        self.verify: list[tuple[float, float | None]] = []
        self.activate: list[tuple[float, float | None]] = []
        self.whole: list[tuple[float, float | None]] = []

    def figures(self, model: str, how: str, *, parts: bool) -> list[Figure]:
        """transfer and whole; the parts that depend on the model more than on the channel, too, if asked."""
        copying = "copying all weights, one thread as ours"
        made = [
            _figure(f"publish.diff_{model}", self.diff, "comparing the two copies, one thread as ours"),
            _figure(f"publish.encode_{model}", self.encode, "to encode what changed, without the diff"),
            _figure(f"publish.transfer_{model}_{how}", self.transfer, "carrying the same bytes, plain"),
            _figure(f"publish.decode_{model}", self.decode, copying),
            _figure(f"publish.verify_{model}", self.verify, "to take the checksum, and answer"),
            _figure(f"publish.activate_{model}", self.activate, f"{copying}: there is no engine"),
            _figure(f"publish.whole_{model}_{how}", self.whole, "carrying and copying all weights, plain"),
        ]
        return made if parts else [made[2], made[-1]]


def _figure(name: str, seconds: list[tuple[float, float | None]], against: str) -> Figure:
    values = [ours for ours, _ in seconds]
    ratios = [limit / ours for ours, limit in seconds if limit is not None]
    low, middle, high = statistics.quantiles(ratios or values, n=4)
    return Figure(
        figure=name,
        value=1e3 * statistics.median(values),
        unit="ms",
        against=against,
        reference=1e3 * statistics.median(limit for _, limit in seconds if limit is not None) if ratios else None,
        ratio=middle if ratios else None,
        runs=len(values),
        spread=(high - low) / 2 / middle,
    )
