from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from lachesis_bench import chaos
from lachesis_bench.chaos_fleet import plan
from lachesis_bench.chaos_history import (
    Checkpoint,
    History,
    Journal,
    Trained,
    judge,
    newest_checkpoint,
    read_history,
    read_lines,
    save_checkpoint,
)


def trained(ticket, *, batch, versions, content=None):
    return Trained(f"{ticket}:0", content or f"hash of {ticket}", batch, versions)


def event(kind, **fields):
    return {"kind": kind, "source": "queue", **fields}


def good():
    """Versions 0 - 1 - 2 and, after a rollback to 1, 3: a bound of 2. Ticket 0 was voided and its item went to
    ticket 5, ticket 4 was left over at the end, ticket 6 had no variance."""
    final = [
        trained(1, batch=0, versions=(0,)),
        trained(2, batch=1, versions=(0, 1)),
        trained(3, batch=3, versions=(2,)),
        trained(5, batch=3, versions=(1, 3)),
    ]
    return History(
        sent={f"{ticket}:0": f"hash of {ticket}" for ticket in (1, 2, 3, 4, 5)},
        answers=[("1:0", "accepted"), ("1:0", "duplicate"), ("2:0", "accepted")]
        + [("3:0", "duplicate"), ("4:0", "accepted"), ("5:0", "accepted")],
        items={0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 0, 6: 5},
        parents={0: None, 1: 0, 2: 1, 3: 1},
        batches=[*final, trained(3, batch=2, versions=(2,))],
        final=final,
        events=[
            *(event("issued", ticket=ticket, item=ticket) for ticket in range(5)),
            event("voided", ticket=0, reason="actor_expired"),
            event("issued", ticket=5, item=0),
            event("issued", ticket=6, item=5),
            event("voided", ticket=6, reason="no_variance"),
            event("left", group="4:0", reason="finished"),
        ],
    )


def broken(history):
    return judge(history, staleness_max=2).broken


def test_a_good_history():
    verdict = judge(good(), staleness_max=2)
    assert verdict.broken == {}
    assert verdict.acknowledged == {"1:0", "2:0", "3:0", "4:0", "5:0"}
    assert verdict.dropped == set()
    assert verdict.items_done == 5


def test_an_acknowledged_group_that_is_nowhere_is_lost():
    history = good()
    lost = history.final.pop(1)
    assert broken(history) == {"lost": ["2:0"], "items_skipped": [2]}
    history.events.append(event("dropped", group=lost.group, reason="stale"))
    verdict = judge(history, staleness_max=2)
    assert verdict.broken == {}
    assert verdict.dropped == {"2:0"}


def test_a_group_that_was_not_acknowledged_may_be_anywhere():
    history = good()
    history.answers = [answer for answer in history.answers if answer[0] not in ("3:0", "4:0")]
    assert broken(history) == {}


def test_a_group_trained_twice():
    history = good()
    history.final.append(replace(history.final[0], batch=3))
    assert broken(history) == {"duplicated": ["1:0"], "items_doubled": [1]}


def test_the_same_content_under_two_ids():
    history = good()
    history.final[3] = replace(history.final[3], content="hash of 1")
    assert broken(history)["duplicated"] == ["1:0", "5:0"]


def test_a_group_both_trained_and_dropped():
    history = good()
    history.events.append(event("dropped", group="1:0", reason="stale"))
    assert broken(history)["duplicated"] == ["1:0"]


@pytest.mark.parametrize(
    ("batch", "version", "violation"), [(3, 2, False), (3, 0, False), (4, 1, False), (4, 2, True), (4, 9, True)]
)
def test_the_bound_holds_in_the_tree_of_versions(batch, version, violation):
    history = good()
    history.parents[4] = 3
    history.batches.append(trained(1, batch=batch, versions=(batch, version)))
    assert ("violations" in broken(history)) is violation


def test_trained_content_that_no_actor_sent():
    history = good()
    history.sent["2:0"] = "something else"
    assert broken(history) == {"foreign": ["2:0"]}


