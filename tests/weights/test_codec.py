from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_transport.weights.codec import (
    CodecError,
    DeltaWriter,
    changed_positions,
    first_non_finite,
    read_delta,
)

SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0xFFFF, 0x3F80], np.uint16)


def encode(base: list[np.ndarray], new: list[np.ndarray]) -> bytes:
    writer = DeltaWriter(tensors=len(base))
    for i, (b, n) in enumerate(zip(base, new, strict=True)):
        writer.add(i, b, n, positions=changed_positions(b, n))
    return writer.finish()


def round_trip(base: list[np.ndarray], new: list[np.ndarray]) -> bytes:
    payload = encode(base, new)
    target = [b.copy() for b in base]
    patch = read_delta(payload, sizes=[len(b) for b in base])
    patch.apply(target)
    for t, n in zip(target, new, strict=True):
        np.testing.assert_array_equal(t, n)
    return payload


def changed(base: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A step of training: a share of the weights moves by a few ULPs."""
    at = rng.random(len(base)) < share
    steps = rng.geometric(0.9, len(base)) * rng.choice([-1, 1], len(base))
    return np.where(at, base + steps.astype(np.int16).view(np.uint16), base)


def weights(n: int, rng: np.random.Generator) -> np.ndarray:
    return (rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.41, 0.43, 0.7, 1.0])
def test_round_trip_is_exact_at_every_density(share: float) -> None:
    rng = np.random.default_rng(1)
    base = [weights(n, rng) for n in (0, 1, 3, 63, 64, 65, 300_001, 1_000_000)]
    round_trip(base, [changed(b, share, rng) for b in base])


def test_tensors_of_mixed_densities_and_all_special_values() -> None:
    rng = np.random.default_rng(2)
    base = [weights(100_000, rng), np.tile(SPECIAL, 500), weights(50_000, rng), weights(7, rng), weights(400_000, rng)]
    new = [changed(base[0], 0.02, rng), rng.permutation(base[1]), weights(50_000, rng), base[3].copy(), base[4].copy()]
    new[4][399_999] ^= 0x8000
    round_trip(base, new)
    writer = DeltaWriter(tensors=5)
    for i, n in enumerate(new):
        writer.add_values(i, n)
    target = [np.zeros_like(b) for b in base]
    read_delta(writer.finish(), sizes=[len(b) for b in base]).apply(target)
    for t, n in zip(target, new, strict=True):
        np.testing.assert_array_equal(t, n)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bits_survive(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    base, new = [], []
    for n in data.draw(st.lists(st.integers(0, 700), max_size=5)):
        base.append(rng.integers(0, 1 << 16, n, dtype=np.uint16))
        share = data.draw(st.sampled_from([0.0, 0.005, 0.1, 0.5, 1.0]))
        new.append(np.where(rng.random(n) < share, rng.choice(SPECIAL, n), base[-1]))
    round_trip(base, new)


def test_changed_positions_of_unaligned_views() -> None:
    rng = np.random.default_rng(3)
    buffer = weights(10_001, rng)
    base = buffer[1:]
    new = base.copy()
    new[[0, 5, 9_999]] += 1
    assert changed_positions(base, new).tolist() == [0, 5, 9_999]
    with pytest.raises(ValueError, match="9999 elements, expected 10000"):
        changed_positions(base, new[1:])


def test_first_non_finite() -> None:
    bits = np.zeros(300_000, np.uint16)
    assert first_non_finite(bits) is None
    bits[280_000] = 0x7F7F
    assert first_non_finite(bits) is None
    bits[[270_000, 290_000]] = 0xFF80, 0x7FC0
    assert first_non_finite(bits) == 270_000


@pytest.mark.parametrize("share", [1e-3, 0.01, 0.023, 0.1, 0.3, 0.61])
def test_size_is_near_the_entropy_floor(share: float) -> None:
    rng = np.random.default_rng(4)
    base = weights(4_000_000, rng)
    new = changed(base, share, rng)
    payload = round_trip([base], [new])
    at = changed_positions(base, new)
    p = len(at) / len(base)
    counts = np.unique((new - base)[at], return_counts=True)[1] / len(at)
    bits = len(base) * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) - len(at) * (counts * np.log2(counts)).sum()
    assert bits / 8 / len(payload) > 0.85


def test_malformed_payloads_are_refused() -> None:
    rng = np.random.default_rng(5)
    base = [weights(5_000, rng), weights(1_000, rng)]
    new = [changed(base[0], 0.05, rng), changed(base[1], 0.6, rng)]
    payload = encode(base, new)
    with pytest.raises(CodecError, match="2 tensors, expected 3"):
        read_delta(payload, sizes=[5_000, 1_000, 1])
    with pytest.raises(CodecError):
        read_delta(payload, sizes=[1_000, 1_000])
    for cut in (0, 3, 4, 20, len(payload) - 1):
        with pytest.raises(CodecError):
            read_delta(payload[:cut], sizes=[5_000, 1_000])
    with pytest.raises(CodecError, match="bytes too many"):
        read_delta(payload + b"x", sizes=[5_000, 1_000])
    survived = 0
    for _ in range(2_000):
        broken = bytearray(payload)
        broken[rng.integers(len(broken))] ^= 1 << rng.integers(8)
        try:
            read_delta(bytes(broken), sizes=[5_000, 1_000])
            survived += 1
        except CodecError:
            pass
    assert survived < 2_000


def test_a_stream_cannot_claim_more_than_the_tensor_needs() -> None:
    bomb = zstandard.compress(b"\0" * (1 << 24))
    rng = np.random.default_rng(6)
    base = [weights(1_000, rng)]
    payload = encode(base, [changed(base[0], 0.05, rng)])
    header_size = int.from_bytes(payload[:4], "little")
    with pytest.raises(CodecError):
        read_delta(payload[: 4 + header_size] + bomb, sizes=[1_000])
