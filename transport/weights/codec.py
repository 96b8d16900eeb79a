"""Lossless delta codec for bf16 weights. Pure: arrays in, bytes out, and back.

Weights are looked at as uint16 bits, so NaN payloads, infinities, signed zeros and subnormals come through unchanged.
Tensors are cut into blocks of at most BLOCK elements. A delta holds, for each block in which something changed, either

- *sparse*: the gaps between changed positions, and at each the difference of the bits modulo 2^16 (for a small change
  of one weight that is the number of units in the last place, signed), or
- *dense*: the same difference for every element, zeros included (cheaper above `DENSE_SHARE` changed), or
- *values*: the bits themselves (anchors).

A step of training moves all weights about as far, so the smaller a weight is, and with it the unit in its last place,
the surer its bits change. Below a bound on the magnitude nearly all do: these *fine* weights of a sparse block, which a
receiver finds in what it holds, are encoded as a dense block of their own, and the block's gaps tell of the others
alone. The writer is given the bound, which `fine_bound` finds from a sample of the weights.

The blocks of one mode lie end to end. Gaps are bytes, 255 meaning "255 further, go on" (optimal for the geometric gaps
of random positions while most gaps are below 255; sparser blocks move their low 8 bits to a plane of their own, which
is independent of the high part). Differences are zigzag numbers: two nibbles a byte, 15 escaping to 15 + a byte in a
side stream, 255 there escaping to 16 bits in two planes. Each stream is then entropy-coded by zstd, whose block-wise
Huffman tables adapt to the density of each stretch; its match finder is kept small because the streams have no
repetitions worth finding.

    >>> writer = DeltaWriter(blocks=1)
    >>> writer.add(base, new)                                         # base now equals new; the number of changes
    >>> payload = writer.finish()
    >>> read_delta(payload, ranges=[(0, len(old))]).apply(old)        # and so does an older copy of base, bit for bit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zstandard

from lachesis_transport.frames import brief
from lachesis_transport.weights import kernels

FORMAT = 3
"""Version of the payload's layout."""

BLOCK = 1 << 17
"""Elements of a block: both copies and what is made of them stay in a core's cache."""

UNCHANGED, SPARSE, SPARSE_8, DENSE, VALUES = range(5)
"""How one block is encoded; SPARSE_8 keeps the low 8 bits of each gap in a plane of their own."""

FINE = 8
"""Added to one of the first three: the block's fine weights are encoded by themselves."""

FINE_SHARE = 0.125
"""Changed share of a block's fine weights from which that is done."""

FINE_GAIN = 0.05
"""Share of the bits for positions that a bound has to save."""

STRETCH, STRETCHES = 1 << 11, 64
"""Elements of a stretch of the sample, and the most stretches; they are a sixteenth of all at most."""

DENSE_SHARE = 0.35
"""Changed share above which every element's difference costs less than positions and differences of the changed."""

_MODES = {UNCHANGED, SPARSE, SPARSE_8, DENSE, VALUES, FINE + UNCHANGED, FINE + SPARSE, FINE + SPARSE_8}
_GAP_PLANES = {SPARSE: 1, SPARSE_8: 2, DENSE: 0, FINE: 0}
_CODE_STREAMS = 4  # nibbles, bytes, and the low and high bytes of 16-bit codes
_LONGEST_SPARSE_GAP = 700
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_checksum=False
)


class CodecError(ValueError):
    """A payload is malformed, or made for other tensors. Nothing was applied."""


class NonFiniteBits(ValueError):
    """A new weight is NaN or infinite: `index` in its block. What base and writer hold is in doubt."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def blocks(numel: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block of a tensor (or a rank's part of it); none of an empty one."""
    for start in range(0, numel, BLOCK):
        yield start, min(start + BLOCK, numel)


