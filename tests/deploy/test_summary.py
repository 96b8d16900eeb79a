from __future__ import annotations

import json

import pytest

from lachesis_deploy.summary import summarise

T = 1000.0


def step(n, **fields):
    """A line of metrics.jsonl: step n takes 10 s, of which it waits 4 (the first one too)."""
    start = T + 10 * (n - 1)
    return {
        "step": n,
        "version": n - 1,
        "published": n,
        "time": start + 10,
        "reward_mean": n / 100,
        "staleness_mean": 0.5,
        "staleness_max": min(n - 1, 2),
        "staleness_histogram": [60, 30, 10][: min(n, 3)],
        "group_ids": [f"{n}:0", f"{n}:1"],
        "tokens": 100,
        "delta_bytes": 1000 * n,
        "full_bytes": 270_000,
        "mismatch_kl": 0.001 * n,
        "phases": [
            ["wait", start, start + 4],
            ["forward_backward", start + 4, start + 9],
            ["step", start + 9, start + 10],
        ],
        **fields,
    }


def accepted(steps):
    return [{"kind": "accepted", "group": f"{n}:{i}", "time": T} for n in range(1, steps + 1) for i in range(2)]


def evaluation(version, accuracy, *, source="actor-0", environment="sums", time=T):
    return {
        "kind": "evaluation",
        "source": source,
        "time": time,
        "environment": environment,
        "version": version,
        "metrics": {"accuracy": accuracy},
    }


def activity(start, end, tokens, intervals, source="actor-0"):
    return {"kind": "activity", "source": source, "start": start, "end": end, "tokens": tokens, "intervals": intervals}


def test_nothing_known_is_nothing_claimed():
    summary = summarise([], [], None, staleness_bound=None)
    values = json.loads(summary.to_json())
    known = {key: value for key, value in values.items() if value is not None}
    assert known == {"steps": 0, "groups_trained": 0, "groups_duplicated": 0, "evaluations": []}
    assert all(isinstance(text, str) for _, text in summary.rows())


def test_reward_is_the_mean_of_the_first_and_last_tenth():
    summary = summarise([step(n) for n in range(1, 41)], [], None, staleness_bound=2)
    assert summary.steps == 40
    assert summary.reward_first == pytest.approx((0.01 + 0.02 + 0.03 + 0.04) / 4)
    assert summary.reward_last == pytest.approx((0.37 + 0.38 + 0.39 + 0.40) / 4)
    short = summarise([step(n) for n in range(1, 4)], [], None, staleness_bound=2)
    assert (short.reward_first, short.reward_last) == (0.01, 0.03)


def test_a_step_without_reward_is_left_out():
    summary = summarise([step(1, reward_mean=None), step(2)], [], None, staleness_bound=2)
    assert (summary.reward_first, summary.reward_last) == (0.02, 0.02)


def test_evaluations_of_one_version_are_averaged_and_ordered_by_version():
    events = [
        evaluation(4, 0.75),
        evaluation(0, 0.1),
        evaluation(0, 0.3, source="actor-1"),
        evaluation(0, 0.9, environment="other"),
    ]
    summary = summarise([], events, None, staleness_bound=2)
    assert (summary.eval_before_version, summary.eval_after_version) == (0, 4)
    assert (summary.eval_before, summary.eval_after) == (pytest.approx(0.2), 0.75)
    assert len(summary.evaluations) == 4


def test_one_evaluation_is_no_comparison():
    summary = summarise([], [evaluation(0, 0.2)], None, staleness_bound=2)
    assert (summary.eval_before, summary.eval_after) == (0.2, None)


def test_staleness_and_its_bound():
    summary = summarise([step(n) for n in range(1, 5)], [], {"bound_violations": 0}, staleness_bound=2)
    assert (summary.staleness_max, summary.staleness_mean, summary.bound_violations) == (2, 0.5, 0)
    assert summary.stale_tokens_trained == 0 + 30 + 40 + 40
    tighter = summarise([step(n) for n in range(1, 5)], [], {"bound_violations": 0}, staleness_bound=1)
    assert tighter.bound_violations == 2
    counted = summarise([step(1)], [], {"bound_violations": 3}, staleness_bound=2)
    assert counted.bound_violations == 3


def test_steps_that_a_dead_learner_had_trained_count_once():
    lost = [step(3, reward_mean=0.9, group_ids=["8:0"]), step(4, reward_mean=0.9)]
    summary = summarise([step(1), step(2), *lost, step(3), step(4)], [], None, staleness_bound=2)
    assert (summary.steps, summary.groups_trained, summary.groups_duplicated) == (4, 8, 0)
    assert summary.reward_last == 0.04


