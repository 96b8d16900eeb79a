"""What weight deltas cost: their size against the entropy floor, their time against reading and copying the weights.

The weights are random bf16 tensors in the shapes of a small transformer; a step moves a share of them by a few units in
the last place, nine of ten by one, at random positions. Real deltas, recorded by record_deltas.py at several learning
rates, are measured for their size too; they are smaller than their floor, as where weights change is not random: it
depends on how small they are, which both sides know.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import msgpack
import numpy as np
import torch
import zstandard

from lachesis_bench.figures import Figure, Length
from lachesis_configs.models import resolve_model
from lachesis_learner.shards import Shard, ShardEncoder
from lachesis_transport.weights.codec import DeltaWriter, blocks, fine_bound, stretches
from lachesis_transport.weights.mirror import Mirror

DENSITIES = (0.001, 0.01, 0.025, 0.06, 0.14, 0.3, 0.6)
TIMED = (0.001, 0.01, 0.025, 0.14)

RECORDING = Path(__file__).parent / "data" / "deltas.msgpack.zst"
"""{learning rate: {name of a tensor: what its first bits differ by after a training step, uint16 little-endian}}."""

MODEL = "smollm2-135m-instruct"
"""Whose steps these are; the bits before them are its own."""

AMOUNT: dict[Length, tuple[int, int]] = {"short": (6, 9), "normal": (30, 9), "long": (30, 15)}
"""Layers, and runs of each timing."""


def run(length: Length) -> list[Figure]:
    """delta.floor_share_P, delta.encode_P and delta.apply_P for shares P of changed weights, and
    delta.floor_share_recorded_lrR for learning rates R."""
    layers, runs = AMOUNT[length]
    figures = []
    for density in DENSITIES:
        trial = _Trial(layers, density)
        figures.append(trial.floor_share())
        if density in TIMED:
            figures += trial.timings(runs)
    return figures + [recorded_share(rate, slices) for rate, slices in recorded().items()]


Slices = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a tensor -> its first bits (uint16) before and after a step."""


def recorded() -> dict[str, Slices]:
    """Learning rate -> what one training step made of the model's weights."""
    rates = msgpack.unpackb(zstandard.decompress(RECORDING.read_bytes()))
    model = Mirror.load(resolve_model(MODEL))
    start = dict(zip(model.layout.names, model.layout.offsets, strict=True))
    steps: dict[str, Slices] = {}
    for rate, slices in rates.items():
        steps[rate] = {}
        for name, raw in slices.items():
            difference = np.frombuffer(raw, "<u2")
            before = model.bits[start[name] : start[name] + len(difference)]
            steps[rate][name] = before, before + difference
    return steps


def recorded_share(rate: str, slices: Slices) -> Figure:
    """The size of one recorded delta against its floor."""
    floor = sum(floor_bytes(before, after) for before, after in slices.values())
    payload = recorded_payload(slices)
    return _share(f"recorded_lr{rate}", payload, floor, of=", slices of a real step's delta")


def recorded_payload(slices: Slices) -> bytes:
    """The delta of such slices, end to end."""
    before, after = (np.concatenate(parts) for parts in zip(*slices.values(), strict=True))
    bound = fine_bound((before[a:b], after[a:b]) for a, b in stretches(0, len(before), total=len(before)))
    cuts = list(blocks(len(before)))
    writer = DeltaWriter(blocks=len(cuts), fine=bound)
    for start, stop in cuts:
        writer.add(before[start:stop], after[start:stop])
    return writer.finish()


def _share(what: str, payload: bytes | memoryview, floor: float, *, of: str = "") -> Figure:
    return Figure(
        figure=f"delta.floor_share_{what}",
        value=len(payload) / 1e6,
        unit="MB",
        against=f"entropy of positions and differences{of}",
        reference=floor / 1e6,
        ratio=floor / len(payload),
    )


