from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import random_batch, token_keys, trained, trajectory

from lachesis_learner.batch import plan
from lachesis_transport.messages import Batch, Group

OPTIONS = {"ranks": 1, "micro_batch_tokens": 64, "mini_batches": 1, "share_prompts": True, "pad_token": 0}


def seen(micro_batch, flat):
    """Tokens and position ids that the position `flat` attends to, in order."""
    length = micro_batch.input_ids.shape[1]
    row, q = divmod(int(flat), length)
    ks = [k for k in range(q + 1) if q < int(micro_batch.ends[row, k])]
    return (
        tuple(micro_batch.input_ids[row, ks].tolist()),
        micro_batch.position_ids[row, ks].tolist(),
    )


@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 5),
    size=st.integers(1, 5),
    vocabulary=st.sampled_from([2, 3, 90]),
    turns=st.integers(1, 3),
    ranks=st.integers(1, 3),
    budget=st.sampled_from([1, 9, 30, 100, 10_000]),
    mini_batches=st.integers(1, 3),
    share=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_trained_token_is_predicted_once_from_exactly_its_history(
    seed, groups, size, vocabulary, turns, ranks, budget, mini_batches, share
):
    batch = random_batch(seed, groups=groups, size=size, vocabulary=vocabulary, turns=turns)
    mini_batches = min(mini_batches, groups)
    planned = plan(
        batch,
        ranks=ranks,
        micro_batch_tokens=budget,
        mini_batches=mini_batches,
        share_prompts=share,
        pad_token=0,
    )
    expected = trained(batch)
    found = Counter()
    assert [m.index for m in planned] == list(range(mini_batches))
    assert sum(m.trained_tokens for m in planned) == len(expected)
    where = {}
    for mini_batch in planned:
        assert len(mini_batch.ranks) == ranks
        assert len({len(passes) for passes in mini_batch.ranks}) == 1
        assert sum(len(m.targets) for passes in mini_batch.ranks for m in passes) == mini_batch.trained_tokens
        for m in (m for passes in mini_batch.ranks for m in passes):
            assert m.input_ids.numel() <= budget or m.input_ids.shape[0] == len(m.names) == 1
            assert m.tokens + m.padding == m.input_ids.numel()
            keys = token_keys(batch, m)
            for k, key in enumerate(keys):
                history, token, advantage, logprob, staleness, version = expected[key]
                assert seen(m, m.predict[k]) == (history, list(range(len(history))))
                values = (m.targets[k], m.advantages[k], m.behaviour[k], m.staleness[k], m.versions[k])
                assert [v.item() for v in values] == [token, advantage, logprob, staleness, version]
                versions = {v for (g, i, _), (*_, v) in expected.items() if (g, i) == key[:2]}
                assert bool(m.single_version[k]) == (len(versions) == 1)
                where.setdefault(key[0], set()).add(mini_batch.index)
            found.update(keys)
    assert found == Counter(expected.keys())
    assert all(len(indices) == 1 for indices in where.values())


def group_of(prompt, completions, *, group_id="0:0"):
    rng = np.random.default_rng(0)
    return Group(
        group_id=group_id,
        ticket=0,
        actor="a",
        environment="e",
        trajectories=tuple(trajectory(rng, [*prompt, *c], [0] * len(prompt) + [1] * len(c)) for c in completions),
    )


def one_pass(*groups, **options):
    planned = plan(Batch(version=1, groups=groups, distances={0: 1}), **{**OPTIONS, **options})
    return planned[0].ranks[0]


def test_prompt_and_common_beginnings_appear_once():
    (m,) = one_pass(group_of([7, 8, 9], [[1, 2, 3], [1, 2, 4], [5, 6]]))
    # The last token of a completion predicts nothing: two completions of three are the same up to there.
    assert m.input_ids.tolist() == [[7, 8, 9, 1, 2, 5]]
    assert m.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert m.ends.tolist() == [[6, 6, 6, 5, 5, 6]]
    assert m.predict.tolist() == [2, 3, 4, 2, 3, 4, 2, 5]
    assert m.targets.tolist() == [1, 2, 3, 1, 2, 4, 5, 6]


