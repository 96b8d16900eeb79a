"""Deltas of real training steps, recorded by bench/record_deltas.py."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from lachesis_bench.delta import recorded, recorded_payload, recorded_share
from lachesis_transport.weights.codec import FINE, read_delta

RATES = ["1e-6", "1e-5", "1e-4"]


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_is_below_the_floor_of_changes_at_random_places(rate: str) -> None:
    figure = recorded_share(rate, recorded()[rate])
    assert figure.figure == f"delta.floor_share_recorded_lr{rate}"
    assert figure.ratio is not None
    assert figure.ratio > 1.05


@pytest.mark.parametrize("rate", RATES)
def test_a_real_delta_comes_through(rate: str) -> None:
    target, new = (np.concatenate(parts) for parts in zip(*recorded()[rate].values(), strict=True))
    payload = recorded_payload(recorded()[rate])
    header = msgpack.unpackb(payload[4 : 4 + int.from_bytes(payload[:4], "little")])
    assert FINE in [section["mode"] for section in header["sections"]]
    read_delta(payload, ranges=[(0, len(new))]).apply(target)
    np.testing.assert_array_equal(target, new)


def test_more_changes_at_a_higher_learning_rate() -> None:
    slices = {rate: [s for s in slices.values() if len(s[0]) > 10_000] for rate, slices in recorded().items()}
    changed = [np.mean(np.concatenate([old != new for old, new in slices[rate]])) for rate in RATES]
    assert 0.0005 < changed[0] < changed[1] < changed[2]
