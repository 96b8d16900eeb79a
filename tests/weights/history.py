"""A small model's random versions and their entries, for tests of the version log."""

from __future__ import annotations

import numpy as np
import torch

from lachesis_learner.shards import Shard, ShardEncoder
from lachesis_transport.weights.checksum import mirror_checksum
from lachesis_transport.weights.layout import Layout, shard_range
from lachesis_transport.weights.version_log import Entry, VersionLog, entry_of

LAYOUT = Layout.of([("b", 1_000), ("a", 37), ("empty", 0)])
FINITE = 0x7F80
"""Bits of bf16 below this are finite."""


def payloads(old: np.ndarray | None, new: np.ndarray, *, ranks: int) -> list[bytes]:
    """What the ranks of a learner encode; without `old` an anchor."""
    parts = []
    for rank in range(ranks):
        shards = []
        for name, numel, offset in zip(LAYOUT.names, LAYOUT.numels, LAYOUT.offsets, strict=True):
            start, stop = shard_range(numel, rank=rank, ranks=ranks)
            bits = new[offset + start : offset + stop].copy()
            flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            shards.append(Shard(name=name, flat=flat, start=start, numel=numel))
        encoder = ShardEncoder(shards, rank=rank, ranks=ranks)
        if old is not None:
            encoder.rebase(np.concatenate([old[a:b] for a, b in LAYOUT.ranges(rank=rank, ranks=ranks)]))
        parts.append(bytes(encoder.encode(anchor=old is None).payload))
    return parts


class History:
    """Random weights of versions 0, 1, ... and their entries."""

    def __init__(self, *, ranks: int = 2, share: float = 0.01) -> None:
        self.rng = np.random.default_rng(0)
        self.ranks, self.share = ranks, share
        self.weights = [self._random(LAYOUT.total)]

    def entry(self, version: int, *, anchor: bool = False) -> Entry:
        """The version as a delta to the one before; version 0 is an anchor."""
        while len(self.weights) <= version:
            new = self.weights[-1].copy()
            at = self.rng.random(len(new)) < self.share
            at[0] = True
            new[at] = self._random(int(at.sum())) if self.share > 0.5 else (new[at] + 1) % FINITE
            self.weights.append(new)
        new = self.weights[version]
        anchor = anchor or version == 0
        return entry_of(
            version=version,
            parent=None if anchor else version - 1,
            checksum=mirror_checksum(LAYOUT, new, shards=self.ranks),
            payloads=payloads(None if anchor else self.weights[version - 1], new, ranks=self.ranks),
        )

    def _random(self, count: int) -> np.ndarray:
        return self.rng.integers(0, FINITE, count, dtype=np.uint16)


def fold(log: VersionLog, *, now: float = 0.0) -> bool:
    """Bring the log's mirror up to date, if it can be; whether it was."""
    entries = log.begin_fold(now=now)
    if entries:
        assert log.plan("r", checksum="", now=now) is None
        log.fold(entries)
        log.end_fold(entries)
    return bool(entries)
