"""A model of random tensors for tests of publication: its folder, and learner ranks that train it by random steps."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from lachesis_learner.shards import Shard, ShardEncoder
from lachesis_transport.weights.layout import shard_range

SHAPES = {"embed.weight": (500, 32), "a.weight": (64, 33), "b.weight": (257,), "norm.weight": (7,), "c.weight": (3, 5)}


def write_model(folder: Path, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """Random bf16 weights, saved as safetensors; `scale` multiplies the rows of the largest tensor."""
    generator = torch.Generator().manual_seed(0)
    shapes = {**SHAPES, "embed.weight": (500 * scale, 32)}
    tensors = {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return tensors


class Learner:
    """A learner of some ranks in one process, without training: `step` moves a share of the weights."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, ranks: int) -> None:
        self.tensors = tensors
        self.generator = torch.Generator().manual_seed(1)
        self.encoders = []
        for rank in range(ranks):
            shards = []
            for name, tensor in tensors.items():
                start, stop = shard_range(tensor.numel(), rank=rank, ranks=ranks)
                flat = tensor.view(-1)[start:stop]
                shards.append(Shard(name=name, flat=flat, start=start, numel=tensor.numel()))
            self.encoders.append(ShardEncoder(shards, rank=rank, ranks=ranks))
        self.layout = self.encoders[0].layout

    def step(self, *, share: float = 0.02) -> None:
        for tensor in self.tensors.values():
            at = torch.rand(tensor.shape, generator=self.generator) < share
            tensor[at] *= 1 + 2**-7

    def scramble(self) -> None:
        """Move all weights so far that the change is about as large as they are."""
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator).to(torch.bfloat16))

    def blobs(self, *, anchor: bool = False) -> list[bytes]:
        return [encoder.encode(anchor=anchor).to_wire() for encoder in self.encoders]
