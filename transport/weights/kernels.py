"""The codec's inner loops, compiled: arrays in, arrays out, no memory of their own, none of Python's lock held.

They trust their arguments: callers give outputs of the sizes that each docstring names, and what comes from a payload
is checked by `read_delta` first. numba compiles them when this module is first imported (about 2 s) and keeps the
result in $NUMBA_CACHE_DIR, beside this file or in the user's cache folder, so that later processes start with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ESCAPE = 255
"""The byte that says: more follows."""

NIBBLE_ESCAPE = 15
"""The nibble that says so."""

MAGNITUDE = 0x7FFF
"""The bits of a bf16 number without its sign."""

LANES = 64
"""Elements that are compared at a time."""

AHEAD = 32
"""Differences between asking for a place in memory and writing it."""


_ZERO, _ONE = np.uint64(0), np.uint64(1)  # an unsigned index is never counted from the end

BYTES, BITS, INDICES = (types.Array(kind, 1, "C") for kind in (types.uint8, types.uint16, types.uint32))
IN_BYTES, IN_BITS, IN_INDICES, IN_BOUNDS = (
    types.Array(kind, 1, "C", readonly=True) for kind in (types.uint8, types.uint16, types.uint32, types.int64)
)
COUNTS = types.Array(types.int64, 1, "C")
PAIR = types.UniTuple(types.int64, 2)


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compile_it(kernel: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signature, nogil=True, cache=True)(kernel)
        except Exception:  # no folder can be written, or what is there is torn: compile for this process alone
            return njit(signature, nogil=True)(kernel)

    return compile_it


@intrinsic
def _differing(typing_context: Any, base: Any, new: Any, start: Any) -> Any:
    """Bit i of the uint64: base[start + i] != new[start + i], for i below LANES."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), LANES)
        loaded = []
        for kind, array in zip(signature.args[:2], arguments[:2], strict=True):
            data = context.make_array(kind)(context, builder, array).data
            pointer = cgutils.pointer_add(builder, data, builder.mul(arguments[2], ir.Constant(ir.IntType(64), 2)))
            loaded.append(builder.load(builder.bitcast(pointer, vector.as_pointer()), align=2))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(base, new, types.int64), generate


