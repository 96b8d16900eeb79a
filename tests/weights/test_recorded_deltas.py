"""Deltas of real training steps, recorded by bench/record_deltas.py."""

from __future__ import annotations

import numpy as np
import pytest

from lachesis_bench.delta import recorded, recorded_share
from lachesis_transport.weights.codec import DeltaWriter, blocks, read_delta

RATES = ["1e-6", "1e-5", "1e-4"]


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_is_near_its_entropy_floor(rate: str) -> None:
    figure = recorded_share(rate, recorded()[rate])
    assert figure.figure == f"delta.floor_share_recorded_lr{rate}"
    assert figure.ratio is not None
    assert figure.ratio > 0.85


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_comes_through(rate: str) -> None:
    rng = np.random.default_rng(0)
    parts = list(recorded()[rate].values())
    differences = np.concatenate(parts)
    old = rng.integers(0, 1 << 16, len(differences), dtype=np.uint16)
    base, new = old.copy(), old + differences
    cuts = [(a, b) for a, b in blocks(len(base))]
    writer = DeltaWriter(blocks=len(cuts))
    assert sum(writer.add(base[a:b], new[a:b]) for a, b in cuts) == np.count_nonzero(differences)
    read_delta(writer.finish(), ranges=[(0, len(old))]).apply(old)
    np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(base, new)


def test_more_changes_at_a_higher_learning_rate() -> None:
    shares = {rate: [d for d in slices.values() if len(d) > 10_000] for rate, slices in recorded().items()}
    changed = [np.mean(np.concatenate(shares[rate]) != 0) for rate in RATES]
    assert 0.0005 < changed[0] < changed[1] < changed[2]