def test_an_acknowledged_group_stays_known():
    history = good()
    history.answers.append(("1:0", "accepted"))
    assert broken(history) == {"wrong_answers": ["1:0"]}
    history.answers[-1] = ("1:0", "stale")
    assert broken(history) == {"wrong_answers": ["1:0"]}


def test_an_item_that_was_passed_over():
    history = good()
    history.events[6] = event("issued", ticket=5, item=6)
    history.items[5] = 6
    assert broken(history)["items_skipped"] == [0, 5]


def test_an_item_that_is_given_up():
    history = good()
    history.events[6:7] = [event("skipped", item=0, reason="late"), event("issued", ticket=5, item=6)]
    history.events.insert(8, event("issued", ticket=6, item=5))
    history.items[5] = 6
    assert broken(history) == {"items_skipped": [5], "items_doubled": [5]}
    del history.events[8]
    history.events[7] = event("issued", ticket=5, item=5)
    history.events[8] = event("issued", ticket=6, item=6)
    history.items.update({5: 5, 6: 6})
    assert broken(history) == {}


def test_an_item_that_is_issued_twice_or_told_otherwise():
    history = good()
    history.events.append(event("issued", ticket=7, item=2))
    assert broken(history) == {"items_doubled": [2]}
    history = good()
    history.items[3] = 7
    assert broken(history) == {"items_doubled": [7]}


def test_a_queue_without_items_is_not_judged_on_them():
    history = good()
    for e in history.events:
        e.pop("item", None)
    assert judge(history, staleness_max=2).items_done is None
    assert broken(history) == {}


def test_a_torn_line_costs_itself_only(tmp_path):
    path = tmp_path / "actor-0.jsonl"
    Journal(path).note(sent="1:0", content="a")
    path.write_bytes(path.read_bytes() + b'{"answer": "acc')
    Journal(path).note(answer="accepted", group="1:0")
    assert list(read_lines(path)) == [{"sent": "1:0", "content": "a"}, {"answer": "accepted", "group": "1:0"}]


def test_a_history_comes_back_from_its_files(tmp_path):
    actor, learner = Journal(tmp_path / "actor-1.jsonl"), Journal(tmp_path / "learner.jsonl")
    group = trained(1, batch=0, versions=(0,))
    actor.note(ticket=1, item=4)
    actor.note(sent="1:0", content=group.content)
    actor.note(answer="accepted", group="1:0", reason="")
    learner.note(reserved=0, parent=None)
    learner.note(batch=0, groups=[[group.group, group.content, group.versions]])
    (tmp_path / "events.jsonl").write_text(
        json.dumps(event("finished")) + "\n" + json.dumps({"kind": "activity", "source": "actor-1"}) + "\n"
    )
    for version in (3, 20, 100):
        save_checkpoint(
            tmp_path, Checkpoint(version=version, parent=0, step=1, queue="q", trained=[group] * (version == 100))
        )
    assert newest_checkpoint(tmp_path).version == 100
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert read_history(tmp_path) == History(
        sent={"1:0": group.content},
        answers=[("1:0", "accepted")],
        items={1: 4},
        parents={0: None},
        batches=[group],
        final=[group],
        events=[event("finished")],
    )


def test_a_plan_strikes_all_kinds_and_repeats():
    arguments = {"kills": 30, "freezes": 3, "actors": ["actor-0", "actor-1"], "batches": (20, 60)}
    strikes = plan(5, **arguments)
    assert strikes == plan(5, **arguments)
    assert strikes != plan(6, **arguments)
    struck = Counter(role.partition("-")[0] for s in strikes if s.frozen_seconds is None for role in s.roles)
    assert struck == {"queue": 10, "learner": 10, "actor": 10}
    assert sum(s.frozen_seconds is not None for s in strikes) == 3
    assert any(len(s.roles) == 2 for s in strikes)


@pytest.mark.slow
def test_nothing_is_lost_when_processes_are_killed():
    figures = {figure.figure: figure.value for figure in chaos.run("short")}
    assert figures["chaos.kills"] >= 6
    assert (figures["chaos.lost"], figures["chaos.duplicated"], figures["chaos.bound_violations"]) == (0, 0, 0)
    assert figures["chaos.items"] == 0
    assert figures["chaos.frames"] == 5_000
