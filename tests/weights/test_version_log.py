from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from history import LAYOUT, History, fold

from lachesis_transport.weights.checksum import combine, mirror_checksum, shard_digests
from lachesis_transport.weights.layout import Layout, shard_range
from lachesis_transport.weights.mirror import Mirror
from lachesis_transport.weights.version_log import Step, VersionLog


def follow(log: VersionLog, mirror: Mirror, steps: Sequence[Step], *, size: int = 100) -> None:
    """Fetch and apply steps the way a joiner does, in small pieces."""
    for step in steps:
        total = b""
        while len(total) < step.bytes:
            piece = log.read(
                "r", version=step.version, anchor=step.parent is None, offset=len(total), size=size, now=0.0
            )
            assert piece is not None
            total += bytes(piece)
        if step.parent is None:
            mirror.bits[:] = np.frombuffer(total, np.uint16)
        else:
            mirror.apply(total, sizes=step.sizes)
        assert mirror.checksum(shards=step.shards) == step.checksum


def test_who_reads_the_mirror_itself_holds_it_like_any_reader() -> None:
    history, log = History(), VersionLog(LAYOUT, limit=4)
    assert not log.pin("disk", until=math.inf)
    log.append(history.entry(0))
    entries = log.begin_fold(now=0.0)
    assert not log.pin("disk", until=math.inf)
    log.fold(entries)
    log.end_fold(entries)
    assert log.pin("disk", until=math.inf)
    for version in (1, 2):
        log.append(history.entry(version))
        assert not fold(log, now=1e9)
    assert log.pinned("disk")
    log.append(history.entry(3))  # more than half of what the log keeps waits
    assert fold(log, now=1e9)
    assert not log.pinned("disk")
    assert log.pin("disk", until=math.inf)
    log.append(history.entry(4))
    log.release("disk")
    assert fold(log, now=1e9)


def test_shard_ranges_cover_each_element_once() -> None:
    for numel in (0, 1, 2, 7, 8, 1000):
        for ranks in (1, 2, 3, 8):
            parts = [shard_range(numel, rank=r, ranks=ranks) for r in range(ranks)]
            assert [i for a, b in parts for i in range(a, b)] == list(range(numel))


def test_ranks_together_hash_what_a_mirror_hashes() -> None:
    bits = np.arange(LAYOUT.total, dtype=np.uint16)
    checksums = set()
    for ranks in (1, 2, 3):
        digests = [
            shard_digests([bits[a:b] for a, b in LAYOUT.ranges(rank=rank, ranks=ranks)]) for rank in range(ranks)
        ]
        assert combine(LAYOUT, digests) == mirror_checksum(LAYOUT, bits, shards=ranks)
        checksums.add(combine(LAYOUT, digests))
    assert len(checksums) == 3
    before = mirror_checksum(LAYOUT, bits, shards=2)
    bits[500] ^= 1
    assert mirror_checksum(LAYOUT, bits, shards=2) != before
    with pytest.raises(ValueError, match=r"digests\[0\]: 16 bytes, expected 48"):
        combine(LAYOUT, [b"x" * 16])


def test_layouts_say_where_they_differ() -> None:
    other = Layout.of([("a", 37), ("b", 999), ("empty", 0)])
    assert LAYOUT.difference(other) == "b: 1000 elements here, 999 there"
    assert LAYOUT.difference(Layout.from_wire(LAYOUT.to_wire())) == ""
    assert LAYOUT.offsets == (0, 37, 1037)


def test_a_reader_gets_deltas_while_they_are_kept_and_an_anchor_else() -> None:
    history, log = History(), VersionLog(LAYOUT, limit=4)
    assert log.plan("r", checksum="", now=0.0) is None
    for version in range(8):
        log.append(history.entry(version))
        assert fold(log)
    assert not fold(log)
    for held, first in ((7, None), (6, 7), (4, 5), (3, 4), (2, "anchor"), (0, "anchor")):
        mirror = Mirror(LAYOUT)
        mirror.bits[:] = history.weights[held]
        plan = log.plan("r", checksum=mirror.checksum(shards=2), now=0.0)
        assert plan is not None
        assert plan.held == (None if first == "anchor" else held)
        assert [s.version for s in plan.steps] == ([7] if first == "anchor" else list(range(held + 1, 8)))
        follow(log, mirror, plan.steps)
        np.testing.assert_array_equal(mirror.bits, history.weights[7])


def test_deltas_that_are_larger_than_the_weights_are_not_worth_it() -> None:
    history, log = History(share=0.9), VersionLog(LAYOUT, limit=4)
    for version in range(4):
        log.append(history.entry(version))
        fold(log)
    plan = log.plan("r", checksum=mirror_checksum(LAYOUT, history.weights[0], shards=2), now=0.0)
    assert plan is not None
    assert [s.parent for s in plan.steps] == [None]


