from __future__ import annotations

import re

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_transport.messages import (
    LOWEST_LOGPROB,
    UNSAMPLED,
    Batch,
    Group,
    MessageError,
    SchemaError,
    Scores,
    Trajectory,
    batch_wire,
    pack,
    take,
    unpack,
)


def trajectory(**changes):
    arrays = {
        "tokens": np.array([5, 6, 7], np.int32),
        "mask": np.array([0, 1, 1], np.uint8),
        "logprobs": np.array([0, -0.5, -2], np.float32),
        "versions": np.array([-1, 3, 4], np.int32),
        "advantages": np.array([0, 1, 1], np.float32),
        "score": 1.0,
    }
    return Trajectory(**{**arrays, **changes})


def test_a_group_comes_back_as_it_was():
    group = Group(group_id="7:0", ticket=7, actor="a", environment="e", trajectories=(trajectory(),))
    group.validate()
    assert Group.unpack(group.pack()) == group
    assert (group.versions, group.trained_tokens, group.nbytes) == ((3, 4), 2, 51)


def test_where_a_group_was_first_travels_with_it():
    group = Group(
        group_id="1f", ticket=None, actor="a", environment="e", trajectories=(trajectory(),), origin=("q1", "7:0")
    )
    assert Group.unpack(group.pack()) == group
    for wrong in (["q1"], ["q1", 7], [["q1"], "7:0"]):
        with pytest.raises(MessageError, match=r"origin: \[.*, expected \[queue, group_id\]"):
            Group.from_wire({**group.to_wire(), "origin": wrong})


def test_a_batch_is_made_of_packed_groups_and_comes_back_as_it_was():
    groups = tuple(
        Group(group_id=f"{i}:0", ticket=i, actor="a", environment="e", trajectories=(trajectory(score=float(i)),) * 2)
        for i in range(3)
    )
    scores = Scores.of([0.0, 1.0, 2.0])
    batch = Batch(version=5, groups=groups, distances={3: 2, 4: 1}, scores=scores, dropped={"stale": 7})
    packed = [g.pack() for g in groups]
    wire = batch_wire(version=5, groups=packed, distances={3: 2, 4: 1}, scores=scores, dropped={"stale": 7})
    assert batch.to_wire() == wire
    assert wire["groups"] == packed
    assert Batch.from_wire(unpack(pack(wire))) == batch


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups": [b"\xc1"]}, "groups[0]: frame: not msgpack (FormatError: )"),
        ({"groups": [pack({})]}, "groups[0]: trajectories: missing"),
        ({"groups": [{"group_id": "0:0"}]}, "groups[0]: {'group_id': '0:0'}, expected a packed group"),
        ({"distances": [[1]]}, "distances: [1], expected [version, distance]"),
        ({"distances": [[1, "2"]]}, "distances: [1, '2'], expected [version, distance]"),
        ({"distances": 3}, "distances: 3, expected list"),
        ({"dropped": {"stale": "x"}}, "dropped: ['stale', 'x'], expected a reason and a count"),
        ({"dropped": {b"stale": 1}}, "dropped: [b'stale', 1], expected a reason and a count"),
    ],
)
def test_a_malformed_batch_is_refused_by_name(changes, text):
    wire = batch_wire(version=5, groups=[], distances={}, scores=Scores(), dropped={})
    with pytest.raises(MessageError) as caught:
        Batch.from_wire({**wire, **changes})
    assert str(caught.value) == text


