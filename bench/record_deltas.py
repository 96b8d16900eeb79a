"""Records what training changes in the bits of real weights, for `lachesis bench delta` and the tests.

    .venv/bin/python -m lachesis_bench.record_deltas [RATE ...]         # a minute or two a rate on two idle cores

For each learning rate SmolLM2-135M takes policy-gradient steps as a learner does (bf16 weights, float32 master copy,
AdamW with the learner's defaults, gradients clipped to 1) on windows of this repository's documents, whose advantages
have mean 0. The steps that fill Adam's averages are skipped and the next one is recorded: from each kind of tensor in
the first, a middle and the last layer a slice of the difference of the bits modulo 2^16. The bits themselves aren't
kept, because the codec sees the differences alone. Printed for each rate: the whole model's changed share and bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgpack
import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis_bench.delta import RECORDING, floor_bytes
from lachesis_configs.models import resolve_model
from lachesis_learner.shards import Shard, ShardEncoder

SLICE = {"1e-6": 1 << 20, "1e-5": 1 << 18, "1e-4": 1 << 16}
"""Learning rate -> elements kept of each tensor, fewer where more changes."""

MODEL = "smollm2-135m-instruct"
WARM_STEPS = 10
SEQUENCES, TOKENS = 4, 128


def record(rate: str, *, dump: Path | None = None) -> dict[str, bytes]:
    """Train at one learning rate and keep slices of the step after WARM_STEPS."""
    torch.manual_seed(0)
    folder = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    live = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    masters = {name: _master(weight.detach()).requires_grad_() for name, weight in live.items()}
    adam = torch.optim.AdamW(masters.values(), lr=float(rate), betas=(0.9, 0.999), weight_decay=0.0)
    shards = [Shard(name=n, flat=w.detach().view(-1), start=0, numel=w.numel()) for n, w in live.items()]
    encoder = ShardEncoder(shards, rank=0, ranks=1)
    windows = _windows(folder)
    before: dict[str, np.ndarray] = {}
    for step in range(WARM_STEPS + 1):
        if step == WARM_STEPS:
            encoder.encode(anchor=True)
            before = {name: _bits(weight) for name, weight in live.items()}
        tokens = torch.stack([next(windows) for _ in range(SEQUENCES)])
        logits = model(tokens).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        advantages = torch.randn(SEQUENCES, 1)
        advantages = (advantages - advantages.mean()) / advantages.std()
        (advantages * losses).mean().backward()
        for name, weight in live.items():
            assert weight.grad is not None
            masters[name].grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        adam.step()
        with torch.no_grad():
            for name, weight in live.items():
                weight.copy_(masters[name])
    after = {name: _bits(weight) for name, weight in live.items()}
    blob = encoder.encode()
    floor = sum(floor_bytes(before[name], after[name]) for name in live)
    smaller, share = 2 * blob.total / len(blob.payload), floor / len(blob.payload)
    print(f"lr {rate}: {blob.changed / blob.total:.4%} of {blob.total:,} weights changed", flush=True)
    print(f"    {smaller:.0f} times fewer bytes than all weights, floor/bytes {share:.3f}", flush=True)
    if dump is not None:
        np.savez(dump / f"{rate}.npz", **{name: after[name] - before[name] for name in live})
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
    parser = argparse.ArgumentParser(description="record weight deltas of real training steps")
    parser.add_argument("rates", nargs="*", default=[], metavar="RATE", help=f"of {', '.join(SLICE)}; default: all")
    parser.add_argument("--out", type=Path, default=RECORDING, help="file whose other rates are kept")
    parser.add_argument("--dump", type=Path, help="folder for the whole differences too (270 MB a rate)")
    options = parser.parse_args()
    for rate in options.rates or SLICE:
        slices = record(rate, dump=options.dump)
        kept = msgpack.unpackb(zstandard.decompress(options.out.read_bytes())) if options.out.exists() else {}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(zstandard.ZstdCompressor(level=19).compress(msgpack.packb(kept | {rate: slices})))


if __name__ == "__main__":
    main()