def test_a_pinned_mirror_waits_while_deltas_pile_up_to_a_limit() -> None:
    history, log = History(share=0.0), VersionLog(LAYOUT, limit=4, lease_seconds=30.0)
    log.append(history.entry(0))
    fold(log)
    plan = log.plan("r", checksum="unknown", now=0.0)
    assert plan is not None
    for version in (1, 2):
        log.append(history.entry(version))
        assert not fold(log, now=1.0)
    mirror = Mirror(LAYOUT)
    follow(log, mirror, plan.steps)
    plan = log.plan("r", checksum=plan.steps[0].checksum, now=1.0)
    assert plan is not None
    follow(log, mirror, plan.steps)
    np.testing.assert_array_equal(mirror.bits, history.weights[2])
    assert fold(log, now=100.0)
    log.plan("r", checksum="unknown", now=100.0)
    for version in (3, 4):
        log.append(history.entry(version))
        assert not fold(log, now=100.0)
    log.append(history.entry(5))
    assert fold(log, now=100.0)  # too many: the reader has to start again
    assert log.read("r", version=2, anchor=True, offset=0, size=9, now=100.0) is None


def test_a_release_lets_the_mirror_go_on() -> None:
    history, log = History(), VersionLog(LAYOUT)
    log.append(history.entry(0))
    fold(log)
    log.plan("r", checksum="unknown", now=0.0)
    log.append(history.entry(1))
    assert not fold(log)
    log.release("r")
    assert fold(log)


def test_what_arrives_during_a_fold_is_folded_next() -> None:
    history, log = History(), VersionLog(LAYOUT)
    log.append(history.entry(0))
    entries = log.begin_fold(now=0.0)
    log.append(history.entry(1))
    log.append(history.entry(3, anchor=True))
    log.fold(entries)
    log.end_fold(entries)
    assert log.plan("r", checksum="unknown", now=0.0) is None  # an anchor has to be folded first
    assert fold(log)
    plan = log.plan("r", checksum="unknown", now=0.0)
    assert plan is not None
    mirror = Mirror(LAYOUT)
    follow(log, mirror, plan.steps)
    np.testing.assert_array_equal(mirror.bits, history.weights[3])


def test_a_fold_keeps_nobody_waiting_who_follows_by_deltas() -> None:
    history, log = History(), VersionLog(LAYOUT)
    log.append(history.entry(0))
    fold(log)
    log.append(history.entry(1))
    entries = log.begin_fold(now=0.0)
    held = mirror_checksum(LAYOUT, history.weights[0], shards=2)
    plan = log.plan("r", checksum=held, now=0.0)
    assert plan is not None
    assert (plan.held, [s.version for s in plan.steps]) == (0, [1])
    mirror = Mirror(LAYOUT)
    mirror.bits[:] = history.weights[0]
    follow(log, mirror, plan.steps)
    np.testing.assert_array_equal(mirror.bits, history.weights[1])
    assert log.plan("s", checksum="unknown", now=0.0) is None
    log.fold(entries)
    log.end_fold(entries)


def test_an_anchor_in_between_replaces_everything() -> None:
    history, log = History(), VersionLog(LAYOUT)
    for version in range(3):
        log.append(history.entry(version))
        fold(log)
    log.append(history.entry(5, anchor=True))
    held = mirror_checksum(LAYOUT, history.weights[2], shards=2)
    assert log.plan("r", checksum=held, now=0.0) is None
    fold(log)
    plan = log.plan("r", checksum=held, now=0.0)
    assert plan is not None
    assert [s.parent for s in plan.steps] == [None]
    mirror = Mirror(LAYOUT)
    follow(log, mirror, plan.steps)
    np.testing.assert_array_equal(mirror.bits, history.weights[5])


def test_what_does_not_follow_is_refused() -> None:
    history, log = History(), VersionLog(LAYOUT)
    with pytest.raises(ValueError, match="parent: 0, expected the newest version None"):
        log.append(history.entry(1))
    log.append(history.entry(0))
    with pytest.raises(ValueError, match="version: 0, expected more than 0"):
        log.append(history.entry(0))
    with pytest.raises(ValueError, match="parent: 1, expected the newest version 0"):
        log.append(history.entry(2))


def test_large_deltas_wait_for_no_reader() -> None:
    history, log = History(share=0.9), VersionLog(LAYOUT)
    for version in range(20):
        log.append(history.entry(version))
        fold(log, now=float(version))
        assert log.plan("slow", checksum="", now=float(version)) is not None  # pins the mirror for 30 s
        assert sum(len(entry.payload) for entry in log._deltas) <= 2 * log.nbytes