class _Trial:
    """A model and one step of it, which the encoder takes forth and back."""

    def __init__(self, layers: int, density: float) -> None:
        self.random = np.random.default_rng(0)
        self.density = density
        shapes = {"embed": 49_152 * 576}
        for i in range(layers):
            shapes |= {
                f"{i}.{name}": 576 * rows for name, rows in (("up", 1536), ("down", 1536), ("q", 576), ("k", 192))
            }
            shapes[f"{i}.norm"] = 576
        self.before = {name: self._weights(numel) for name, numel in shapes.items()}
        self.after = {name: self._moved(bits) for name, bits in self.before.items()}
        self.live = {name: torch.from_numpy(bits.view(np.int16).copy()) for name, bits in self.before.items()}
        shards = [
            Shard(name=name, flat=bits.view(torch.bfloat16), start=0, numel=len(bits))
            for name, bits in self.live.items()
        ]
        self.encoder = ShardEncoder(shards, rank=0, ranks=1)
        self.encoder.encode(anchor=True)
        self.mirror = Mirror(self.encoder.layout)
        for name, tensor in self.mirror.tensors():
            tensor.copy_(self.live[name].view(torch.bfloat16))

    def floor_share(self) -> Figure:
        """Bytes that the positions and differences carry at least, to bytes used."""
        floor = sum(floor_bytes(self.before[name], self.after[name]) for name in self.before)
        self._load(self.after)
        payload = self.encoder.encode().payload
        self._load(self.before)
        back = self.encoder.encode().payload
        self.mirror.apply(payload, sizes=[len(payload)])
        self.mirror.apply(back, sizes=[len(back)])
        return _share(f"{self.density:g}", payload, floor)

    def timings(self, runs: int) -> list[Figure]:
        """Encoding against comparing both copies, applying against copying all weights.

        All four run in one thread, whose CPU time is measured: what else runs on the machine takes none of it.
        """
        encode, compare, apply, copy = [], [], [], []
        names = self.encoder.layout.names
        target = {name: bits.copy() for name, bits in self.before.items()}
        for i in range(runs + 1):
            weights, others = (self.after, self.before) if i % 2 == 0 else (self.before, self.after)
            self._load(weights)
            start = time.thread_time()
            same = [np.array_equal(weights[name].view(np.uint64), others[name].view(np.uint64)) for name in names]
            compare.append(time.thread_time() - start)
            assert not all(same)
            start = time.thread_time()
            payload = self.encoder.encode().payload
            encode.append(time.thread_time() - start)
            start = time.thread_time()
            self.mirror.apply(payload, sizes=[len(payload)])
            apply.append(time.thread_time() - start)
            start = time.thread_time()
            for name in names:
                np.copyto(target[name], weights[name])
            copy.append(time.thread_time() - start)
        size = self.mirror.nbytes / 1e9
        return [
            _rate(
                f"delta.encode_{self.density:g}",
                encode,
                "comparing the two copies, CPU time of one thread, as ours",
                compare,
                size,
            ),
            _rate(
                f"delta.apply_{self.density:g}",
                apply,
                "copying all weights, CPU time of one thread, as ours",
                copy,
                size,
            ),
        ]

    def _weights(self, numel: int) -> np.ndarray:
        return (self.random.standard_normal(numel, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def _moved(self, bits: np.ndarray) -> np.ndarray:
        moved = bits.copy()
        chosen = self.random.random(len(bits), dtype=np.float32) < self.density
        at = np.flatnonzero(chosen & ((bits & 0x7FFF) > 0xFF))  # away from zero, beyond which the bits jump
        steps = self.random.geometric(0.9, len(at)) * self.random.choice([-1, 1], len(at))
        moved[at] += steps.astype(np.int16).view(np.uint16)
        return moved

    def _load(self, weights: dict[str, np.ndarray]) -> None:
        for name, bits in weights.items():
            self.live[name].copy_(torch.from_numpy(bits.view(np.int16)))


def floor_bytes(before: np.ndarray, after: np.ndarray) -> float:
    """n * (H(p) + p * H(difference)) bits, as bytes; p is the changed share."""
    difference = (after - before)[after != before]
    n, p = len(before), len(difference) / len(before)
    positions = 0.0 if p in (0.0, 1.0) else -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    shares = np.unique(difference, return_counts=True)[1] / max(1, len(difference))
    return float(n * (positions - p * (shares * np.log2(shares)).sum()) / 8)


def _rate(figure: str, seconds: list[float], against: str, reference: list[float], size: float) -> Figure:
    # The first of each warms caches and is left out.
    ratios = [limit / ours for ours, limit in zip(seconds[1:], reference[1:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Figure(
        figure=figure,
        value=size / statistics.median(seconds[1:]),
        unit="GB/s",
        against=against,
        reference=size / statistics.median(reference[1:]),
        ratio=middle,
        runs=len(ratios),
        spread=(high - low) / 2 / middle,
    )