def test_the_time_while_a_run_was_stopped_does_not_count():
    def later(record, seconds):
        phases = [[name, start + seconds, end + seconds] for name, start, end in record["phases"]]
        return {**record, "time": record["time"] + seconds, "phases": phases}

    # Without the break this is test_shares_of_time_are_taken_from_the_first_lease_on, twice.
    metrics = [step(1), step(2), later(step(3), 1000), later(step(4), 1000)]
    events = [activity(T, T + 40, 80, [["generating", T, T + 40]])]
    summary = summarise(metrics, events, None, staleness_bound=2)
    assert summary.learner_idle_share == pytest.approx(8 / 32)
    assert summary.learner_tokens_per_second == pytest.approx(400 / 32)
    assert summary.actor_tokens_per_second == pytest.approx(80 * 16 / 40 / 32)


def test_every_group_is_accounted_for():
    metrics = [step(1), step(2)]
    events = [*accepted(2), {"kind": "accepted", "group": "9:0"}, {"kind": "accepted", "group": "9:1"}]
    events.append({"kind": "dropped", "group": "9:0", "reason": "stale"})
    events += [{"kind": "left", "group": "9:1", "reason": "finished"}, {"kind": "finished", "version": 2}]
    summary = summarise(metrics, events, None, staleness_bound=2)
    assert summary.groups_trained == 4
    assert (summary.groups_lost, summary.groups_duplicated, summary.groups_unknown) == (0, 0, 0)
    assert (summary.groups_dropped, summary.groups_left) == ({"stale": 1}, 1)


def test_a_lost_a_doubled_and_an_unknown_group_are_seen():
    metrics = [step(1), step(2, group_ids=["1:0", "7:0"])]
    events = [*accepted(2), {"kind": "finished", "version": 2}]
    summary = summarise(metrics, events, None, staleness_bound=2)
    assert (summary.groups_lost, summary.groups_duplicated, summary.groups_unknown) == (2, 1, 1)


def test_before_the_end_nothing_counts_as_lost():
    summary = summarise([step(1)], accepted(2), {"ready": 2}, staleness_bound=2)
    assert (summary.groups_lost, summary.groups_left) == (None, None)


def test_reasons_are_counted():
    events = [
        {"kind": "voided", "ticket": i, "reason": reason} for i, reason in enumerate(["failed", "gone", "failed"])
    ]
    summary = summarise([], events, None, staleness_bound=2)
    assert summary.tickets_voided == {"failed": 2, "gone": 1}
    assert summary.groups_dropped is None
    assert summarise([], [], {"groups_dropped": {"late": 2}}, staleness_bound=2).groups_dropped == {"late": 2}


def test_publication():
    events = [
        {"kind": "started", "source": "actor-0"},
        {"kind": "activation", "source": "actor-0", "version": 0, "pause_seconds": 9.0},
        {"kind": "activation", "source": "actor-1", "version": 0, "pause_seconds": 9.0},
        {"kind": "activation", "source": "actor-0", "version": 1, "pause_seconds": 0.2},
        {"kind": "activation", "source": "actor-0", "version": 2, "pause_seconds": 0.4},
        {"kind": "started", "source": "actor-0"},
        {"kind": "activation", "source": "actor-0", "version": 2, "pause_seconds": 9.0},
        {"kind": "checksum_mismatch", "version": 2},
    ]
    summary = summarise([step(1), step(2)], events, None, staleness_bound=2)
    assert (summary.delta_bytes_mean, summary.full_bytes) == (1500, 270_000)
    assert summary.pause_seconds_mean == pytest.approx(0.3)
    assert summary.checksum_mismatches == 1
    assert summary.mismatch_kl == pytest.approx(0.0015)


def test_damaged_files_of_weights_are_counted_over_all_starts():
    starts = [{"kind": "weights_restored", "version": None, "damaged": n} for n in (0, 2, 1)]
    for events, count in (([], None), (starts[:1], 0), (starts, 3)):
        summary = summarise([step(1)], events, None, staleness_bound=2)
        assert summary.weight_files_damaged == count
        assert ("damaged files 3" in dict(summary.rows())["weight delta"]) == (count == 3)


def test_shares_of_time_are_taken_from_the_first_lease_on():
    # The window is 1004 to 1020: the learner computes 1004-1010 and 1014-1020, and waits 4 of 16 s.
    generating, idle, paused = "generating", "idle", "paused"
    events = [
        activity(T, T + 8, 80, [[generating, T, T + 8]]),
        activity(T + 8, T + 20, 60, [[idle, T + 8, T + 12], [paused, T + 12, T + 13], [generating, T + 13, T + 20]]),
    ]
    summary = summarise([step(1), step(2)], events, None, staleness_bound=2)
    assert summary.learner_idle_share == pytest.approx(4 / 16)
    assert summary.learner_tokens_per_second == pytest.approx(200 / 16)
    assert summary.actor_tokens_per_second == pytest.approx((80 / 2 + 60) / 16)
    assert summary.actor_idle_share == pytest.approx(5 / 16)
    assert summary.overlap_share == pytest.approx((4 + 6) / 16)
    alone = summarise([step(1), step(2)], [], None, staleness_bound=2)
    assert (alone.actor_idle_share, alone.overlap_share) == (None, None)