@intrinsic
def _smaller(typing_context: Any, bits: Any, start: Any, bound: Any) -> Any:
    """Bit i of the uint64: bits[start + i] without its sign is below the bound, for i below LANES."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = ir.IntType(16)
        vector = ir.VectorType(element, LANES)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = cgutils.pointer_add(builder, data, builder.mul(arguments[1], ir.Constant(ir.IntType(64), 2)))
        loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=2)
        magnitude = builder.and_(loaded, ir.Constant(vector, [MAGNITUDE] * LANES))
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        every = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)
        return builder.bitcast(builder.icmp_unsigned("<", magnitude, every), ir.IntType(64))

    return types.uint64(bits, types.int64, types.uint16), generate


@intrinsic
def _lowest(typing_context: Any, mask: Any) -> Any:
    """Index of the lowest set bit of a uint64; 64 for none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def _count(typing_context: Any, mask: Any) -> Any:
    """Set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def _fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Have the memory of array[index] fetched into the second cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [pointer, number(0), number(1), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@njit(inline="always")
def _zigzag(old, new):  # type: ignore[no-untyped-def]
    """0, -1, 1, -2, ... become 0, 1, 2, 3, ...; differences are modulo 2^16."""
    difference = np.int64(np.int16(np.uint16(new - old)))
    return np.uint16((difference << 1) ^ (difference >> 15))


@njit(inline="always")
def _unzigzag(code):  # type: ignore[no-untyped-def]
    return (code >> 1) ^ -(code & 1)


@njit(inline="always")
def _spread(mask, start, at, found):  # type: ignore[no-untyped-def]
    """Write start + the index of each set bit to at[found:]; found plus their number."""
    here = _count(mask)
    # Four without asking whether there are so many, or any: cheaper than a branch that goes either way. What is too
    # much is overwritten by the next.
    for i in range(4):
        at[found + i] = start + _lowest(mask)
        mask &= mask - np.uint64(1)
    i = 4
    while i < here:
        at[found + i] = start + _lowest(mask)
        mask &= mask - np.uint64(1)
        i += 1
    return found + here


@_compiled(types.int64(IN_BITS, IN_BITS, INDICES))
def find_changes(base, new, at):  # type: ignore[no-untyped-def]
    """Write the ascending indices at which two arrays of one length differ to `at` (length + LANES); their number."""
    found = np.int64(0)
    whole = len(base) // LANES * LANES
    for start in range(0, whole, LANES):
        found = _spread(_differing(base, new, start), start, at, found)
    for i in range(whole, len(base)):
        if base[i] != new[i]:
            at[found] = i
            found += 1
    return found


@_compiled(types.int64(IN_BITS, types.uint16, INDICES))
def find_fine(bits, bound, at):  # type: ignore[no-untyped-def]
    """Write the ascending indices of magnitudes below the bound to `at` (length + LANES); their number."""
    found = np.int64(0)
    whole = len(bits) // LANES * LANES
    for start in range(0, whole, LANES):
        found = _spread(_smaller(bits, start, bound), start, at, found)
    for i in range(whole, len(bits)):
        if bits[i] & MAGNITUDE < bound:
            at[found] = i
            found += 1
    return found


@_compiled(types.int64(IN_BITS, types.uint16, IN_INDICES, INDICES))
def leave_out_fine(bits, bound, at, coarse):  # type: ignore[no-untyped-def]
    """Copy those indices whose magnitudes are not below the bound to `coarse` (as long as `at`); their number."""
    kept = _ZERO
    for i in range(len(at)):
        coarse[kept] = at[i]
        kept += np.uint64(bits[at[i]] & MAGNITUDE >= bound)
    return np.int64(kept)


@_compiled(types.void(IN_BITS, IN_BITS, COUNTS, COUNTS))
def count_exponents(base, new, present, changed):  # type: ignore[no-untyped-def]
    """Add to present[e] how many of `base` have exponent e (0 to 255), and to changed[e] how many of these differ."""
    for i in range(len(base)):
        exponent = base[i] >> 7 & 255
        present[exponent] += 1
        changed[exponent] += base[i] != new[i]


@njit
def _write_code(code, i, nibbles, in_middle, middle, in_words, words):  # type: ignore[no-untyped-def]
    """Write code i, given where the other streams have come to; where they are then."""
    if code < NIBBLE_ESCAPE:
        nibbles[i] = code
    else:
        nibbles[i] = NIBBLE_ESCAPE
        rest = np.int64(code) - NIBBLE_ESCAPE
        middle[in_middle] = min(rest, ESCAPE)
        in_middle += _ONE
        if rest >= ESCAPE:
            words[in_words] = code
            in_words += _ONE
    return in_middle, in_words


@_compiled(
    types.UniTuple(types.int64, 4)(
        BITS, IN_BITS, IN_INDICES, types.int64, types.int64, types.boolean, *[BYTES] * 4, BITS
    )
)
def take_sparse(base, new, at, last, shift, finite, low, gaps, nibbles, middle, words):  # type: ignore[no-untyped-def]
    """Make base equal to new at the ascending positions `at` and write how: (bad, sizes of gaps, middle and words).

    The gap before at[0] counts from `last`. The lowest `shift` (0 or 8) bits of gap i go to low[i]; the rest is written
    as bytes, of which 255 adds 255 and goes on and anything less ends the gap: `gaps` needs len(at) +
    (at[-1] - last) // (255 << shift) bytes. The zigzag code of each difference (mod 2^16) is written as `write_codes`
    does; the other outputs need len(at) elements.

    bad is -1; or, if `finite`, the first i where new[at[i]] is NaN or infinite.
    """
    in_gaps = _ZERO
    in_middle = _ZERO
    in_words = _ZERO
    infinite = False
    for i in range(len(at)):
        bits = new[at[i]]
        code = _zigzag(base[at[i]], bits)
        base[at[i]] = bits
        infinite |= bits & 0x7F80 == 0x7F80
        in_middle, in_words = _write_code(code, i, nibbles, in_middle, middle, in_words, words)
        gap = np.int64(at[i]) - last - 1
        last = np.int64(at[i])
        if shift:
            low[i] = gap & 255
            gap >>= 8
        while gap >= ESCAPE:
            gaps[in_gaps] = ESCAPE
            in_gaps += _ONE
            gap -= ESCAPE
        gaps[in_gaps] = gap
        in_gaps += _ONE
    bad = np.int64(-1)
    if infinite and finite:
        bad += 1
        while new[at[bad]] & 0x7F80 != 0x7F80:
            bad += 1
    return bad, in_gaps, in_middle, in_words


@_compiled(types.int64(IN_BITS, IN_BITS, BITS))
def zigzag_all(base, new, codes):  # type: ignore[no-untyped-def]
    """codes[i]: zigzag of new[i] - base[i] (mod 2^16). The first i where new is NaN or infinite, or -1."""
    bad = 0
    for i in range(len(base)):
        codes[i] = _zigzag(base[i], new[i])
        bad += (new[i] & 0x7F80) == 0x7F80
    if bad:
        for i in range(len(base)):
            if new[i] & 0x7F80 == 0x7F80:
                return i
    return -1


@_compiled(PAIR(IN_BITS, BYTES, BYTES, BITS))
def write_codes(codes, nibbles, middle, words):  # type: ignore[no-untyped-def]
    """Codes below 15 to nibbles (one a byte); 15 there and code - 15, if below 255, to middle; 255 there and the code.

    Returns the numbers of bytes in middle and of codes in words; all three outputs need len(codes) elements.
    """
    in_middle = _ZERO
    in_words = _ZERO
    for i in range(len(codes)):
        in_middle, in_words = _write_code(codes[i], i, nibbles, in_middle, middle, in_words, words)
    return in_middle, in_words


@_compiled(types.void(IN_BYTES, BYTES))
def pack_nibbles(nibbles, packed):  # type: ignore[no-untyped-def]
    """Two nibbles a byte, the first in the low bits; `packed` needs (len(nibbles) + 1) // 2 bytes."""
    pairs = len(nibbles) // 2
    for i in range(pairs):
        packed[i] = nibbles[2 * i] | (nibbles[2 * i + 1] << 4)
    if len(nibbles) % 2:
        packed[pairs] = nibbles[2 * pairs]


