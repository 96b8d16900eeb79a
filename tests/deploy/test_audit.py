from __future__ import annotations

from lachesis_deploy.audit import audit, lasting


def lines(*steps):
    return [{"step": n, "group_ids": [f"{n}:0"], "line": i} for i, n in enumerate(steps)]


def accepted(*groups):
    return [{"kind": "accepted", "group": group} for group in groups]


def batch(kind, version, *groups):
    return {"kind": kind, "version": version, "groups": list(groups)}


FINISHED = {"kind": "finished", "version": 9}


def shown(metrics, events, **options):
    found = audit(lasting(metrics), events, **options)
    return tuple(found[f"groups_{key}"] for key in ("trained", "lost", "duplicated", "unknown"))


def test_a_step_that_is_trained_again_undoes_itself_and_those_after_it():
    def kept(*steps):
        return [(line["step"], line["line"]) for line in lasting(lines(*steps))]

    assert kept(1, 2, 3) == [(1, 0), (2, 1), (3, 2)]
    assert kept(1, 2, 3, 2, 3) == [(1, 0), (2, 3), (3, 4)]
    assert kept(1, 2, 3, 2) == [(1, 0), (2, 3)]
    assert kept(1, 2, 1) == [(1, 2)]
    assert lasting([{"loss": 1.0}, {"step": None}]) == []


def test_what_a_dead_learner_had_trained_counts_once():
    events = [
        *accepted("1:0", "2:0", "3:0"),
        batch("trained", 0, "1:0"),
        batch("trained", 1, "2:0"),
        batch("returned", 1, "2:0"),  # the learner came back from its checkpoint of version 1, as version 3
        batch("trained", 3, "2:0"),
        batch("trained", 4, "3:0"),
        FINISHED,
    ]
    assert shown(lines(1, 2, 2, 3), events) == (3, 0, 0, 0)


def test_a_returned_group_may_get_too_old_but_not_lost():
    events = [*accepted("1:0", "2:0"), batch("trained", 0, "1:0"), batch("returned", 0, "1:0")]
    stale = {"kind": "dropped", "group": "1:0", "reason": "stale"}
    metrics = [*lines(1), {"step": 1, "group_ids": ["2:0"]}]
    assert shown(metrics, [*events, stale, batch("trained", 2, "2:0"), FINISHED]) == (1, 0, 0, 0)
    assert shown(metrics, [*events, batch("trained", 2, "2:0"), FINISHED]) == (1, 1, 0, 0)


def test_a_group_that_the_queue_gave_twice_is_seen_though_the_learner_shows_it_once():
    events = [*accepted("1:0"), batch("trained", 0, "1:0"), batch("trained", 1, "1:0"), FINISHED]
    assert shown(lines(1), events) == (1, 0, 1, 0)
    # The return of a batch that was only leased takes nothing back.
    leased = batch("returned", 2, "1:0")
    assert shown(lines(1), [*events, leased]) == (1, 0, 1, 0)


def test_planned_reuse_is_no_duplicate():
    events = [*accepted("1:0"), batch("trained", 0, "1:0"), batch("trained", 1, "1:0"), FINISHED]
    metrics = [{"step": 1, "group_ids": ["1:0"]}, {"step": 2, "group_ids": ["1:0"]}]
    assert shown(metrics, events, reuse=2) == (2, 0, 0, 0)
    assert shown(metrics, events) == (2, 0, 1, 0)
    third = [*metrics, {"step": 3, "group_ids": ["1:0"]}]
    assert shown(third, [*events, batch("trained", 2, "1:0")], reuse=2) == (3, 0, 1, 0)


def test_a_finished_run_that_goes_on_has_not_ended():
    events = [*accepted("1:0", "2:0"), batch("trained", 0, "1:0"), FINISHED]
    assert shown(lines(1), events)[1] == 1
    assert shown(lines(1), [*events, {"kind": "reserved", "version": 2, "parent": 1}])[1] is None
