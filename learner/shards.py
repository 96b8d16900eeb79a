"""What every learner rank contributes to a publication: the exact change of its own shard of the bf16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import xxhash

from lachesis_learner.device_baseline import Bits, DeviceBaseline, WholeBits
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.weights.checksum import DIGEST_BYTES, shard_digests
from lachesis_transport.weights.codec import DeltaWriter, NonFiniteBits, blocks, fine_bound, first_non_finite, stretches
from lachesis_transport.weights.layout import Layout, shard_range


class NonFiniteWeights(ValueError):
    """A weight is NaN or infinite; the text names the tensor, the flat index and the value. Nothing was encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of one tensor."""

    name: str
    """Name as in the Hugging Face checkpoint's safetensors; a tied lm_head never appears."""
    flat: torch.Tensor
    """bf16[n]: the valid elements of this rank's part (no padding); n may be 0. May be a view of live weights, on any
    device: it is read anew at each `encode`."""
    start: int
    """Index of flat[0] in the flattened whole tensor: rank * ceil(numel / ranks), at most numel."""
    numel: int
    """Elements of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBlob:
    """What one rank contributes to one version."""

    rank: int
    ranks: int
    anchor: bool
    """True: values of every element. False: the exact difference to the previous `encode`."""
    checksums: bytes
    """16 bytes (xxh3-128) a tensor, in layout order, over this rank's part after the change."""
    changed: int
    """Elements of this shard whose bits changed (an anchor: all)."""
    total: int
    """Elements of this shard."""
    payload: bytes | memoryview
    """Encoded elements (lachesis_transport.weights.codec)."""

    def to_wire(self) -> bytes:
        """The bytes that travel to rank 0."""
        header = pack(
            {
                "rank": self.rank,
                "ranks": self.ranks,
                "anchor": self.anchor,
                "checksums": self.checksums,
                "changed": self.changed,
                "total": self.total,
            }
        )
        return b"".join([len(header).to_bytes(4, "little"), header, self.payload])

    @classmethod
    def from_wire(cls, wire: bytes | memoryview) -> ShardBlob:
        """Decode and check sizes; the payload stays a view. Raises MessageError."""
        view = memoryview(wire).cast("B")
        size = int.from_bytes(view[:4], "little")
        if len(view) < 4 + size:
            raise MessageError(f"blob: {len(view)} bytes, expected at least {4 + size}")
        header = unpack(view[4 : 4 + size])
        blob = cls(
            rank=take(header, "rank", int),
            ranks=take(header, "ranks", int),
            anchor=take(header, "anchor", bool),
            checksums=take(header, "checksums", bytes),
            changed=take(header, "changed", int),
            total=take(header, "total", int),
            payload=view[4 + size :],
        )
        if not 0 <= blob.rank < blob.ranks:
            raise MessageError(f"rank: {blob.rank}, expected 0 to {blob.ranks - 1}")
        if len(blob.checksums) % DIGEST_BYTES:
            raise MessageError(f"checksums: {len(blob.checksums)} bytes, expected {DIGEST_BYTES} a tensor")
        return blob


