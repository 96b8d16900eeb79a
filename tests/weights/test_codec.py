from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgpack
import numba
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_transport.weights import kernels
from lachesis_transport.weights.codec import (
    BLOCK,
    DENSE,
    FINE,
    SPARSE,
    SPARSE_8,
    STRETCH,
    STRETCHES,
    CodecError,
    DeltaWriter,
    NonFiniteBits,
    blocks,
    fine_bound,
    first_non_finite,
    read_delta,
    stretches,
)

SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0xFFFF, 0x3F80], np.uint16)


def ranges(tensors: list[np.ndarray]) -> list[tuple[int, int]]:
    return list(pairwise(np.cumsum([0, *(len(t) for t in tensors)]).tolist()))


def encode(base: list[np.ndarray], new: list[np.ndarray], *, fine: int = 0) -> bytes:
    writer = DeltaWriter(blocks=sum(1 for b in base for _ in blocks(len(b))), fine=fine)
    for b, n in zip(base, new, strict=True):
        copy = b.copy()
        moved = sum(writer.add(copy[start:stop], n[start:stop]) for start, stop in blocks(len(b)))
        assert moved == np.count_nonzero(b != n)
        np.testing.assert_array_equal(copy, n)
    return writer.finish()


def round_trip(base: list[np.ndarray], new: list[np.ndarray], *, fine: int = 0) -> bytes:
    payload = encode(base, new, fine=fine)
    target = np.concatenate(base)
    patch = read_delta(payload, ranges=ranges(base))
    patch.apply(target)
    np.testing.assert_array_equal(target, np.concatenate(new))
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
    writer = DeltaWriter(blocks=sum(1 for n in new for _ in blocks(len(n))))
    for n in new:
        for start, stop in blocks(len(n)):
            writer.add_values(n[start:stop])
    target = np.zeros(sum(len(n) for n in new), np.uint16)
    patch = read_delta(writer.finish(), ranges=ranges(new))
    patch.apply(target)
    np.testing.assert_array_equal(target, np.concatenate(new))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bits_survive(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    base, new = [np.empty(0, np.uint16)], [np.empty(0, np.uint16)]
    for n in data.draw(st.lists(st.integers(0, 700), max_size=5)):
        base.append(rng.integers(0, 1 << 16, n, dtype=np.uint16))
        share = data.draw(st.sampled_from([0.0, 0.005, 0.1, 0.5, 1.0]))
        new.append(np.where(rng.random(n) < share, rng.choice(SPECIAL, n), base[-1]))
    round_trip(base, new, fine=data.draw(st.sampled_from([0, 1, 0x3000, 0x7F80, 0x7FFF, 0x8000])))


def stepped(base: np.ndarray, size: float, rng: np.random.Generator) -> np.ndarray:
    """Weights that moved by about `size` each, whatever they were, and were rounded to bf16 at random."""
    values = (base.astype(np.uint32) << 16).view(np.float32)
    moved = values + np.float32(size) * rng.standard_normal(len(base)).astype(np.float32)
    return ((moved.view(np.uint32) + rng.integers(0, 1 << 16, len(base), dtype=np.uint32)) >> 16).astype(np.uint16)


def sampled_bound(base: list[np.ndarray], new: list[np.ndarray]) -> int:
    """As the encoder of these tensors finds it."""
    cuts = ranges(base)
    return fine_bound(
        (b[i - start : j - start], n[i - start : j - start])
        for b, n, (start, stop) in zip(base, new, cuts, strict=True)
        for i, j in stretches(start, stop, total=cuts[-1][1])
    )


def test_a_bound_makes_the_delta_of_a_step_smaller() -> None:
    rng = np.random.default_rng(9)
    base = [weights(n, rng) for n in (0, 900_000, 1, 130_000, 70)]
    new = [stepped(b, 1e-5, rng) for b in base]
    bound = sampled_bound(base, new)
    assert bound > 0
    assert len(round_trip(base, new, fine=bound)) < 0.9 * len(round_trip(base, new))
    assert sampled_bound(base, base) == 0
    assert sampled_bound(base, [changed(b, 0.01, rng) for b in base]) == 0, "changes at random places have no bound"
    assert fine_bound([]) == 0


def test_the_sample_lies_evenly_over_all_tensors() -> None:
    rng = np.random.default_rng(11)
    for total in (1, 1_000, 20_000, 1_000_000, 300_000_000):
        cuts = sorted({0, total, *rng.integers(0, total, 20).tolist()})
        found = [part for a, b in pairwise(cuts) for part in stretches(a, b, total=total)]
        assert [a for a, _ in found] == [a for a, _ in stretches(0, total, total=total)]
        assert all(0 < b - a <= STRETCH for a, b in found)
        assert 1 <= len(found) <= STRETCHES + 1
        assert sum(b - a for a, b in found) <= total // 16 + STRETCH


def test_every_fine_weight_is_found_whatever_the_length() -> None:
    rng = np.random.default_rng(10)
    at = np.empty(1_000, np.uint32)
    coarse = np.empty(1_000, np.uint32)
    for length in (*range(1, 70), 127, 128, 129, 900):
        bits = rng.integers(0, 1 << 16, length + 1, dtype=np.uint16)[1:]
        for bound in (0, 1, 0x4000, 0x8000):
            below = bits & 0x7FFF < bound
            assert at[: kernels.find_fine(bits, bound, at)].tolist() == np.flatnonzero(below).tolist()
            some = np.flatnonzero(rng.random(length) < 0.5).astype(np.uint32)
            kept = kernels.leave_out_fine(bits, bound, some, coarse)
            assert coarse[:kept].tolist() == [i for i in some.tolist() if not below[i]]


def test_changes_of_unaligned_views_and_of_any_length() -> None:
    rng = np.random.default_rng(3)
    at = np.empty(1_000, np.uint32)
    for length in (*range(1, 70), 127, 128, 129, 900):
        base = weights(length + 1, rng)[1:]
        for share in (0.0, 0.1, 1.0):
            new = np.where(rng.random(length) < share, base ^ 1, base)
            found = kernels.find_changes(base, new, at)
            assert at[:found].tolist() == np.flatnonzero(base != new).tolist()


def test_the_writer_takes_its_blocks_and_no_others() -> None:
    ones = np.ones(4, np.uint16)
    writer = DeltaWriter(blocks=1)
    with pytest.raises(ValueError, match="4 and 3 elements, expected the same, from 1 to 131072"):
        writer.add(ones, ones[1:])
    with pytest.raises(ValueError, match="131073 elements, expected 1 to 131072"):
        writer.add_values(np.zeros(BLOCK + 1, np.uint16))
    assert writer.add(np.zeros(4, np.uint16), ones) == 4
    with pytest.raises(ValueError, match="one more than the 1 announced"):
        writer.add_values(ones)


@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("bound", [0, 0x3F00])
def test_what_is_not_finite_is_refused(share: float, bound: int) -> None:
    rng = np.random.default_rng(8)
    base = weights(10_000, rng)
    new = changed(base, share, rng)
    new[[7_000, 8_000]] = 0x7F80, 0xFFC1
    writer = DeltaWriter(blocks=1, finite=True, fine=bound)
    with pytest.raises(NonFiniteBits) as refused:
        writer.add(base, new)
    assert refused.value.index in ((7_000, 8_000) if bound else (7_000,))


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
    at = np.flatnonzero(base != new)
    p = len(at) / len(base)
    counts = np.unique((new - base)[at], return_counts=True)[1] / len(at)
    bits = len(base) * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) - len(at) * (counts * np.log2(counts)).sum()
    assert bits / 8 / len(payload) > 0.85