def first_non_finite(bits: np.ndarray) -> int | None:
    """Index of the first NaN or infinity among bf16 bits (uint16), or None."""
    for start, stop in blocks(len(bits)):
        bad = (bits[start:stop] & 0x7F80) == 0x7F80
        if bad.any():
            return start + int(np.argmax(bad))
    return None


def stretches(start: int, stop: int, *, total: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of those stretches of a sample of `total` elements that begin in this range, cut at its end."""
    step = max(total // STRETCHES, 16 * STRETCH)
    for at in range(start + -start % step, stop, step):
        yield at, min(at + STRETCH, stop)


def fine_bound(sample: Iterable[tuple[np.ndarray, np.ndarray]]) -> int:
    """The magnitude (bf16 bits without the sign) below which weights are *fine*; 0: none are.

    That of the fewest bits for positions: n·h(changed share), h the binary entropy, over the n fine weights and, for
    the gaps between the others that changed, over all; counted by exponent.

    Args:
        sample: old and new bits (contiguous uint16) of some stretches of the weights.
    """
    present, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for base, new in sample:
        kernels.count_exponents(base, new, present, changed)
    fine, fine_changed = (np.concatenate([[0], np.cumsum(counts)]) for counts in (present, changed))
    bits = _position_bits(fine, fine_changed) + _position_bits(fine[-1], fine_changed[-1] - fine_changed)
    best = int(np.argmin(bits))
    return best << 7 if bits[best] < (1 - FINE_GAIN) * bits[0] else 0


def _position_bits(count: np.ndarray, changed: np.ndarray) -> np.ndarray:
    share = changed / np.maximum(count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return count * np.nan_to_num(entropy)


class DeltaWriter:
    """Encodes block after block, in order, into one payload.

    Args:
        blocks: how many blocks the payload speaks of; those after the last that was added are unchanged.
        finite: refuse NaN and infinity among the new weights of `add` (NonFiniteBits).
        fine: magnitudes below this are fine.
    """

    def __init__(self, *, blocks: int, finite: bool = False, fine: int = 0) -> None:
        self._bound = fine
        self._modes = bytearray(blocks)
        self._next = 0
        self._finite = finite
        self._sections = {mode: _Section() for mode in _GAP_PLANES}
        self._values: list[np.ndarray] = []
        self._at, self._fine_at = (np.empty(BLOCK + kernels.LANES, np.uint32) for _ in range(2))
        self._coarse = np.empty(BLOCK, np.uint32)
        self._codes = np.empty(BLOCK, np.uint16)
        self._words = np.empty(BLOCK, np.uint16)
        self._low, self._nibbles, self._middle = (np.empty(BLOCK, np.uint8) for _ in range(3))
        self._gaps = np.empty(2 * BLOCK, np.uint8)

    def add(self, base: np.ndarray, new: np.ndarray) -> int:
        """Encode what changed in one block and make `base` equal to `new` (both contiguous uint16). Returns how much.

        While little changed this costs about one read of both. Raises NonFiniteBits.
        """
        if not 0 < len(base) == len(new) <= BLOCK:
            raise ValueError(f"base, new: {len(base)} and {len(new)} elements, expected the same, from 1 to {BLOCK}")
        changed = int(kernels.find_changes(base, new, self._at))
        if not changed:
            self._advance(UNCHANGED)
        elif changed > DENSE_SHARE * len(new):
            self._add_dense(base, new)
        else:
            self._add_sparse(base, new, self._at[:changed])
        return changed

    def _add_dense(self, base: np.ndarray, new: np.ndarray) -> None:
        codes = self._codes[: len(new)]
        bad = int(kernels.zigzag_all(base, new, codes))
        if bad >= 0 and self._finite:
            raise NonFiniteBits(bad)
        base[:] = new
        middle, words = kernels.write_codes(codes, self._nibbles, self._middle, self._words)
        self._keep_codes(self._sections[DENSE], len(codes), middle, words)
        self._advance(DENSE)

    def _add_sparse(self, base: np.ndarray, new: np.ndarray, at: np.ndarray) -> None:
        mode = 0
        if self._bound:
            coarse = int(kernels.leave_out_fine(base, self._bound, at, self._coarse))
            fine = int(kernels.find_fine(base, self._bound, self._fine_at)) if coarse < len(at) else 0
            if len(at) - coarse > FINE_SHARE * fine:
                mode = FINE
                at = self._coarse[:coarse]
                self._take(self._sections[FINE], base, new, self._fine_at[:fine])
        if len(at):
            mode += SPARSE if len(new) < _LONGEST_SPARSE_GAP * len(at) else SPARSE_8
            section, shift = self._sections[mode % FINE], 8 * (mode % FINE == SPARSE_8)
            gaps = self._take(section, base, new, at, last=section.last - section.space, shift=shift)
            section.low += self._low[: len(at) if shift else 0].data
            section.gaps += self._gaps[:gaps].data
            section.last = section.space + int(at[-1])
            section.space += len(new)
        self._advance(mode)

    def _take(
        self, section: _Section, base: np.ndarray, new: np.ndarray, at: np.ndarray, *, last: int = -1, shift: int = 0
    ) -> int:
        """Make base equal to new at these positions and keep the codes; the gaps' bytes lie in _gaps, so many."""
        outputs = (self._low, self._gaps, self._nibbles, self._middle, self._words)
        bad, gaps, middle, words = kernels.take_sparse(base, new, at, last, shift, self._finite, *outputs)
        if bad >= 0:
            raise NonFiniteBits(int(at[bad]))
        self._keep_codes(section, len(at), middle, words)
        return int(gaps)

    def _keep_codes(self, section: _Section, count: int, middle: int, words: int) -> None:
        section.nibbles += self._nibbles[:count].data
        section.middle += self._middle[:middle].data
        section.words += self._words[:words].data.cast("B")

    def add_values(self, new: np.ndarray) -> None:
        """Encode one block (contiguous uint16, kept until `finish`) by its bits."""
        if not 0 < len(new) <= BLOCK:
            raise ValueError(f"new: {len(new)} elements, expected 1 to {BLOCK}")
        self._advance(VALUES)
        self._values.append(new)

    def finish(self) -> bytes:
        """The payload."""
        compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        sections: list[dict[str, Any]] = []
        streams: list[bytes | memoryview] = []
        for mode, section in self._sections.items():
            if not section.nibbles:
                continue
            raw = section.streams()[2 - _GAP_PLANES[mode] :]
            packed = [compressor.compress(part.data) for part in raw]
            sections.append(
                {
                    "mode": mode,
                    "count": len(section.nibbles),
                    "raw": [len(part) for part in raw],
                    "packed": [len(part) for part in packed],
                }
            )
            streams += packed
        streams += [part.data.cast("B") for part in self._values]
        header = msgpack.packb(
            {"format": FORMAT, "fine": self._bound, "modes": bytes(self._modes), "sections": sections}
        )
        return b"".join([len(header).to_bytes(4, "little"), header, *streams])

    def _advance(self, mode: int) -> None:
        if self._next == len(self._modes):
            raise ValueError(f"blocks: one more than the {len(self._modes)} announced")
        self._modes[self._next] = mode
        self._next += 1


class _Section:
    """What one mode's blocks have written so far."""

    def __init__(self) -> None:
        self.space = 0
        self.last = -1
        self.low, self.gaps, self.nibbles, self.middle, self.words = (bytearray() for _ in range(5))

    def streams(self) -> list[np.ndarray]:
        low, gaps, nibbles, middle, words = (
            np.frombuffer(part, np.uint8) for part in (self.low, self.gaps, self.nibbles, self.middle, self.words)
        )
        packed = np.empty((len(nibbles) + 1) // 2, np.uint8)
        kernels.pack_nibbles(nibbles, packed)
        return [low, gaps, packed, middle, np.ascontiguousarray(words[0::2]), np.ascontiguousarray(words[1::2])]


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded and checked delta for one array: nothing about applying it can fail any more."""

    changed: int
    """Elements that it writes (dense blocks count in full)."""
    size: int
    """Elements that the array has at least."""
    fine: int
    """Magnitudes below this are fine."""
    sections: list[tuple[int, np.ndarray, np.ndarray, int, list[np.ndarray]]]
    """(mode, starts int64 and stops int64 of its blocks in the array, number of differences, streams uint8)."""
    values: list[tuple[int, np.ndarray]]
    """(start in the array, bits uint16)."""

    def apply(self, target: np.ndarray) -> None:
        """Write into the array (contiguous uint16). Differences are relative: apply it once, to the right base."""
        if len(target) < self.size:
            raise ValueError(f"target: {len(target)} elements, expected at least {self.size}")
        # The fine weights are those of the base: before anything else moves a weight over the bound.
        for mode, starts, stops, count, streams in sorted(self.sections, key=lambda section: section[0] != FINE):
            if mode == FINE:
                kernels.add_fine(target, starts, stops, self.fine, count, *streams)
            elif mode == DENSE:
                kernels.add_dense(target, starts, stops, *streams)
            else:
                low, gaps, *codes = streams if mode == SPARSE_8 else (_NONE, *streams)
                kernels.add_sparse(target, starts, stops, 8 * (mode == SPARSE_8), low, gaps, count, *codes)
        for start, bits in self.values:
            target[start : start + len(bits)] = bits


def read_delta(payload: bytes | memoryview, *, ranges: Sequence[tuple[int, int]]) -> Patch:
    """Decode and check a payload for tensors at these [start, stop) of one array. Raises CodecError."""
    cuts = [(a + start, a + stop) for a, b in ranges for start, stop in blocks(b - a)]
    if min((a for a, _ in cuts), default=0) < 0:
        raise ValueError(f"ranges: start {min(a for a, _ in cuts)}, expected 0 or more")
    bounds = np.array(cuts, np.int64).reshape(-1, 2)
    header, view = _header(memoryview(payload), blocks=len(bounds))
    flagged = np.frombuffer(header["modes"], np.uint8)
    modes, fine = flagged % FINE, flagged >= FINE
    decompressor = zstandard.ZstdDecompressor()
    sections = []
    changed = 0
    described = {UNCHANGED, VALUES}
    for section in header["sections"]:
        mode, count, raw, packed = section["mode"], section["count"], section["raw"], section["packed"]
        mine = fine if mode == FINE else modes == mode
        starts, stops = (np.ascontiguousarray(side) for side in bounds[mine].T)
        space = int((stops - starts).sum())
        expected = _GAP_PLANES.get(mode, 0) + _CODE_STREAMS
        if mode in described or mode not in _GAP_PLANES or not space or len(raw) != expected or len(packed) != expected:
            raise CodecError(f"sections: {section}, expected one a mode that blocks have, with {expected} streams")
        described.add(mode)
        if max(raw) > 2 * space + 16:
            raise CodecError(f"sections.raw: {max(raw)} bytes, expected at most {2 * space + 16}")
        streams = []
        for length, size in zip(raw, packed, strict=True):
            piece, view = _cut(view, size)
            streams.append(_decompress(decompressor, piece, length))
        if not 0 < count <= space or (mode == DENSE and count != space):
            raise CodecError(f"count: {count}, expected {'' if mode == DENSE else 'up to '}{space}")
        _check_gaps(streams[:-_CODE_STREAMS], count=count, space=space)
        _check_codes(*streams[-_CODE_STREAMS:], count=count)
        sections.append((mode, starts, stops, count, streams))
        changed += count
    values = []
    for start, stop in bounds[modes == VALUES].tolist():
        piece, view = _cut(view, 2 * (stop - start))
        values.append((start, np.frombuffer(piece, "<u2")))
        changed += stop - start
    missing = ({int(m) for m in np.unique(modes)} | ({FINE} if fine.any() else set())) - described
    if missing or len(view):
        raise CodecError(f"payload: modes {sorted(missing)} without data and {len(view)} bytes too many, expected none")
    size = int(bounds.max(initial=0))
    return Patch(changed=changed, size=size, fine=header["fine"], sections=sections, values=values)


_NONE = np.empty(0, np.uint8)


def _header(view: memoryview, *, blocks: int) -> tuple[dict[str, Any], memoryview]:
    length, view = _cut(view, 4)
    piece, view = _cut(view, int.from_bytes(length, "little"))
    try:
        header = msgpack.unpackb(piece, max_array_len=_CODE_STREAMS + 2)  # no list here is longer
        known, modes, sections = header["format"], header["modes"], header["sections"]
        numbers = [n for s in sections for n in (s["mode"], s["count"], *s["raw"], *s["packed"])]
        fine = header["fine"] if known == FORMAT else 0
        sound = isinstance(modes, bytes) and all(type(n) is int and n >= 0 for n in (fine, *numbers))
    except Exception as error:  # msgpack raises a dozen types on garbage
        raise CodecError(f"header: {type(error).__name__}: {error}") from None
    if known != FORMAT:
        raise CodecError(f"format: version {known!r}, this process reads version {FORMAT}")
    if not sound or fine > kernels.MAGNITUDE + 1:
        raise CodecError(f"header: {brief(header)}, expected modes as bytes and numbers in their ranges")
    if len(modes) != blocks or not _MODES.issuperset(modes):
        raise CodecError(f"modes: {len(modes)} blocks, expected {blocks}, each with a known mode")
    return header, view


def _cut(view: memoryview, size: int) -> tuple[memoryview, memoryview]:
    if size > len(view):
        raise CodecError(f"payload: ends {size - len(view)} bytes early")
    return view[:size], view[size:]


def _decompress(decompressor: zstandard.ZstdDecompressor, piece: memoryview, length: int) -> np.ndarray:
    try:
        if zstandard.get_frame_parameters(piece).content_size != length:
            raise CodecError(f"stream: not of the {length} bytes that the header announces")
        stream = np.frombuffer(decompressor.decompress(piece), np.uint8)
    except zstandard.ZstdError as error:
        raise CodecError(f"stream: {error}") from None
    if len(stream) != length:
        raise CodecError(f"stream: {len(stream)} bytes, expected the {length} that the header announces")
    return stream


def _check_gaps(planes: list[np.ndarray], *, count: int, space: int) -> None:
    """Gaps from their low plane, if any, and the escaped high part: `count` of them, within the space."""
    if not planes:
        return
    ends, total = kernels.sum_gaps(planes[-1])
    if ends != count or planes[-1][-1] == kernels.ESCAPE:
        raise CodecError(f"gaps: {ends}, expected {count}")
    if len(planes) == 2:
        if len(planes[0]) != count:
            raise CodecError(f"gaps: plane of {len(planes[0])}, expected {count}")
        total = (total << 8) + int(planes[0].sum(dtype=np.int64))
    if total + count > space:
        raise CodecError(f"gaps: position {total + count - 1}, expected less than {space}")


def _check_codes(packed: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray, *, count: int) -> None:
    if len(packed) != (count + 1) // 2:
        raise CodecError(f"differences: {len(packed)} bytes, expected {(count + 1) // 2} for {count}")
    escapes = int(kernels.count_escapes(packed, count))
    if len(middle) != escapes:
        raise CodecError(f"differences: {len(middle)} bytes of escapes, expected {escapes}")
    words = int(np.count_nonzero(middle == kernels.ESCAPE))
    if len(low) != words or len(high) != words:
        raise CodecError(f"differences: {len(low)} and {len(high)} bytes of 16-bit codes, expected {words} each")