class ShardEncoder:
    """Encodes a rank's shard of the bf16 weights against its own last published shard, of which it keeps a host copy.

    Weights on a GPU are compared there, with a second copy that stays there.

    Args:
        shards: this rank's part of every tensor, also where that part is empty; every rank names the same tensors.
        rank, ranks: this learner rank and their number.
        on_device: compare weights on the device where they are; None: those that are not on the host.

    Raises ValueError when a part is not bf16 or not where its rank's part lies.
    """

    def __init__(self, shards: Sequence[Shard], *, rank: int, ranks: int, on_device: bool | None = None) -> None:
        self.layout = Layout.of((s.name, s.numel) for s in shards)
        """Names and sizes of the whole tensors, sorted by name: the same on every rank."""
        self._rank, self._ranks = rank, ranks
        self._shards = sorted(shards, key=lambda shard: shard.name)
        for shard in self._shards:
            start, stop = shard_range(shard.numel, rank=rank, ranks=ranks)
            if shard.flat.dtype != torch.bfloat16 or shard.flat.shape != (stop - start,) or shard.start != start:
                raise ValueError(
                    f"{shard.name}: {shard.flat.dtype}{list(shard.flat.shape)} from {shard.start}, "
                    f"expected torch.bfloat16[{stop - start}] from {start} on rank {rank} of {ranks}"
                )
        self._on_device = [s.flat.device.type != "cpu" if on_device is None else on_device for s in self._shards]
        self._baseline: np.ndarray | None = None
        self._device_baselines: list[DeviceBaseline | None] = []
        ends = np.cumsum([0, *(len(s.flat) for s in self._shards)], dtype=np.int64).tolist()
        self._ranges = list(pairwise(ends))

    def rebase(self, bits: np.ndarray) -> None:
        """Make these weights, which another process published, what the next `encode` differs from.

        Args:
            bits: uint16, this rank's part of every tensor (the bits of bf16), end to end in layout order. Copied.
        """
        if bits.dtype != np.uint16 or bits.shape != (self._total,):
            raise ValueError(f"bits: {bits.dtype}{list(bits.shape)}, expected uint16[{self._total}]")
        self._begin_from(bits.copy())

    def encode(self, *, anchor: bool = False) -> ShardBlob:
        """Encode what changed since the last call and make it the new baseline. Blocking; CPU-bound.

        The first call must be an anchor, or follow `rebase`; the one after NonFiniteWeights, which names the tensor,
        too.
        """
        changed, checksums, payload = self._copy_all() if anchor else self._write_changes()
        return ShardBlob(
            rank=self._rank,
            ranks=self._ranks,
            anchor=anchor,
            checksums=checksums,
            changed=changed,
            total=self._total,
            payload=payload,
        )

    @property
    def _total(self) -> int:
        return self._ranges[-1][1] if self._ranges else 0

    def _writer(self, *, fine: int = 0) -> DeltaWriter:
        return DeltaWriter(blocks=sum(1 for a, b in self._ranges for _ in blocks(b - a)), finite=True, fine=fine)

    def _copy_all(self) -> tuple[int, bytes, bytes]:
        writer = self._writer()
        baseline = np.empty(self._total, np.uint16)
        for shard, (start, stop) in zip(self._shards, self._ranges, strict=True):
            copy = baseline[start:stop]
            copy[:] = _bits(shard.flat)
            at = first_non_finite(copy)
            if at is not None:
                raise _refusal(shard, at, copy[at])
            for begin, end in blocks(len(copy)):
                writer.add_values(copy[begin:end])
        self._begin_from(baseline)
        checksums = shard_digests([baseline[start:stop] for start, stop in self._ranges])
        return self._total, checksums, writer.finish()

    def _write_changes(self) -> tuple[int, bytes, bytes]:
        if self._baseline is None:
            raise ValueError("anchor: false, expected true: there is nothing to differ from")
        writer = self._writer(fine=fine_bound(self._sample(self._baseline)))
        changed = 0
        checksums = []
        for shard, device, (start, stop) in zip(self._shards, self._device_baselines, self._ranges, strict=True):
            baseline = self._baseline[start:stop]
            bits: Bits = WholeBits(_bits(shard.flat)) if device is None else device.changes()
            digest = xxhash.xxh3_128()
            for begin, end in blocks(len(baseline)):
                base = baseline[begin:end]
                new = bits.block(base, begin)
                try:
                    changed += writer.add(base, new)
                except NonFiniteBits as error:
                    self._baseline = None
                    raise _refusal(shard, begin + error.index, new[error.index]) from None
                digest.update(base.data)  # here it is still in the core's cache
            checksums.append(digest.digest())
        for device in self._device_baselines:
            if device is not None:
                device.follow()
        return changed, b"".join(checksums), writer.finish()

    def _sample(self, baseline: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Published and new bits here and there."""
        for shard, (start, stop) in zip(self._shards, self._ranges, strict=True):
            for a, b in stretches(start, stop, total=self._total):
                yield baseline[a:b], _bits(shard.flat[a - start : b - start])

    def _begin_from(self, baseline: np.ndarray) -> None:
        self._baseline = baseline
        self._device_baselines = [
            DeviceBaseline(shard.flat, baseline[start:stop]) if on_device else None
            for shard, on_device, (start, stop) in zip(self._shards, self._on_device, self._ranges, strict=True)
        ]


def _refusal(shard: Shard, at: int, bits: np.uint16) -> NonFiniteWeights:
    value = float(np.array(np.uint32(bits) << 16, np.uint32).view(np.float32))
    return NonFiniteWeights(
        f"{shard.name}[{shard.start + at}]: {value}, expected a finite weight; nothing was published"
    )


def _bits(flat: torch.Tensor) -> np.ndarray:
    return flat.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
