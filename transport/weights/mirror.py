"""A checkpoint-format bf16 copy of a model's weights in host memory, kept current by payloads of the codec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lachesis_transport.weights.checksum import mirror_checksum
from lachesis_transport.weights.codec import CodecError, read_delta
from lachesis_transport.weights.layout import Layout


class Mirror:
    """One array with all tensors end to end (uint16, the bits of bf16), in the order of the layout.

    Args:
        layout: names and sizes.
        shapes: the tensors' shapes, by name; default: flat.
    """

    def __init__(self, layout: Layout, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.layout = layout
        self.bits = np.zeros(layout.total, np.uint16)
        self._shapes = shapes or {n: (c,) for n, c in zip(layout.names, layout.numels, strict=True)}

    @classmethod
    def load(cls, folder: Path) -> Mirror:
        """The weights of a model folder in Hugging Face format (*.safetensors), cast to bf16.

        A tied lm_head is left out: it's the embedding again. Raises ValueError when there are no weights.
        """
        files = sorted(folder.glob("*.safetensors"))
        skip = _tied(folder)
        where: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name not in skip:
                        where[name] = file
                        shapes[name] = tuple(tensors.get_slice(name).get_shape())
        if not where:
            raise ValueError(f"model.path: {folder} holds no *.safetensors, expected a model in Hugging Face format")
        mirror = cls(Layout.of((name, int(np.prod(shape, dtype=np.int64))) for name, shape in shapes.items()), shapes)
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name, tensor in mirror.tensors():
                    if where[name] == file:
                        tensor.copy_(tensors.get_tensor(name))
        return mirror

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return int(self.bits.nbytes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, bf16 view in the tensor's shape) of every tensor. The views change with the mirror."""
        flat = torch.from_numpy(self.bits.view(np.int16)).view(torch.bfloat16)
        for name, offset, numel in zip(self.layout.names, self.layout.offsets, self.layout.numels, strict=True):
            yield name, flat[offset : offset + numel].view(self._shapes[name])

    def checksum(self, *, shards: int) -> str:
        """Of the weights as they are, for a learner of `shards` ranks."""
        return mirror_checksum(self.layout, self.bits, shards=shards)

    def apply(self, payload: bytes | memoryview, *, sizes: Sequence[int]) -> int:
        """Apply one payload: the blobs of all ranks end to end, `sizes` bytes each. Returns the elements written.

        Everything is decoded before the first element changes: raises CodecError with the mirror untouched.
        """
        view = memoryview(payload)
        if sum(sizes) != len(view):
            raise CodecError(f"payload: {len(view)} bytes, expected {sum(sizes)}")
        patches = []
        start = 0
        for rank, size in enumerate(sizes):
            ranges = self.layout.ranges(rank=rank, ranks=len(sizes))
            patches.append(read_delta(view[start : start + size], ranges=ranges))
            start += size
        for patch in patches:
            patch.apply(self.bits)
        return sum(patch.changed for patch in patches)


def _tied(folder: Path) -> set[str]:
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_text()).get("tie_word_embeddings"):
        return {"lm_head.weight"}
    return set()