@_compiled(PAIR(IN_BYTES))
def sum_gaps(gaps):  # type: ignore[no-untyped-def]
    """How many bytes of `gaps` end a gap, and the sum of all bytes."""
    ends = np.int64(0)
    total = np.int64(0)
    for i in range(len(gaps)):
        ends += gaps[i] != ESCAPE
        total += gaps[i]
    return ends, total


@_compiled(types.int64(IN_BYTES, types.int64))
def count_escapes(packed, count):  # type: ignore[no-untyped-def]
    """How many of the first `count` nibbles of `packed` are 15."""
    found = np.int64(0)
    for i in range(count // 2):
        found += (packed[i] & 15) == NIBBLE_ESCAPE
        found += packed[i] >= NIBBLE_ESCAPE << 4
    if count % 2:
        found += (packed[count // 2] & 15) == NIBBLE_ESCAPE
    return found


@njit
def _read_code(i, packed, in_middle, middle, in_words, words_low, words_high):  # type: ignore[no-untyped-def]
    """Code i, given where the other streams have come to, and where they are then."""
    code = np.int64(packed[i >> 1] >> ((i & 1) << 2)) & 15
    if code == NIBBLE_ESCAPE:
        code += middle[in_middle]
        in_middle += 1
        if code == NIBBLE_ESCAPE + ESCAPE:
            code = np.int64(words_low[in_words]) | np.int64(words_high[in_words]) << 8
            in_words += 1
    return code, in_middle, in_words


@_compiled(types.void(BITS, IN_BOUNDS, IN_BOUNDS, types.int64, *[IN_BYTES] * 2, types.int64, *[IN_BYTES] * 4))
def add_sparse(target, starts, stops, shift, low, gaps, count, packed, middle, words_low, words_high):  # type: ignore[no-untyped-def]
    """Add each of `count` differences to `target` at positions in its ranges [start, stop) end to end.

    Inputs as the writing kernels made them, checked: `count` gaps that end within the ranges, and all codes there.
    """
    byte = np.int64(0)
    in_middle = np.int64(0)
    in_words = np.int64(0)
    position = np.int64(-1)
    block = np.int64(-1)
    begin = end = offset = np.int64(0)
    places = np.empty(2 * AHEAD, np.int64)
    for ahead in range(count + AHEAD):
        # Memory is slow to answer: each place is asked for AHEAD differences before it is written.
        if ahead < count:
            gap = np.int64(0)
            while gaps[byte] == ESCAPE:
                gap += ESCAPE
                byte += 1
            gap += gaps[byte]
            byte += 1
            if shift:
                gap = gap << 8 | low[ahead]
            position += gap + 1
            while position >= end:
                block += 1
                begin = end
                end += stops[block] - starts[block]
                offset = starts[block] - begin
            places[ahead % (2 * AHEAD)] = position + offset
            _fetch(target, position + offset)
        i = ahead - AHEAD
        if i >= 0:
            code, in_middle, in_words = _read_code(i, packed, in_middle, middle, in_words, words_low, words_high)
            target[places[i % (2 * AHEAD)]] += np.uint16(_unzigzag(code))


@_compiled(types.void(BITS, IN_BOUNDS, IN_BOUNDS, types.uint16, types.int64, *[IN_BYTES] * 4))
def add_fine(target, starts, stops, bound, count, packed, middle, words_low, words_high):  # type: ignore[no-untyped-def]
    """Add differences to the magnitudes below the bound in the ranges [start, stop) of `target`, to `count` at most."""
    at = np.int64(0)
    in_middle = np.int64(0)
    in_words = np.int64(0)
    for block in range(len(starts)):
        for start in range(starts[block], stops[block], LANES):
            if start + LANES <= stops[block]:
                mask = _smaller(target, start, bound)
            else:
                mask = _ZERO
                for i in range(start, stops[block]):
                    mask |= np.uint64(target[i] & MAGNITUDE < bound) << np.uint64(i - start)
            while mask and at < count:
                code, in_middle, in_words = _read_code(at, packed, in_middle, middle, in_words, words_low, words_high)
                target[start + _lowest(mask)] += np.uint16(_unzigzag(code))
                mask &= mask - np.uint64(1)
                at += 1


@_compiled(types.void(BITS, IN_BOUNDS, IN_BOUNDS, *[IN_BYTES] * 4))
def add_dense(target, starts, stops, packed, middle, words_low, words_high):  # type: ignore[no-untyped-def]
    """Add the differences of all elements of the ranges [start, stop) of `target`."""
    at = np.int64(0)
    in_middle = np.int64(0)
    in_words = np.int64(0)
    for block in range(len(starts)):
        for i in range(starts[block], stops[block]):
            code, in_middle, in_words = _read_code(at, packed, in_middle, middle, in_words, words_low, words_high)
            target[i] += np.uint16(_unzigzag(code))
            at += 1
