from __future__ import annotations

import numpy as np
import pytest

from lachesis_actors.advantages import AdvantageError, NoVariance, group_advantages, token_advantages

MASKS = [np.array([0, 1, 1], np.uint8), np.array([0, 0, 1, 1], np.uint8), np.array([0, 1], np.uint8)]


def test_group_divides_by_the_populations_std():
    values = group_advantages("group", [1.0, 0.0, 0.0, 1.0])
    assert values == pytest.approx([0.5 / (0.5 + 1e-6) * s for s in (1, -1, -1, 1)])


def test_mean_and_loo():
    assert group_advantages("mean", [3.0, 0.0, 0.0]) == pytest.approx([2.0, -1.0, -1.0])
    # R minus the mean of the others: 3 - 0, 0 - 1.5, 0 - 1.5
    assert group_advantages("loo", [3.0, 0.0, 0.0]) == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("mode", ["group", "mean", "loo"])
@pytest.mark.parametrize("scores", [[1.0], [0.5, 0.5, 0.5]])
def test_equal_scores_carry_no_signal(mode, scores):
    with pytest.raises(NoVariance):
        group_advantages(mode, scores)


def test_token_advantages_spread_over_trained_tokens_only():
    values = token_advantages("mean", scores=[3.0, 0.0, 0.0], masks=MASKS, given=None)
    assert [v.dtype for v in values] == [np.float32] * 3
    assert [v.tolist() for v in values] == [[0, 2, 2], [0, 0, -1, -1], [0, -1]]


@pytest.mark.parametrize("mode", ["given", "group", "mean", "loo"])
def test_given_advantages_are_taken_as_they_are_in_every_mode(mode):
    given = [[9.0, 1.0, 2.0], [9.0, 9.0, 3.0, 4.0], [9.0, 5.0]]
    values = token_advantages(mode, scores=[1.0, 1.0, 1.0], masks=MASKS, given=given)
    assert [v.tolist() for v in values] == [[0, 1, 2], [0, 0, 3, 4], [0, 5]]


@pytest.mark.parametrize("absent", [None, [], [[], [], []]])
def test_given_mode_without_advantages_is_refused(absent):
    with pytest.raises(AdvantageError, match="advantages: missing"):
        token_advantages("given", scores=[1.0, 0.0, 0.0], masks=MASKS, given=absent)


def test_lengths_are_checked():
    with pytest.raises(AdvantageError, match=r"advantages: 1 lists, expected 3"):
        token_advantages("group", scores=[1.0, 0.0, 0.0], masks=MASKS, given=[[1.0, 1.0, 1.0]])
    with pytest.raises(AdvantageError, match=r"advantages\[1\]: 2 values, expected 4"):
        token_advantages("group", scores=[1.0, 0.0, 0.0], masks=MASKS, given=[[1.0] * 3, [1.0] * 2, [1.0] * 2])


def test_zeroed_sequences():
    values = token_advantages("mean", scores=[3.0, 0.0, 0.0], masks=MASKS, given=None, zeroed=[True, False, False])
    assert values[0].tolist() == [0, 0, 0]
    assert values[1].tolist() == [0, 0, -1, -1]
