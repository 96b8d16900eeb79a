"""The checksum of a version: xxh3-128 over the xxh3-128 of every tensor's every shard range.

Each learner rank hashes only its own shard; whoever holds a whole mirror gets the same number by hashing the same
ranges. The number of shards is part of the checksum, so it travels with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from lachesis_transport.weights.layout import Layout, shard_range

DIGEST_BYTES = 16


def shard_digests(parts: Sequence[np.ndarray]) -> bytes:
    """16 bytes a tensor: the hash of this rank's part (uint16, contiguous, possibly empty) of each."""
    return b"".join(xxhash.xxh3_128_digest(part.data) for part in parts)


def combine(layout: Layout, digests: Sequence[bytes]) -> str:
    """The checksum (32 hex digits) from the `shard_digests` of all ranks, in rank order. Raises ValueError."""
    tensors = len(layout.names)
    for rank, part in enumerate(digests):
        if len(part) != DIGEST_BYTES * tensors:
            raise ValueError(f"digests[{rank}]: {len(part)} bytes, expected {DIGEST_BYTES * tensors}")
    digest = xxhash.xxh3_128(layout.digest)
    digest.update(len(digests).to_bytes(4, "little"))
    for part in digests:
        digest.update(part)
    return digest.hexdigest()


def mirror_checksum(layout: Layout, mirror: np.ndarray, *, shards: int) -> str:
    """The checksum of a whole mirror (uint16[layout.total]) as a learner of `shards` ranks would give it."""
    parts = []
    for rank in range(shards):
        pieces = []
        for offset, numel in zip(layout.offsets, layout.numels, strict=True):
            start, stop = shard_range(numel, rank=rank, ranks=shards)
            pieces.append(mirror[offset + start : offset + stop])
        parts.append(shard_digests(pieces))
    return combine(layout, parts)
