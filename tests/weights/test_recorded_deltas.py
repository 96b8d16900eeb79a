"""Deltas of real training steps, recorded by bench/record_deltas.py."""

from __future__ import annotations

import numpy as np
import pytest

from lachesis_bench.delta import recorded, recorded_share
from lachesis_transport.weights.codec import DeltaWriter, FineBound, blocks, read_delta

RATES = ["1e-6", "1e-5", "1e-4"]


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_is_below_the_floor_of_changes_at_random_places(rate: str) -> None:
    figure = recorded_share(rate, recorded()[rate])
    assert figure.figure == f"delta.floor_share_recorded_lr{rate}"
    assert figure.ratio is not None
    assert figure.ratio > 1.05


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_comes_through(rate: str) -> None:
    old, new = (np.concatenate(parts) for parts in zip(*recorded()[rate].values(), strict=True))
    cuts = list(blocks(len(old)))
    fine = FineBound()
    for _ in range(2):
        base, target = old.copy(), old.copy()
        writer = DeltaWriter(blocks=len(cuts), fine=fine)
        assert sum(writer.add(base[a:b], new[a:b]) for a, b in cuts) == np.count_nonzero(old != new)
        read_delta(writer.finish(), ranges=[(0, len(old))]).apply(target)
        np.testing.assert_array_equal(target, new)
        np.testing.assert_array_equal(base, new)
        fine.learn()
    assert fine.bits > 0


def test_more_changes_at_a_higher_learning_rate() -> None:
    slices = {rate: [s for s in slices.values() if len(s[0]) > 10_000] for rate, slices in recorded().items()}
    changed = [np.mean(np.concatenate([old != new for old, new in slices[rate]])) for rate in RATES]
    assert 0.0005 < changed[0] < changed[1] < changed[2]
