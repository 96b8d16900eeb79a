"""Where each tensor lies in a host mirror of the weights: names, sizes and shard ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from lachesis_transport.messages import MessageError

MAX_TENSORS = 1 << 20
MAX_NAME = 1024
MAX_NUMEL = 1 << 40


def shard_range(numel: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """[start, stop) of a rank's part of a flattened tensor: ceil(numel / ranks) elements, fewer at the end."""
    part = -(-numel // ranks)
    return min(numel, rank * part), min(numel, (rank + 1) * part)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in checkpoint coordinates, sorted by name and laid end to end.

    A mirror is one uint16 array of `total` elements (the bits of bf16); tensor i holds
    [offsets[i], offsets[i] + numels[i]) of it.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...] = field(init=False, compare=False)
    total: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.numels):
            raise ValueError(f"numels: {len(self.numels)} sizes, expected {len(self.names)}")
        if list(self.names) != sorted(set(self.names)):
            raise ValueError("names: expected distinct names in ascending order")
        if any(n < 0 for n in self.numels):
            raise ValueError(f"numels: {min(self.numels)}, expected 0 or more")
        ends = np.cumsum([0, *self.numels], dtype=np.int64)
        object.__setattr__(self, "offsets", tuple(int(o) for o in ends[:-1]))
        object.__setattr__(self, "total", int(ends[-1]))

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> Layout:
        """The layout of (name, elements) pairs in any order."""
        pairs = sorted(sizes)
        return cls(tuple(n for n, _ in pairs), tuple(c for _, c in pairs))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes (xxh3-128) that two equal layouts share."""
        text = "\n".join(f"{name} {numel}" for name, numel in zip(self.names, self.numels, strict=True))
        return xxhash.xxh3_128_digest(text.encode())

    def ranges(self, *, rank: int, ranks: int) -> list[tuple[int, int]]:
        """A rank's part of every tensor, as [start, stop) in the mirror."""
        parts = []
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            start, stop = shard_range(numel, rank=rank, ranks=ranks)
            parts.append((offset + start, offset + stop))
        return parts

    def difference(self, other: Layout) -> str:
        """The first tensor that differs between two layouts, for an error text; empty when they are equal."""
        mine, theirs = (dict(zip(x.names, x.numels, strict=True)) for x in (self, other))
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                return f"{name}: {mine.get(name, 'no')} elements here, {theirs.get(name, 'no')} there"
        return ""

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map of this layout."""
        return {"names": list(self.names), "numels": list(self.numels)}

    @classmethod
    def from_wire(cls, wire: Any) -> Layout:
        """Decode. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"layout: {type(wire).__name__}, expected a map")
        names, numels = wire.get("names"), wire.get("numels")
        if not isinstance(names, list) or not all(isinstance(n, str) and len(n) <= MAX_NAME for n in names):
            raise MessageError("layout.names: expected a list of names")
        if not isinstance(numels, list) or not all(type(n) is int and n <= MAX_NUMEL for n in numels):
            raise MessageError(f"layout.numels: expected a list of integers up to {MAX_NUMEL}")
        if len(names) > MAX_TENSORS:
            raise MessageError(f"layout.names: {len(names)}, expected at most {MAX_TENSORS}")
        try:
            return cls(tuple(names), tuple(numels))
        except ValueError as error:
            raise MessageError(f"layout.{error}") from None