def test_malformed_payloads_are_refused() -> None:
    rng = np.random.default_rng(5)
    base = [weights(5_000, rng), weights(1_000, rng)]
    new = [changed(base[0], 0.05, rng), changed(base[1], 0.6, rng)]
    payload = encode(base, new)
    with pytest.raises(CodecError, match="2 blocks, expected 3"):
        read_delta(payload, ranges=[(0, 5_000), (5_000, 6_000), (6_000, 6_001)])
    with pytest.raises(CodecError):
        read_delta(payload, ranges=[(0, 1_000), (1_000, 2_000)])
    for cut in (0, 3, 4, 20, len(payload) - 1):
        with pytest.raises(CodecError):
            read_delta(payload[:cut], ranges=[(0, 5_000), (5_000, 6_000)])
    with pytest.raises(CodecError, match="bytes too many"):
        read_delta(payload + b"x", ranges=[(0, 5_000), (5_000, 6_000)])
    survived = 0
    for _ in range(2_000):
        broken = bytearray(payload)
        broken[rng.integers(len(broken))] ^= 1 << rng.integers(8)
        try:
            read_delta(bytes(broken), ranges=[(0, 5_000), (5_000, 6_000)])
            survived += 1
        except CodecError:
            pass
    assert survived < 2_000


@pytest.mark.parametrize(
    "lie",
    [
        {"modes": None},
        {"modes": 7},
        {"modes": [0]},
        {"modes": "\0"},
        {"fine": True},
        {"fine": -1},
        {"fine": 0.5},
        {"fine": 0x8001},
        {"sections": None},
        {"sections": [{"mode": 1, "count": 1, "raw": [], "packed": []}]},
        {"sections": [{"mode": [1], "count": 1, "raw": [1] * 5, "packed": [1] * 5}]},
        {"sections": [{"mode": 1, "count": 2**64 - 1, "raw": [2**64 - 1] * 5, "packed": [2**64 - 1] * 5}]},
        {"sections": [{"mode": 1, "count": 1, "raw": [1] * 1_000, "packed": [1] * 1_000}]},
    ],
)
def test_a_header_of_other_types_is_refused(lie: dict[str, object]) -> None:
    header = msgpack.packb({"format": 3, "fine": 0, "modes": b"\1", "sections": [], **lie})
    with pytest.raises(CodecError):
        read_delta(len(header).to_bytes(4, "little") + header, ranges=[(0, 1_000)])


