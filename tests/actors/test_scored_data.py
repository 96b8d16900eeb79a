from __future__ import annotations

import math

import pytest

from lachesis_actors.scored_data import ScoredDataError, parse_group


def posted(**changes):
    return {
        "tokens": [[1, 2, 3], [1, 2]],
        "masks": [[-100, 2, 3], [-100, 2]],
        "scores": [1.0, 0],
        "advantages": None,
        "group_overrides": {"lachesis_ticket": 5},
        "env_id": 0,
        **changes,
    }


def test_a_good_group():
    group = parse_group(posted(), max_tokens=8)
    assert [t.tolist() for t in group.tokens] == [[1, 2, 3], [1, 2]]
    assert [m.tolist() for m in group.masks] == [[0, 1, 1], [0, 1]]
    assert group.scores == (1.0, 0.0)
    assert group.advantages is None
    assert group.ticket == 5
    assert group.zeroed == (False, False)


@pytest.mark.parametrize("absent", [None, [], [[], []]])
def test_absent_advantages(absent):
    assert parse_group(posted(advantages=absent), max_tokens=8).advantages is None


def test_advantages_and_overrides():
    group = parse_group(
        posted(advantages=[[0, 1, 2.5], [0, 1]], overrides=[{"set_advantage_to_zero": True}, {}]), max_tokens=8
    )
    assert group.advantages == ((0.0, 1.0, 2.5), (0.0, 1.0))
    assert group.zeroed == (True, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": None}, "tokens: None"),
        ({"tokens": []}, "tokens: 0 sequences"),
        ({"tokens": [[1, 2, 3], [1, "2"]]}, r"tokens\[1\]\[1\]: '2'"),
        ({"tokens": [[1, 2, 3], [1, True]]}, r"tokens\[1\]\[1\]: True"),
        ({"tokens": [[1, 2, 3], [1, 2.0]]}, r"tokens\[1\]\[1\]: 2.0"),
        ({"tokens": [[1, 2, 3], [1, 2**31]]}, r"tokens\[1\]\[1\]: 2147483648"),
        ({"tokens": [[1, 2, 3], [1, -1]]}, r"tokens\[1\]\[1\]: -1"),
        ({"tokens": [[1, 2, 3], [1]]}, r"tokens\[1\]: 1 tokens, expected 2 to 8"),
        ({"tokens": [[1] * 9, [1, 2]]}, r"tokens\[0\]: 9 tokens, expected 2 to 8"),
        ({"masks": [[-100, 2, 3]]}, "masks: 1 items, expected 2"),
        ({"masks": [[-100, 2], [-100, 2]]}, r"masks\[0\]: 2 values, expected 3"),
        ({"masks": [[-100, 9, 3], [-100, 2]]}, r"masks\[0\]\[1\]: 9, expected -100 or the token's id 2"),
        ({"scores": [1.0]}, "scores: 1 items, expected 2"),
        ({"scores": [1.0, math.nan]}, r"scores\[1\]: nan, expected a finite number"),
        ({"scores": [1.0, math.inf]}, r"scores\[1\]: inf"),
        ({"scores": [1.0, True]}, r"scores\[1\]: True"),
        ({"scores": [1.0, "1"]}, r"scores\[1\]: '1'"),
        ({"advantages": [[1.0] * 3]}, "advantages: .*, expected 2 lists"),
        ({"advantages": [[1.0] * 3, [1.0]]}, r"advantages\[1\]: .*, expected 2 numbers"),
        ({"advantages": [[1.0] * 3, [1.0, math.nan]]}, r"advantages\[1\]\[1\]: nan"),
        ({"group_overrides": {"lachesis_ticket": "5"}}, "group_overrides.lachesis_ticket: '5'"),
        ({"group_overrides": 3}, "group_overrides: int"),
        ({"overrides": [{}]}, "overrides: .*, expected 2 objects"),
    ],
)
def test_malformed_groups_name_the_field(changes, text):
    with pytest.raises(ScoredDataError, match=text):
        parse_group(posted(**changes), max_tokens=8)


def test_anything_else_is_refused():
    for data in (None, 3, [], "x"):
        with pytest.raises(ScoredDataError):
            parse_group(data, max_tokens=8)


def test_the_digest_tells_groups_apart():
    same = parse_group(posted(), max_tokens=8).digest()
    assert parse_group(posted(), max_tokens=8).digest() == same
    assert parse_group(posted(scores=[1.0, 0.5]), max_tokens=8).digest() != same
    assert parse_group(posted(masks=[[-100, -100, 3], [-100, 2]]), max_tokens=8).digest() != same
