"""Lossless delta codec for bf16 weights. Pure: arrays in, bytes out, and back.

Weights are looked at as uint16 bits, so NaN payloads, infinities, signed zeros and subnormals come through unchanged.
A delta holds, for each tensor that changed, either

- *sparse*: the gaps between changed positions, and at each the difference of the bits modulo 2^16 (for a small change
  of one weight that is the number of units in the last place, signed), or
- *differences*: the same difference for every element, zeros included (cheaper above `DENSE_SHARE` changed), or
- *values*: the bits themselves (anchors, and tensors that changed beyond recognition).

Gaps are bytes, 255 meaning "255 further, go on" (optimal for the geometric gaps of random positions while most gaps are
below 255; sparser tensors move their low 8 or 16 bits to planes of their own, which are independent of the high part).
Differences are zigzag bytes, 255 escaping to 16 bits in a side stream. Each stream is then entropy-coded by zstd, whose
block-wise Huffman tables adapt to the density of each stretch; its match finder is kept small because the streams
have no repetitions worth finding.

    >>> writer = DeltaWriter(tensors=1)
    >>> writer.add(0, base, new, positions=changed_positions(base, new))
    >>> payload = writer.finish()
    >>> read_delta(payload, sizes=[len(base)]).apply([base])      # base now equals new, bit for bit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zstandard

FORMAT = 1
"""Version of the payload's layout."""

UNCHANGED, SPARSE, SPARSE_8, SPARSE_16, DIFFERENCES, VALUES = range(6)
"""How one tensor is encoded; SPARSE_8 and SPARSE_16 keep that many low bits of each gap in planes of their own."""

DENSE_SHARE = 0.42
"""Changed share above which every element's difference costs less than positions and differences of the changed."""

_LOW_PLANES = {SPARSE: 0, SPARSE_8: 1, SPARSE_16: 2}
_LONGEST_SPARSE_GAP = 700
_LONGEST_SPARSE_8_GAP = 160_000
_ESCAPE = 255
_CHUNK = 1 << 17
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_checksum=False
)


class CodecError(ValueError):
    """A payload is malformed, or made for other tensors. Nothing was applied."""