def test_a_stream_cannot_claim_more_than_the_tensor_needs() -> None:
    bomb = zstandard.compress(b"\0" * (1 << 24))
    rng = np.random.default_rng(6)
    base = [weights(1_000, rng)]
    payload = encode(base, [changed(base[0], 0.05, rng)])
    header_size = int.from_bytes(payload[:4], "little")
    with pytest.raises(CodecError):
        read_delta(payload[: 4 + header_size] + bomb, ranges=[(0, 1_000)])


@pytest.mark.parametrize("damage", [0, 100])
def test_torn_files_of_compiled_loops_cost_no_more_than_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: int
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    signature = numba.types.int64(numba.types.int64)

    def add_one(number):  # type: ignore[no-untyped-def]
        return number + 1

    assert kernels._compiled(signature)(add_one)(1) == 2
    files = list(tmp_path.rglob("*.nb[ic]"))
    assert len(files) == 2
    for path in files:
        path.write_bytes(path.read_bytes()[:damage])
    assert kernels._compiled(signature)(add_one)(1) == 2


def test_hostile_streams_never_write_outside() -> None:
    """Sound zstd frames with any content: refused, or applied inside the ranges alone."""
    rng = np.random.default_rng(7)
    base = [weights(5_000, rng), weights(1_000, rng), weights(20_000, rng)]
    new = [changed(base[0], 0.05, rng), rng.permutation(base[1]), base[2].copy()]
    new[2][[100, 12_000]] += 1
    base.append(np.where(rng.random(3_000) < 0.1, 0x0100, weights(3_000, rng)).astype(np.uint16))
    new.append(
        np.where(base[3] == 0x0100, rng.integers(0, 1 << 16, 3_000, dtype=np.uint16), changed(base[3], 0.01, rng))
    )
    payload = encode(base, new, fine=0x0200)
    size = int.from_bytes(payload[:4], "little")
    header = msgpack.unpackb(payload[4 : 4 + size])
    assert sorted(s["mode"] for s in header["sections"]) == [SPARSE, SPARSE_8, DENSE, FINE]
    streams, rest = [], payload[4 + size :]
    for length in (n for s in header["sections"] for n in s["packed"]):
        streams.append(np.frombuffer(zstandard.decompress(rest[:length]), np.uint8).copy())
        rest = rest[length:]
    guarded = [(100, 5_100), (5_200, 6_200), (6_300, 26_300), (26_400, 29_400)]
    outcomes = {"refused": 0, "applied": 0}
    for _ in range(3_000):
        broken = [s.copy() for s in streams]
        modes = bytearray(header["modes"])
        counts = [s["count"] for s in header["sections"]]
        kind = rng.integers(7)
        which = broken[rng.integers(len(broken))]
        if kind == 0 and len(which):
            which[rng.integers(len(which), size=rng.integers(1, 4))] = rng.choice([0, 1, 15, 240, 254, 255])
        elif kind == 1:
            which[:] = rng.integers(256, size=len(which))
        elif kind == 2:
            i = rng.integers(len(broken))
            broken[i] = broken[i][: rng.integers(len(broken[i]) + 1)]
        elif kind == 3:
            i = rng.integers(len(broken))
            broken[i] = np.concatenate([broken[i], rng.integers(256, size=rng.integers(1, 9)).astype(np.uint8)])
        elif kind == 4:
            rng.shuffle(modes)
        elif kind == 5:
            header["fine"] = int(rng.integers(0x8002))
        else:
            counts[rng.integers(4)] += rng.integers(-2, 3)
        packed = iter([zstandard.compress(s.data) for s in broken])
        raw = iter([len(s) for s in broken])
        body, sections = [], []
        for section, count in zip(header["sections"], counts, strict=True):
            mine = [next(packed) for _ in section["raw"]]
            lengths = [next(raw) for _ in mine]
            sections.append(section | {"count": int(count), "raw": lengths, "packed": [len(p) for p in mine]})
            body += mine
        top = msgpack.packb(header | {"modes": bytes(modes), "sections": sections})
        target = np.full(29_500, 0x1234, np.uint16)
        for (start, stop), tensor in zip(guarded, base, strict=True):
            target[start:stop] = tensor
        try:
            patch = read_delta(b"".join([len(top).to_bytes(4, "little"), top, *body]), ranges=guarded)
        except CodecError:
            outcomes["refused"] += 1
            continue
        patch.apply(target)
        for start, stop in [(0, 100), (5_100, 5_200), (6_200, 6_300), (26_300, 26_400), (29_400, 29_500)]:
            assert (target[start:stop] == 0x1234).all()
        outcomes["applied"] += 1
    assert min(outcomes.values()) > 100, outcomes
