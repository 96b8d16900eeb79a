"""What a publication costs, from the end of an optimizer step until every member serves the new weights.

The publisher, its encoder and its members are the real ones, each member a process; only the engines are missing: a
member serves a copy of its mirror (bench/publish_member.py). Limits are measured in the same processes: comparing two
copies of the weights, carrying the same bytes by plain gloo or plain ZeroMQ, copying all weights, and for the whole
what publication replaces: carrying and copying all weights.

Names of figures end in _SIZE_SHARE_CHANNEL_MEMBERS, the share being that of weights that changed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import trio
from safetensors.torch import save_file

from lachesis_bench.delta import recorded, recorded_payload
from lachesis_bench.figures import Figure, Length
from lachesis_bench.publish_fleet import Fleet, open_fleet
from lachesis_learner.publisher import Publisher
from lachesis_learner.shards import Shard, ShardEncoder
from lachesis_transport.weights.layout import Layout

Channel = Literal["collective", "stream"]

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One way to publish."""

    share: float
    """Of the weights that a step changes."""
    channel: Channel
    members: int


FEW = (Case(0.01, "collective", 1), Case(0.01, "collective", 2), Case(0.01, "stream", 2))
USUAL = (*FEW, Case(0.01, "collective", 4), Case(0.01, "stream", 4), Case(0.025, "collective", 2))
MANY = (*USUAL, Case(0.01, "collective", 8), Case(0.01, "stream", 8))

CASES: dict[Length, list[tuple[str, Sequence[Case], int]]] = {
    "short": [("1m", FEW, 5)],
    "normal": [("135m", USUAL, 5)],
    "long": [("1m", FEW, 9), ("135m", MANY, 9), ("500m", FEW, 5)],
}
"""Size, cases and publications of each."""

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "1m": (4_096, 128, 384, 64, 3),
    "135m": (49_152, 576, 1_536, 192, 30),
    "500m": (151_936, 896, 4_864, 128, 24),
}
"""Vocabulary, hidden size, intermediate size, size of the keys, layers: of a toy, SmolLM2-135M and Qwen2.5-0.5B."""


def run(length: Length) -> list[Figure]:
    """publish.bytes_lr1e-6, and publish.encode, publish.transfer, publish.stage and publish.whole."""
    figures = [recorded_bytes("1e-6")]
    for size, cases, runs in CASES[length]:
        with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
            figures += trio.run(measure, Path(folder), size, cases, runs)
    return figures


def recorded_bytes(rate: str) -> Figure:
    """All weights to the delta of a real step. Of that slices were recorded (bench/record_deltas.py): each stands for
    the tensors of its kind in a third of the layers, and is cut so that all have the same share of what they stand for.
    """
    vocabulary, hidden, inner, keys, layers = SHAPES["135m"]
    rows = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), inner) | dict.fromkeys(("q_proj", "o_proj"), hidden)
    rows |= dict.fromkeys(("k_proj", "v_proj"), keys) | {"embed_tokens": vocabulary}
    slices = recorded()[rate]
    numels = {
        name: hidden
        * rows.get(name.removesuffix(".weight").rpartition(".")[2], 1)
        * (layers / 3 if "layers" in name else 1)
        for name in slices
    }
    share = min(len(before) / numels[name] for name, (before, _) in slices.items())
    kept = {name: max(1, int(share * numels[name])) for name in slices}
    cut = {name: (before[: kept[name]], after[: kept[name]]) for name, (before, after) in slices.items()}
    return Figure(
        figure=f"publish.bytes_lr{rate}",
        value=2 * sum(kept.values()) / len(recorded_payload(cut)),
        unit="times",
        against="fewer bytes than all weights: slices of a real step of SmolLM2-135M",
    )


async def measure(folder: Path, size: str, cases: Sequence[Case], runs: int) -> list[Figure]:
    """The figures of one model in all cases. Raises RuntimeError when a member does not serve the exact weights."""
    model = Model(size)
    save_file({name: bits.view(torch.bfloat16) for name, bits in model.tensors()}, folder / "model.safetensors")
    figures = []
    async with open_fleet(folder, max(case.members for case in cases)) as fleet:
        for number, case in enumerate(cases):
            first = number == next(i for i, other in enumerate(cases) if other.share == case.share)
            times = await publications(model, fleet, case, runs)
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
                times.encode.append((encoded - began, compare))
                times.transfer.append((max(e["arrived"] for e in events) - encoded, raw))
                times.stage.append(
                    (max(e["staged"] - e["arrived"] for e in events), max(e["copy_seconds"] for e in events))
                )
                times.whole.append((max(e["active"] for e in events) - began, full))
        nursery.cancel_scope.cancel()
    return times


class Model:
    """Random weights in the shapes of a transformer; a step moves a share of them by a few units in the last place, and
    the next step moves them back."""

    def __init__(self, size: str) -> None:
        vocabulary, hidden, inner, keys, layers = SHAPES[size]
        sizes = {"embed": vocabulary * hidden, "norm": hidden}
        for i in range(layers):
            sizes |= {f"{i}.{name}": hidden * inner for name in ("up", "gate", "down")}
            sizes |= {f"{i}.{name}": hidden * hidden for name in ("query", "output")}
            sizes |= {f"{i}.{name}": hidden * keys for name in ("key", "value")}
            sizes |= {f"{i}.{name}": hidden for name in ("before", "after")}
        self._layout = Layout.of(sizes.items())
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
    """Seconds of each part of each publication, beside those of its limit."""

    def __init__(self) -> None:
        self.encode: list[tuple[float, float]] = []
        self.transfer: list[tuple[float, float]] = []
        self.stage: list[tuple[float, float]] = []
        self.whole: list[tuple[float, float]] = []

    def figures(self, model: str, how: str, *, parts: bool) -> list[Figure]:
        """transfer and whole; encode and stage too, which depend on the model more than on the channel, if asked."""
        made = []
        if parts:
            made.append(_figure(f"publish.encode_{model}", self.encode, "comparing the two copies, one thread as ours"))
        made.append(_figure(f"publish.transfer_{model}_{how}", self.transfer, "carrying the same bytes, plain"))
        if parts:
            made.append(_figure(f"publish.stage_{model}", self.stage, "copying all weights, one thread as ours"))
        made.append(_figure(f"publish.whole_{model}_{how}", self.whole, "carrying and copying all weights, plain"))
        return made


def _figure(name: str, seconds: list[tuple[float, float]], against: str) -> Figure:
    ratios = [limit / ours for ours, limit in seconds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Figure(
        figure=name,
        value=1e3 * statistics.median(ours for ours, _ in seconds),
        unit="ms",
        against=against,
        reference=1e3 * statistics.median(limit for _, limit in seconds),
        ratio=middle,
        runs=len(ratios),
        spread=(high - low) / 2 / middle,
    )