def changed_positions(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Ascending flat indices (int64) at which two uint16 arrays of one length differ.

    Costs about one read of both arrays while little changed: it compares 64 bits at a time, chunk by chunk in cache.
    """
    if len(base) != len(new):
        raise ValueError(f"new: {len(new)} elements, expected {len(base)}")
    words = len(base) // 4
    if words < 16 or base.ctypes.data % 8 or new.ctypes.data % 8:
        return np.flatnonzero(base != new)
    old_words, new_words = base[: words * 4].view(np.uint64), new[: words * 4].view(np.uint64)
    differs = np.empty(min(words, _CHUNK), np.bool_)
    found = []
    for start in range(0, words, _CHUNK):
        stop = min(start + _CHUNK, words)
        chunk = differs[: stop - start]
        np.not_equal(old_words[start:stop], new_words[start:stop], out=chunk)
        at = np.flatnonzero(chunk)
        if len(at):
            lanes = np.flatnonzero(
                old_words[start:stop][at].view(np.uint16) != new_words[start:stop][at].view(np.uint16)
            )
            found.append((at[lanes >> 2] + start) * 4 + (lanes & 3))
    tail = np.flatnonzero(base[words * 4 :] != new[words * 4 :])
    if len(tail):
        found.append(tail + words * 4)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def first_non_finite(bits: np.ndarray) -> int | None:
    """Index of the first NaN or infinity among bf16 bits (uint16), or None."""
    for start in range(0, len(bits), _CHUNK):
        bad = (bits[start : start + _CHUNK] & 0x7F80) == 0x7F80
        if bad.any():
            return start + int(np.argmax(bad))
    return None


class DeltaWriter:
    """Encodes tensors one after the other into one payload.

    Args:
        tensors: how many tensors the payload speaks of; those never added are unchanged.
    """

    def __init__(self, *, tensors: int) -> None:
        self._modes = bytearray(tensors)
        self._next = 0
        self._space = dict.fromkeys(_LOW_PLANES, 0)
        self._last = dict.fromkeys(_LOW_PLANES, -1)
        self._gaps: dict[int, list[list[np.ndarray]]] = {m: [[] for _ in range(n + 1)] for m, n in _LOW_PLANES.items()}
        self._codes: dict[int, list[np.ndarray]] = {m: [] for m in (*_LOW_PLANES, DIFFERENCES)}
        self._escapes: dict[int, list[np.ndarray]] = {m: [] for m in (*_LOW_PLANES, DIFFERENCES)}
        self._values: list[np.ndarray] = []

    def add(self, tensor: int, base: np.ndarray, new: np.ndarray, *, positions: np.ndarray) -> None:
        """Encode what one tensor became at `positions` (from changed_positions). Tensors in ascending order."""
        self._advance(tensor)
        if not len(positions):
            return
        if len(positions) > DENSE_SHARE * len(new):
            codes, escapes = _zigzag(base, new)
            if 4 * len(escapes) > len(new):
                self._add_values(tensor, new)
                return
            mode = DIFFERENCES
        else:
            codes, escapes = _zigzag(base[positions], new[positions])
            mean_gap = len(new) // len(positions)
            mode = (
                SPARSE
                if mean_gap < _LONGEST_SPARSE_GAP
                else SPARSE_8
                if mean_gap < _LONGEST_SPARSE_8_GAP
                else SPARSE_16
            )
            absolute = positions + self._space[mode]
            gaps = np.diff(absolute, prepend=self._last[mode]) - 1
            self._space[mode] += len(new)
            self._last[mode] = int(absolute[-1])
            planes = self._gaps[mode]
            low = _LOW_PLANES[mode]
            for i in range(low):
                planes[i].append(((gaps >> (8 * i)) & 255).astype(np.uint8))
            planes[low].append(_write_gaps(gaps >> (8 * low)))
        self._modes[tensor] = mode
        self._codes[mode].append(codes)
        self._escapes[mode].append(escapes)

    def add_values(self, tensor: int, new: np.ndarray) -> None:
        """Encode one tensor by its bits. Tensors in ascending order."""
        self._advance(tensor)
        self._add_values(tensor, new)

    def finish(self) -> bytes:
        """The payload."""
        compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        sections: list[dict[str, Any]] = []
        streams: list[bytes | memoryview] = []
        for mode, code_parts in self._codes.items():
            if not code_parts:
                continue
            raw = [_join(plane) for plane in self._gaps.get(mode, [])]
            raw += [_join(code_parts), _join(self._escapes[mode]).view(np.uint8)]
            packed = [compressor.compress(part.data) for part in raw]
            sections.append(
                {"mode": mode, "raw": [len(part) for part in raw], "packed": [len(part) for part in packed]}
            )
            streams += packed
        streams += [part.data.cast("B") for part in self._values]
        header = msgpack.packb({"format": FORMAT, "modes": bytes(self._modes), "sections": sections})
        return b"".join([len(header).to_bytes(4, "little"), header, *streams])

    def _advance(self, tensor: int) -> None:
        if not self._next <= tensor < len(self._modes):
            raise ValueError(f"tensor: {tensor}, expected {self._next} to {len(self._modes) - 1}")
        self._next = tensor + 1

    def _add_values(self, tensor: int, new: np.ndarray) -> None:
        if len(new):
            self._modes[tensor] = VALUES
            self._values.append(np.ascontiguousarray(new))


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded delta for tensors of known sizes: nothing about applying it can fail any more."""

    changed: int
    """Elements that it writes (dense tensors count in full)."""
    sparse: list[tuple[int, np.ndarray, np.ndarray]]
    """(tensor, positions int64, differences uint16)."""
    dense: list[tuple[int, np.ndarray]]
    """(tensor, differences uint16 of every element)."""
    values: list[tuple[int, np.ndarray]]
    """(tensor, bits uint16 of every element)."""

    def apply(self, targets: Sequence[np.ndarray]) -> None:
        """Write into the tensors (uint16 arrays). Differences are relative: apply it once, to the right base."""
        for tensor, positions, differences in self.sparse:
            targets[tensor][positions] += differences
        for tensor, differences in self.dense:
            targets[tensor] += differences
        for tensor, bits in self.values:
            targets[tensor][:] = bits


def read_delta(payload: bytes | memoryview, *, sizes: Sequence[int]) -> Patch:
    """Decode and check a payload for tensors of these sizes (elements). Raises CodecError."""
    view = memoryview(payload)
    header, view = _header(view, tensors=len(sizes))
    modes = np.frombuffer(header["modes"], np.uint8)
    decompressor = zstandard.ZstdDecompressor()
    patch = Patch(changed=0, sparse=[], dense=[], values=[])
    changed = 0
    described: set[int] = set()
    for section in header["sections"]:
        mode, raw, packed = section["mode"], section["raw"], section["packed"]
        tensors = [int(t) for t in np.flatnonzero(modes == mode)]
        space = sum(sizes[t] for t in tensors)
        low = _LOW_PLANES.get(mode, -1)
        if mode in described or not tensors or len(raw) != low + 3 or len(packed) != low + 3:
            raise CodecError(f"sections: {section}, expected one a mode, with {low + 3} streams")
        described.add(mode)
        if max(raw) > 2 * space + 16:
            raise CodecError(f"sections.raw: {max(raw)} bytes, expected at most {2 * space + 16}")
        streams = []
        for length, size in zip(raw, packed, strict=True):
            piece, view = _cut(view, size)
            streams.append(_decompress(decompressor, piece, length))
        differences = _unzigzag(streams[-2], streams[-1])
        changed += len(differences)
        if mode == DIFFERENCES:
            if len(differences) != space:
                raise CodecError(f"differences: {len(differences)}, expected {space}")
            bounds = np.cumsum([0, *(sizes[t] for t in tensors)])
            patch.dense.extend((t, differences[bounds[i] : bounds[i + 1]]) for i, t in enumerate(tensors))
        else:
            positions = _read_gaps(streams[: low + 1], count=len(differences), space=space)
            bounds = np.cumsum([0, *(sizes[t] for t in tensors)])
            cuts = np.searchsorted(positions, bounds)
            for i, t in enumerate(tensors):
                part = positions[cuts[i] : cuts[i + 1]]
                part -= bounds[i]
                patch.sparse.append((t, part, differences[cuts[i] : cuts[i + 1]]))
    for tensor in np.flatnonzero(modes == VALUES):
        piece, view = _cut(view, 2 * sizes[tensor])
        patch.values.append((int(tensor), np.frombuffer(piece, "<u2")))
        changed += sizes[tensor]
    missing = {int(m) for m in np.unique(modes)} - described - {UNCHANGED, VALUES}
    if missing or len(view):
        raise CodecError(f"payload: modes {sorted(missing)} without data and {len(view)} bytes too many, expected none")
    return Patch(changed=changed, sparse=patch.sparse, dense=patch.dense, values=patch.values)


def _header(view: memoryview, *, tensors: int) -> tuple[dict[str, Any], memoryview]:
    length, view = _cut(view, 4)
    piece, view = _cut(view, int.from_bytes(length, "little"))
    try:
        header = msgpack.unpackb(piece)
        known, modes, sections = header["format"], header["modes"], header["sections"]
        numbers = [n for s in sections for n in (s["mode"], *s["raw"], *s["packed"])]
        sound = all(type(n) is int and n >= 0 for n in numbers) and all(s["mode"] < VALUES for s in sections)
    except Exception as error:  # msgpack raises a dozen types on garbage
        raise CodecError(f"header: {type(error).__name__}: {error}") from None
    if known != FORMAT:
        raise CodecError(f"format: version {known!r}, this process reads version {FORMAT}")
    if not sound or not isinstance(modes, bytes) or len(modes) != tensors or max(modes, default=0) > VALUES:
        raise CodecError(f"modes: {len(modes)} tensors, expected {tensors}, each with a known mode")
    return header, view


def _cut(view: memoryview, size: int) -> tuple[memoryview, memoryview]:
    if size > len(view):
        raise CodecError(f"payload: ends {size - len(view)} bytes early")
    return view[:size], view[size:]


def _decompress(decompressor: zstandard.ZstdDecompressor, piece: memoryview, length: int) -> np.ndarray:
    try:
        if zstandard.get_frame_parameters(piece).content_size != length:
            raise CodecError(f"stream: not of the {length} bytes that the header announces")
        return np.frombuffer(decompressor.decompress(piece), np.uint8)
    except zstandard.ZstdError as error:
        raise CodecError(f"stream: {error}") from None


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _zigzag(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and escaped differences (uint16): 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    difference = (new - old).view(np.int16)
    zigzag = ((difference << 1) ^ (difference >> 15)).view(np.uint16)
    far = np.flatnonzero(zigzag >= _ESCAPE)
    codes = zigzag.astype(np.uint8)
    codes[far] = _ESCAPE
    return codes, difference[far].view(np.uint16)


def _unzigzag(codes: np.ndarray, escapes: np.ndarray) -> np.ndarray:
    wide = codes.astype(np.uint16)
    differences = (wide >> 1) ^ (0 - (wide & 1)).astype(np.uint16)
    far = np.flatnonzero(codes == _ESCAPE)
    if len(escapes) != 2 * len(far):
        raise CodecError(f"escapes: {len(escapes)} bytes, expected {2 * len(far)}")
    differences[far] = escapes.view("<u2")
    return differences


def _write_gaps(high: np.ndarray) -> np.ndarray:
    """Gaps as bytes: 255 adds 255 and goes on, anything less ends the gap."""
    far = np.flatnonzero(high >= _ESCAPE)
    if not len(far):
        return high.astype(np.uint8)
    whole = np.zeros(len(high), np.int64)
    whole[far] = high[far] // _ESCAPE
    ends = np.cumsum(whole + 1) - 1
    out = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    out[ends] = high - whole * _ESCAPE
    return out


def _read_gaps(planes: list[np.ndarray], *, count: int, space: int) -> np.ndarray:
    """Positions (int64) in a space of that many elements, from the low planes and the escaped high part."""
    high = planes[-1]
    ends = np.flatnonzero(high != _ESCAPE)
    if len(ends) != count or (len(high) and high[-1] == _ESCAPE):
        raise CodecError(f"gaps: {len(ends)} positions, expected {count}")
    if len(planes) == 1:
        steps = high.astype(np.int64)
        steps[ends] += 1
        positions = np.cumsum(steps)[ends] if len(ends) < len(high) else np.cumsum(steps)
    else:
        sums = np.cumsum(high, dtype=np.int64)[ends]
        gaps = np.diff(sums, prepend=0) << (8 * (len(planes) - 1))
        for i, plane in enumerate(planes[:-1]):
            if len(plane) != count:
                raise CodecError(f"gaps: plane of {len(plane)}, expected {count}")
            gaps |= plane.astype(np.int64) << (8 * i)
        positions = np.cumsum(gaps + 1)
    positions -= 1
    if count and positions[-1] >= space:
        raise CodecError(f"gaps: position {int(positions[-1])}, expected less than {space}")
    return positions