def test_a_group_can_do_without_the_tokens_of_some_versions():
    group = Group(
        group_id="7:0", ticket=7, actor="a", environment="e", trajectories=(trajectory(), trajectory(score=2.0))
    )
    late = group.without({3})
    late.validate()
    assert (late.group_id, late.versions, late.trained_tokens) == ("7:0", (4,), 2)
    for before, after in zip(group.trajectories, late.trajectories, strict=True):
        assert after == trajectory(
            mask=np.array([0, 0, 1], np.uint8),
            logprobs=np.array([0, 0, -2], np.float32),
            versions=np.array([UNSAMPLED, UNSAMPLED, 4], np.int32),
            advantages=np.array([0, 0, 1], np.float32),
            score=before.score,
        )
        assert [a.dtype for a in (after.mask, after.logprobs, after.versions, after.advantages)] == [
            a.dtype for a in (before.mask, before.logprobs, before.versions, before.advantages)
        ]
    assert group.without([9]) == group
    assert group.without([]) == group
    assert group.without([3, 4]) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"score": 1e200}, "trajectory.score: 1e+200, expected at most 1e+09 in magnitude"),
        ({"score": float("nan")}, "trajectory.score: nan, expected at most 1e+09 in magnitude"),
        (
            {"advantages": np.array([0, 1, 1e12], np.float32)},
            "trajectory.advantages: 999999995904.0, expected at most 1e+09 in magnitude",
        ),
        (
            {"logprobs": np.array([0, -0.5, -100], np.float32)},
            f"trajectory.logprobs: -100.0, expected {LOWEST_LOGPROB} or more",
        ),
        (
            {"logprobs": np.array([0, -0.5, -9999], np.float32)},
            "trajectory.logprobs: -9999.0 marks a missing log-prob",
        ),
        ({"mask": np.array([1, 1, 1], np.uint8)}, "trajectory.mask: first token is trained, but nothing predicts it"),
        (
            {"logprobs": np.array([0, -0.5, 2e-3], np.float32)},
            f"trajectory.logprobs: {float(np.float32(2e-3))}, expected 0 or less",
        ),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "trajectory.logprobs[1]: nan, expected a finite number"),
        (
            {"logprobs": np.array([-1, -1, -1], np.float32)},
            "trajectory.logprobs[0]: -1.0 on a token with mask 0, expected 0",
        ),
        (
            {"advantages": np.array([0, 1, -np.inf], np.float32)},
            "trajectory.advantages[2]: -inf, expected a finite number",
        ),
        (
            {"advantages": np.array([2, 1, 1], np.float32)},
            "trajectory.advantages[0]: 2.0 on a token with mask 0, expected 0",
        ),
        (
            {"advantages": np.array([0, 1, 1], np.float64)},
            "trajectory.advantages: float64[3], expected float32[3]",
        ),
        ({"mask": np.array([0, 1], np.uint8)}, "trajectory.mask: uint8[2], expected uint8[3]"),
        ({"mask": np.array([0, 1, 2], np.uint8)}, "trajectory.mask: value 2, expected 0 or 1"),
        ({"tokens": np.array([5, -6, 7], np.int32)}, "trajectory.tokens: id -6, expected 0 or more"),
        ({"tokens": np.array([5], np.int32)}, "trajectory.tokens: 1 tokens, expected 2 to 4194304"),
        (
            {"versions": np.array([0, 3, 4], np.int32)},
            "trajectory.versions: a token with mask 0 has a version, expected -1",
        ),
        (
            {"versions": np.array([-2, 3, 4], np.int32)},
            "trajectory.versions: a token with mask 0 has a version, expected -1",
        ),
        ({"versions": np.array([-1, 3, -1], np.int32)}, "trajectory.versions: -1 on a trained token"),
    ],
)
def test_what_no_loss_can_bear_is_refused_by_name(changes, text):
    with pytest.raises(MessageError) as caught:
        trajectory(**changes).validate()
    assert str(caught.value) == text


_VALUES = {
    "tokens": st.sampled_from([0, 5, 2**31 - 1, -1]),
    "mask": st.sampled_from([0, 1, 2, 255]),
    "logprobs": st.sampled_from([0, -0.0, -0.5, LOWEST_LOGPROB, -30.001, 1e-3, np.float32(1e-3), 2e-3, -1e4, np.nan]),
    "versions": st.sampled_from([UNSAMPLED, 0, 4, -2, 2**31 - 1]),
    "advantages": st.sampled_from([0, -0.0, 1, -1e9, 1e9, 1.1e9, np.inf, np.nan]),
    "score": st.sampled_from([0.0, -1e9, 1e9, 1.1e9, np.nan, np.inf]),
}


