"""Records what training changes in the bits of real weights, for `lachesis bench delta` and the tests.

    .venv/bin/python -m lachesis_bench.record_deltas [RATE ...]         # a minute or two a rate on two idle cores

For each learning rate SmolLM2-135M takes policy-gradient steps as a learner does (bf16 weights, float32 master copy,
AdamW with the learner's defaults, gradients clipped to 1) on windows of this repository's documents, whose advantages
have mean 0. Steps at a rate of 0 fill Adam's averages; the next one is recorded: from each kind of tensor in the first,
a middle and the last layer a slice of the difference of the bits modulo 2^16. The bits before are the model's own, so
they aren't kept. Printed for each rate: the whole model's changed share and bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgpack
import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis_bench.delta import MODEL, RECORDING, floor_bytes
from lachesis_configs.models import resolve_model
from lachesis_learner.shards import Shard, ShardEncoder

SLICE = {"1e-6": 1 << 20, "1e-5": 1 << 18, "1e-4": 1 << 16}
"""Learning rate -> elements kept of each tensor, fewer where more changes."""

WARM_STEPS = 10
SEQUENCES, TOKENS = 4, 128


class Training:
    """SmolLM2-135M, training as a learner does; `encoder` encodes its weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        folder = resolve_model(MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.live = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        """The bf16 weights, by name."""
        self._masters = {name: _master(weight.detach()).requires_grad_() for name, weight in self.live.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
        self._windows = _windows(folder)
        shards = [Shard(name=n, flat=w.detach().view(-1), start=0, numel=w.numel()) for n, w in self.live.items()]
        self.encoder = ShardEncoder(shards, rank=0, ranks=1)
        for _ in range(WARM_STEPS):
            self.step(0.0)
        self.encoder.encode(anchor=True)

    def step(self, rate: float) -> None:
        """One optimizer step at this learning rate."""
        tokens = torch.stack([next(self._windows) for _ in range(SEQUENCES)])
        logits = self._model(tokens).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        advantages = torch.randn(SEQUENCES, 1)
        advantages = (advantages - advantages.mean()) / advantages.std()
        (advantages * losses).mean().backward()
        for name, weight in self.live.items():
            assert weight.grad is not None
            self._masters[name].grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        with torch.no_grad():
            for name, weight in self.live.items() if rate else ():
                weight.copy_(self._masters[name])


def record(rate: str) -> dict[str, bytes]:
    """Slices of the first step at this learning rate."""
    training = Training()
    live = training.live
    before = {name: _bits(weight) for name, weight in live.items()}
    training.step(float(rate))
    after = {name: _bits(weight) for name, weight in live.items()}
    blob = training.encoder.encode()
    floor = sum(floor_bytes(before[name], after[name]) for name in live)
    print(f"lr {rate}: {blob.changed / blob.total:.4%} of {blob.total:,} weights changed", flush=True)
    print(f"    {2 * blob.total / floor:.0f} times fewer bytes than all weights at the floor,", flush=True)
    print(f"    {2 * blob.total / len(blob.payload):.0f} times in the delta", flush=True)
    kept = {}
    layers = sorted({int(n.split(".")[2]) for n in live if n.startswith("model.layers.")})
    chosen = {f"model.layers.{layers[i]}." for i in (0, len(layers) // 2, -1)}
    for name in live:
        if not name.startswith("model.layers.") or any(name.startswith(prefix) for prefix in chosen):
            difference = (after[name] - before[name])[: SLICE[rate]]
            kept[name] = difference.astype("<u2").tobytes()
    return kept


def _master(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight anywhere among those that round to this bf16 one, as they lie after many steps.

    At the start of a run both are the same, and for hundreds of small steps far fewer weights change.
    """
    bits = weight.float().view(torch.int32)
    within = torch.randint(-(1 << 15) + 1, 1 << 15, bits.shape, dtype=torch.int32)
    return torch.where(weight == 0, bits, bits + within).view(torch.float32)


def _windows(folder: Path):  # type: ignore[no-untyped-def]
    text = "\n\n".join(p.read_text() for p in sorted((Path(__file__).parent.parent / "docs").glob("*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    while True:
        at = int(torch.randint(len(tokens) - TOKENS, ()))
        yield tokens[at : at + TOKENS]


def _bits(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().view(-1).view(torch.int16).numpy().view(np.uint16).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description="record weight deltas of real training steps", allow_abbrev=False)
    parser.add_argument("rates", nargs="*", default=[], metavar="RATE", help=f"of {', '.join(SLICE)}; default: all")
    parser.add_argument("--out", type=Path, default=RECORDING, help="file whose other rates are kept")
    options = parser.parse_args()
    for rate in options.rates or SLICE:
        slices = record(rate)
        kept = msgpack.unpackb(zstandard.decompress(options.out.read_bytes())) if options.out.exists() else {}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(zstandard.ZstdCompressor(level=19).compress(msgpack.packb(kept | {rate: slices})))


if __name__ == "__main__":
    main()
