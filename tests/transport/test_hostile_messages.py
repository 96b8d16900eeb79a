"""Whatever arrives, reading it ends in a message or a MessageError, in memory bounded by its size."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_bench.hostile_frames import damage, encode, mutations, paths, replace, requests
from lachesis_transport.messages import SCHEMA, Batch, Group, MessageError, Scores, batch_wire, pack, unpack

PUT = requests(random.Random(0), "0" * 32)["put"]
GROUP = msgpack.unpackb(PUT["group"])
BATCH = {
    "schema": SCHEMA,
    **batch_wire(
        version=5,
        groups=[PUT["group"], PUT["group"]],
        distances={3: 2, 4: 1},
        scores=Scores.of([0.0, 1.0]),
        dropped={"stale": 7, "late": 1},
    ),
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([1 << 63, (1 << 63) - 1, 0, -1])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\udcff\udc80", "x" * 5000])
    | st.binary(max_size=80)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    | st.builds(msgpack.Timestamp, st.integers(0, 1 << 33), st.integers(0, 999_999_999))
)
keys = st.text(max_size=8) | st.binary(max_size=8) | st.sampled_from(sorted({*GROUP, *BATCH, "n", "arrays", "score"}))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=70) | st.dictionaries(keys, inner, max_size=4), max_leaves=80
)


def read(frame: bytes | memoryview, decode: Callable[[bytes | memoryview], Any]) -> Any:
    """What `decode` makes of the frame; None when it refuses it, in few words."""
    refusal = ""
    try:
        return decode(frame)
    except MessageError as error:
        refusal = str(error)
    assert 0 < len(refusal) < 300
    return None


def valid_group(frame: bytes | memoryview) -> Group:
    group = Group.unpack(frame)
    group.validate()
    return group


def read_group(frame: bytes) -> None:
    group = read(frame, valid_group)
    if group is not None:
        assert Group.unpack(group.pack()) == group
        assert group.trained_tokens > 0
        assert group.without(group.versions) is None
        assert group.nbytes <= len(frame)


def read_batch(frame: bytes) -> None:
    batch = read(frame, lambda frame: Batch.from_wire(unpack(frame)))
    if batch is not None:
        for group in batch.groups:
            read_group(group.pack())
        for number in (*batch.distances, *batch.distances.values(), *batch.dropped.values(), batch.version):
            assert type(number) is int


def changed(message: dict, path: list, value: object) -> bytes:
    message = copy.deepcopy(message)
    replace(message, path, value)
    return encode(message)


@given(st.sampled_from(paths(GROUP)), values)
def test_any_value_anywhere_in_a_group(path, value):
    read_group(changed(GROUP, path, value))
    read_batch(changed(BATCH, ["groups", 1], changed(GROUP, path, value)))


@given(st.sampled_from(paths(BATCH)), values)
def test_any_value_anywhere_in_a_batch(path, value):
    read_batch(changed(BATCH, path, value))


@given(values | st.dictionaries(keys, values))
def test_any_value_in_place_of_a_message(value):
    if isinstance(value, dict):
        value = {**value, "schema": SCHEMA}
    read_group(encode(value))
    read_batch(encode(value))


@given(st.binary(max_size=400))
def test_any_bytes(frame):
    read_group(frame)
    read_batch(frame)
    read_batch(changed(BATCH, ["groups", 0], frame))


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=3))
def test_damaged_bytes(seeds):
    group, batch = PUT["group"], encode(BATCH)
    for seed in seeds:
        group, batch = (damage(random.Random(seed), frame) or b"\x80" for frame in (group, batch))
    read_group(group)
    read_batch(batch)
    read_batch(changed(BATCH, ["groups", 0], group))


@given(st.integers(0, len(encode(BATCH)) - 1))
def test_a_frame_cut_short_or_too_long_is_refused(length):
    frame = encode(BATCH)
    with pytest.raises(MessageError, match=r"frame: not msgpack|frame: int, expected a map"):
        unpack(frame[:length])
    with pytest.raises(MessageError, match=r"frame: not msgpack \(ExtraData"):
        unpack(frame + frame[: length + 1])


def test_requests_of_every_kind():
    for frame in islice(mutations(0), 5000):
        message = read(frame, unpack)
        if message is not None and isinstance(message.get("group"), bytes):
            read_group(message["group"])


def list_of(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(list_of(90_000) * 1000 + b"\xc0" * 95_000, id="lists that promise more than there is"),
        pytest.param(list_of(64) * 1000 + b"\xc0" * 1000, id="short lists that promise more than there is"),
        pytest.param(b"\x91" * 100_000, id="lists within lists"),
        pytest.param(b"\x81\xa0" * 100_000, id="maps within maps"),
        pytest.param(list_of(100_000) + b"\x80" * 100_000, id="empty maps"),
        pytest.param(list_of(0xFFFFFFFF) + b"\x80" * 10, id="four billion items"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + b"\xa0\xc0" * 10, id="four billion keys"),
        pytest.param(b"\xc6\xff\xff\xff\xff" + b"\0" * 10, id="four billion bytes"),
        pytest.param(b"\xdb\xff\xff\xff\xff" + b"\0" * 10, id="four billion characters"),
        pytest.param(pack({"trajectories": b"\xff" * 1_000_000}), id="bytes in place of a list"),
        pytest.param(pack({"trajectories": [["\0" * 1000] * 1000]}), id="lists in place of maps"),
        pytest.param(msgpack.packb({"schema": [b"\xff" * 1000] * 1000}), id="a schema of a megabyte"),
        pytest.param(encode({**GROUP, "trajectories": [{"n": 1 << 22, "arrays": b""}] * 4096}), id="claimed tokens"),
    ],
)
def test_memory_is_bounded_by_the_frame(frame):
    tracemalloc.start()
    try:
        read_group(frame)
        read_batch(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 100 * len(frame) + (1 << 20)


def test_a_long_list_is_read_when_its_items_are_there():
    assert unpack(pack({"items": list(range(100_000))})) == {"items": list(range(100_000))}
    assert unpack(memoryview(pack({"items": [[]] * 65}))) == {"items": [[]] * 65}