def test_without_sharing_every_sequence_has_its_own_prompt():
    (m,) = one_pass(group_of([7, 8, 9], [[1, 2, 3], [1, 2, 4], [5, 6]]), share_prompts=False)
    assert m.input_ids.tolist() == [[7, 8, 9, 1, 2], [7, 8, 9, 1, 2], [7, 8, 9, 5, 0]]
    assert m.ends.tolist() == [[5, 5, 5, 5, 5], [5, 5, 5, 5, 5], [4, 4, 4, 4, 5]]
    assert m.padding == 1


def test_small_groups_fill_up_rows_without_seeing_each_other():
    (m,) = one_pass(group_of([7, 8, 9], [[1, 2, 3]]), group_of([4], [[5, 6]], group_id="1:0"))
    assert m.input_ids.tolist() == [[7, 8, 9, 1, 2], [4, 5, 0, 0, 0]]
    (m,) = one_pass(
        group_of([7, 8, 9], [[1, 2, 3]]),
        group_of([4], [[5, 6]], group_id="1:0"),
        group_of([3, 2], [[5]], group_id="2:0"),
    )
    assert m.input_ids.tolist() == [[7, 8, 9, 1, 2], [4, 5, 3, 2, 0]]
    assert m.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]]
    assert m.ends.tolist() == [[5, 5, 5, 5, 5], [2, 2, 4, 4, 5]]


def test_a_group_beyond_the_budget_is_split_and_its_prompt_repeated():
    passes = one_pass(group_of([9] * 6, [[i, i, i] for i in (1, 2, 3, 4)]), micro_batch_tokens=10)
    assert [m.input_ids.tolist() for m in passes] == [
        [[9] * 6 + [1, 1, 2, 2]],
        [[9] * 6 + [3, 3, 4, 4]],
    ]


def test_one_group_is_shared_out_over_ranks_and_idle_passes_are_empty():
    batch = Batch(version=1, groups=(group_of([9] * 4, [[1] * 9, [2] * 3, [3] * 3]),), distances={0: 1})
    (mini_batch,) = plan(batch, **{**OPTIONS, "ranks": 4})
    assert [sum(len(m.targets) for m in passes) for passes in mini_batch.ranks] == [9, 3, 3, 0]
    (empty,) = mini_batch.ranks[3]
    assert empty.input_ids.tolist() == [[0]]
    assert empty.ends.tolist() == [[1]]
    assert (empty.tokens, empty.padding, empty.names) == (0, 1, ())
    assert empty.predict.dtype == empty.targets.dtype == empty.sequences.dtype
    assert empty.advantages.numel() == 0


def test_untrained_trajectories_are_left_out():
    rng = np.random.default_rng(0)
    idle = trajectory(rng, [1, 2, 3], [0, 0, 0])
    real = trajectory(rng, [1, 2, 3], [0, 0, 1])
    group = Group(group_id="0:0", ticket=0, actor="a", environment="e", trajectories=(idle, real))
    (m,) = one_pass(group)
    assert m.names == (("0:0", 1),)
    assert m.input_ids.tolist() == [[1, 2]]


def test_padding_and_imbalance_stay_small_on_a_batch_like_the_demo():
    batch = random_batch(1, groups=8, size=8, prompt=40, turns=1, longest=16)
    for ranks in (1, 2):
        (mini_batch,) = plan(batch, **{**OPTIONS, "ranks": ranks, "micro_batch_tokens": 512})
        loads = [sum(m.tokens for m in passes) for passes in mini_batch.ranks]
        assert max(loads) <= 1.15 * min(loads)
        assert sum(m.padding for passes in mini_batch.ranks for m in passes) <= 0.2 * sum(loads)


def test_errors_name_the_field_and_the_value():
    batch = random_batch(0, groups=2)
    with pytest.raises(ValueError, match="mini_batches: 3, expected at most 2, the groups of the batch"):
        plan(batch, **{**OPTIONS, "mini_batches": 3})
    unknown = Batch(version=9, groups=batch.groups, distances={0: 9})
    with pytest.raises(ValueError, match=r"distances: no entry for version [123] of group '0:0'"):
        plan(unknown, **OPTIONS)