@given(st.data())
def test_the_quick_check_and_the_diagnosis_agree(data):
    sound = trajectory()
    changes = {}
    for name in data.draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=2)):
        if name == "score":
            changes[name] = data.draw(_VALUES[name])
        else:
            array = changes[name] = getattr(sound, name).copy()
            array[data.draw(st.integers(0, 2))] = data.draw(_VALUES[name])
    changed = trajectory(**changes)
    try:
        changed._diagnose("trajectory")
    except MessageError as error:
        with pytest.raises(MessageError, match=f"^{re.escape(str(error))}$"):
            changed.validate()
    else:
        changed.validate()
        assert changed._is_valid()


def test_arrays_need_not_be_contiguous_to_be_packed():
    wide = np.arange(6, dtype=np.int32)
    sparse = trajectory(tokens=wide[::2])
    assert Trajectory.from_wire(sparse.to_wire()) == trajectory(tokens=np.array([0, 2, 4], np.int32))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n": 2}, "trajectory.arrays: 51 bytes, expected 34 (2 x 17)"),
        ({"n": -1}, "trajectory.n: -1, expected 0 to 4194304"),
        ({"n": 1 << 40}, "trajectory.n: 1099511627776, expected 0 to 4194304"),
        ({"n": True}, "trajectory.n: True, expected int"),
        ({"arrays": "x" * 51}, f"trajectory.arrays: '{'x' * 51}', expected bytes"),
        ({"score": None}, "trajectory.score: None, expected float"),
        ({"finished": 1}, "trajectory.finished: 1, expected bool"),
    ],
)
def test_a_trajectory_of_another_shape_is_refused_by_name(changes, text):
    wire = trajectory().to_wire()
    with pytest.raises(MessageError) as caught:
        Trajectory.from_wire({**wire, **changes})
    assert str(caught.value) == text
    assert Trajectory.from_wire({**wire, "score": 1}) == trajectory()


@pytest.mark.parametrize("value", [2**70, object(), "\ud800"])
def test_what_has_no_msgpack_form_is_an_error_of_the_sender(value):
    with pytest.raises(MessageError, match="expected values with a msgpack form"):
        pack({"value": value})


def test_scores_stay_finite():
    scores = Scores()
    for _ in range(1000):
        scores += Scores.of([1e9, -1e9])
    assert Scores.from_wire(scores.to_wire()) == scores
    with pytest.raises(MessageError, match="expected scores of at most"):
        Scores.from_wire({"groups": 1, "sequences": 2, "total": 1e10, "squares": 1.0})
    with pytest.raises(MessageError, match="expected scores of at most"):
        Scores.from_wire({"groups": 1, "sequences": 2, "total": 1.0, "squares": float("nan")})


def test_other_schemas_and_garbage_are_refused():
    with pytest.raises(SchemaError, match="schema: version 9, this process speaks version 2"):
        unpack(b"\x81\xa6schema\x09")
    with pytest.raises(MessageError, match="frame: not msgpack"):
        unpack(b"\xc1")
    with pytest.raises(MessageError, match=r"n: True, expected int"):
        take({"n": True}, "n", int)
    with pytest.raises(MessageError, match=r"n: 9223372036854775808, expected at most 9223372036854775807"):
        take({"n": 1 << 63}, "n", int)
    with pytest.raises(MessageError, match=r"schema: version 'x{76}\.\.\., this process speaks version 2"):
        unpack(msgpack.packb({"schema": "x" * 1000}))
    with pytest.raises(MessageError, match=r"frame: not msgpack \(ValueError: extension type 5 of 2 bytes\)"):
        unpack(msgpack.packb({"schema": 2, "x": msgpack.ExtType(5, b"ab")}))
    with pytest.raises(MessageError, match=r"n: b'x{75}\.\.\., expected int"):
        take({"n": b"x" * 10000}, "n", int)
