"""What the encoders of several ranks send, against what one rank with all weights sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lachesis_learner import device_baseline
from lachesis_learner.shards import NonFiniteWeights, Shard, ShardEncoder
from lachesis_transport.weights.checksum import combine
from lachesis_transport.weights.layout import shard_range
from lachesis_transport.weights.mirror import Mirror

NAN = 0x7FC1


class Rank:
    """A learner rank as ZeRO-3 keeps it: of each tensor ceil(n / ranks) elements, padded at the end with NaN here."""

    def __init__(self, whole: dict[str, np.ndarray], *, rank: int, ranks: int, on_device: bool) -> None:
        self.ranges = {name: shard_range(len(bits), rank=rank, ranks=ranks) for name, bits in whole.items()}
        self.partitions = {}
        shards = []
        for name, bits in whole.items():
            start, stop = self.ranges[name]
            partition = torch.full((-(-len(bits) // ranks),), NAN, dtype=torch.int16)
            self.partitions[name] = partition
            flat = partition[: stop - start].view(torch.bfloat16)
            shards.append(Shard(name=name, flat=flat, start=start, numel=len(bits)))
        self.hold(whole)
        self.encoder = ShardEncoder(shards, rank=rank, ranks=ranks, on_device=on_device)

    def hold(self, whole: dict[str, np.ndarray]) -> None:
        for name, (start, stop) in self.ranges.items():
            self.partitions[name][: stop - start] = torch.from_numpy(whole[name].view(np.int16))[start:stop]


def finite(random: np.random.Generator, numel: int) -> np.ndarray:
    bits = random.integers(1 << 16, size=numel, dtype=np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] &= 0x807F
    return bits


def moved(whole: dict[str, np.ndarray], random: np.random.Generator, share: float) -> dict[str, np.ndarray]:
    return {n: np.where(random.random(len(b)) < share, finite(random, len(b)), b) for n, b in whole.items()}


SIZES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 300_000)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9]), min_size=1, max_size=3),
    on_device=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
@example(sizes=[1, 3, 5], ranks=4, shares=[0.9], on_device=False, seed=0)  # fewer elements than ranks
@example(sizes=[300_001, 7], ranks=2, shares=[0.001, 0.9], on_device=True, seed=1)
def test_ranks_together_send_what_one_rank_sends(
    sizes: list[int], ranks: int, shares: list[float], on_device: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    whole = {f"w{i}": finite(random, numel) for i, numel in enumerate(sizes)}
    alone = Rank(whole, rank=0, ranks=1, on_device=False)
    several = [Rank(whole, rank=rank, ranks=ranks, on_device=on_device) for rank in range(ranks)]
    mirror, shared = Mirror(alone.encoder.layout), Mirror(alone.encoder.layout)
    for step, share in enumerate([None, *shares]):
        if share is not None:
            whole = moved(whole, random, share)
        for rank in (alone, *several):
            rank.hold(whole)
        one = alone.encoder.encode(anchor=step == 0)
        blobs = [rank.encoder.encode(anchor=step == 0) for rank in several]
        assert sum(blob.changed for blob in blobs) == one.changed
        assert sum(blob.total for blob in blobs) == one.total == sum(sizes)
        mirror.apply(one.payload, sizes=[len(one.payload)])
        payload = b"".join(bytes(blob.payload) for blob in blobs)
        shared.apply(payload, sizes=[len(blob.payload) for blob in blobs])
        np.testing.assert_array_equal(mirror.bits, np.concatenate([whole[n] for n in mirror.layout.names]))
        np.testing.assert_array_equal(shared.bits, mirror.bits)
        assert combine(shared.layout, [blob.checksums for blob in blobs]) == mirror.checksum(shards=ranks)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.02, 0.15, 0.5, 1.0])
def test_comparing_on_the_device_gives_the_same_bytes(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_baseline, "SPAN", 1 << 18)
    random = np.random.default_rng(3)
    whole = {"a": finite(random, 600_000), "b": finite(random, 5), "none": finite(random, 0)}
    host, device = (Rank(whole, rank=0, ranks=1, on_device=on) for on in (False, True))
    assert bytes(host.encoder.encode(anchor=True).payload) == bytes(device.encoder.encode(anchor=True).payload)
    for _ in range(2):
        whole = moved(whole, random, share)
        host.hold(whole)
        device.hold(whole)
        expected, got = host.encoder.encode(), device.encoder.encode()
        assert (bytes(got.payload), got.checksums, got.changed) == (
            bytes(expected.payload),
            expected.checksums,
            expected.changed,
        )


@pytest.mark.parametrize("on_device", [False, True])
def test_after_a_refused_step_an_anchor_can_be_published(on_device: bool) -> None:
    random = np.random.default_rng(4)
    whole = {"a": finite(random, 200_000), "b": finite(random, 50)}
    rank = Rank(whole, rank=0, ranks=1, on_device=on_device)
    mirror = Mirror(rank.encoder.layout)
    anchor = rank.encoder.encode(anchor=True).payload
    mirror.apply(anchor, sizes=[len(anchor)])
    whole = moved(whole, random, 0.1)
    broken = {**whole, "b": whole["b"].copy()}
    broken["b"][17] = 0xFF80
    rank.hold(broken)
    with pytest.raises(NonFiniteWeights, match=r"^b\[17\]: -inf, expected a finite weight"):
        rank.encoder.encode()
    rank.hold(whole)
    with pytest.raises(ValueError, match="anchor: false, expected true: there is nothing to differ from"):
        rank.encoder.encode()
    payload = rank.encoder.encode(anchor=True).payload
    mirror.apply(payload, sizes=[len(payload)])
    np.testing.assert_array_equal(mirror.bits, np.concatenate([whole["a"], whole["b"]]))


@pytest.mark.parametrize("on_device", [False, True])
def test_going_on_from_published_weights(on_device: bool) -> None:
    random = np.random.default_rng(5)
    before = {"a": finite(random, 1000), "b": finite(random, 7)}
    after = moved(before, random, 0.05)
    rank = Rank(after, rank=1, ranks=2, on_device=on_device)
    rank.encoder.rebase(np.concatenate([before["a"][500:], before["b"][4:]]))
    blob = rank.encoder.encode()
    changed = [int((before[name][start:] != after[name][start:]).sum()) for name, start in (("a", 500), ("b", 4))]
    assert (blob.changed, blob.total) == (sum(changed), 503)
    assert changed[0] > 0
