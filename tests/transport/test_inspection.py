from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from lachesis_transport.decisions import Rules
from lachesis_transport.inspection import LISTED, OTHER, REASONS, URGENT, first_reasons, inspect, ready_ages
from lachesis_transport.messages import pack, unpack
from lachesis_transport.records import OVERHEAD_BYTES
from lachesis_transport.replay import Replay
from lachesis_transport.store import Refused

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)


class Run:
    """A queue with actors a and b and a learner, driven by hand."""

    def __init__(self, **rules) -> None:
        self.replay = Replay(Rules(**{"batch_groups": 2, "staleness_max": 2, "steps": 100, **rules}))
        for name in ("a", "b"):
            self.replay.join(role="actor", name=name, incarnation="1", now=0.0)
        self.replay.join(role="learner", name="l", incarnation="1", now=1.0)
        self.asks = 0
        self.publish(None)

    def publish(self, parent) -> None:
        self.version = self.replay.reserve(parent=parent, key=f"k{len(self.replay.lineage)}")
        self.replay.published(self.version)

    def ticket(self, actor="a", environment="sums", version=None) -> int:
        self.asks += 1
        at = self.version if version is None else version
        return self.replay.ticket(actor=actor, ask=self.asks, version=at, environment=environment, now=2.0).ticket

    def put(self, ticket, actor="a", environment="sums", versions=None) -> int:
        group = groups.group(ticket, versions or [self.version], actor=actor, environment=environment)
        content = group.pack()
        assert self.replay.put(group, content, actor=actor, final=True, now=2.0).status == "accepted"
        return len(content) + OVERHEAD_BYTES

    def look(self, quarantine=(), now=3.0):
        found = inspect(self.replay, quarantine, now=now)
        # It crosses the wire and is printed as JSON.
        assert json.loads(json.dumps(found)) == {k: v for k, v in unpack(pack(found)).items() if k != "schema"} == found
        return found


def test_an_empty_queue():
    found = inspect(Replay(Rules(batch_groups=2, staleness_max=1, steps=5)), [], now=0.0)
    assert found["versions"]["newest"] is found["learner"] is found["lease"] is None
    assert found["ready_by_staleness"] == [[0, 0], [1, 0], [None, 0]]
    assert (found["actors"], found["tickets"]["open"]) == ({"live": 0, "listed": []}, 0)
    assert set(found["counts"].values()) == {0}


def test_what_is_held_is_counted_where_it_is():
    run = Run(max_bytes=10_000, max_uncommitted_bytes=20_000)
    [size] = {run.put(run.ticket()) for _ in range(5)}
    run.replay.lease(version=0, now=2.0)
    run.replay.trained(version=0)
    run.publish(0)
    run.replay.lease(version=1, now=2.0)
    run.ticket("b")
    found = run.look()
    assert found["groups"] == {
        "ready": 1,
        "ready_bytes": size,
        "leased": 2,
        "leased_bytes": 2 * size,
        "held_bytes": 3 * size,
        "max_bytes": 10_000,
        "uncommitted": 2,
        "uncommitted_batches": 1,
        "uncommitted_bytes": 2 * size,
        "max_uncommitted_bytes": 20_000,
        "batch_groups": 2,
    }
    batch = {"groups": 2, "bytes": 2 * size, "masked_versions": 0}
    assert found["lease"] == {"version": 1, "staleness": 1, **batch}
    assert found["uncommitted"] == [{"version": 0, "staleness": 0, **batch}]
    versions = found["versions"]
    assert (versions["newest"], versions["depth"], versions["step"], versions["next_depth"]) == (1, 1, 1, 1)
    assert (versions["staleness_bound"], versions["staleness_trained"], versions["final"]) == (2, 0, None)
    assert (found["counts"]["groups_accepted"], found["counts"]["groups_trained"]) == (5, 2)
    # The ready group is as old as the batch after the leased one makes it.
    assert found["ready_by_staleness"] == [[0, 0], [1, 0], [2, 1], [None, 0]]


def test_ready_groups_get_the_age_that_the_next_batch_gives_them():
    run = Run()
    run.put(run.ticket())
    for _ in range(2):
        run.put(run.ticket())
        run.put(run.ticket())
        run.replay.lease(version=run.version, now=2.0)
        run.replay.trained(version=run.version)
        run.publish(run.version)
    before = ready_ages(run.replay)
    assert sum(before.values()) == 1
    tickets = [run.ticket() for _ in range(2)]
    for ticket in tickets:
        run.put(ticket)
    ages = ready_ages(run.replay)
    lease = run.replay.lease(version=2, now=2.0)
    left = [entry.group_id for entry in run.replay.ready]
    told = Counter({age: n for age, n in ages.items() if n})
    found = Counter(2 - v for entry in lease.groups for v in entry.versions) + Counter([0] * len(left))
    assert told == found


def test_groups_beyond_the_bound_are_told_apart():
    run = Run(staleness_max=1)
    run.put(run.ticket())
    for _ in range(2):  # versions that no batch of this queue made, as after a rollback
        run.publish(run.version)
    assert ready_ages(run.replay) == {0: 0, 1: 0, None: 1}


def test_tickets_by_actor_and_environment_and_the_most_urgent():
    run = Run()
    first = run.ticket("a", "sums")
    run.ticket("b", "words")
    run.put(run.ticket("a", "sums"))
    run.put(run.ticket("a", "sums"))
    run.publish(0)
    later = run.ticket("a", "sums")
    tickets = run.look()["tickets"]
    assert (tickets["open"], tickets["pairs"]) == (3, 2)
    assert tickets["by_actor_and_environment"] == [
        {"actor": "a", "environment": "sums", "open": 2, "oldest_version": 0, "earliest_deadline": 2},
        {"actor": "b", "environment": "words", "open": 1, "oldest_version": 0, "earliest_deadline": 2},
    ]
    assert [(t["ticket"], t["deadline"], t["batches_left"]) for t in tickets["most_urgent"]] == [
        (first, 2, 1),
        (1, 2, 1),
        (later, 3, 2),
    ]
    assert tickets["most_urgent"][0]["item"] == 0


def test_actors_and_environments():
    run = Run(weights={"sums": 1.0, "words": 3.0, "idle": 1.0})
    run.put(run.ticket("a", "sums"))
    run.ticket("b", "words")
    run.replay.void(actor="b", ticket=run.ticket("b", "words"), reason="failed", scores=None, now=2.0)
    run.replay.heard(role="actor", name="a", incarnation="1", now=2.5, version=0)
    found = run.look(now=3.0)
    assert found["learner"] == {"name": "l", "heard_seconds_ago": 2.0}
    a, b = found["actors"]["listed"]
    assert (a["name"], a["version"], a["heard_seconds_ago"]) == ("a", 0, 0.5)
    assert (a["open_tickets"], a["groups_accepted"]) == (0, 1)
    assert 0 < a["groups_per_second"] <= 1 / 60
    assert (b["version"], b["open_tickets"], b["groups_accepted"], b["groups_per_second"]) == (None, 1, 0, 0.0)
    environments = {e.pop("name"): e for e in found["environments"]["listed"]}
    assert environments == {
        "idle": {"next_item": 0, "returned_items": 0, "open_tickets": 0, "share": 0.0, "weight_share": 0.2},
        "sums": {"next_item": 1, "returned_items": 0, "open_tickets": 0, "share": 0.5, "weight_share": 0.2},
        "words": {"next_item": 2, "returned_items": 1, "open_tickets": 1, "share": 0.5, "weight_share": 0.6},
    }
    assert found["tickets_voided"] == {"failed": 1}


def test_the_quarantine_shows_the_start_of_each_frame():
    refused = Refused("actor a", "no good", bytes(range(256)), 1234.5)
    [shown] = Run().look([refused])["quarantine"]
    assert shown == {
        "time": 1234.5,
        "sender": "actor a",
        "reason": "no good",
        "bytes_kept": 256,
        "head": bytes(range(64)).hex(),
    }


def test_looking_changes_nothing():
    run = Run()
    run.put(run.ticket())
    run.ticket("b")
    run.replay.drain()
    before = run.replay.statistics()
    run.look()
    assert run.replay.statistics() == before
    assert not run.replay.drain()


def test_lists_are_cut_and_counts_are_exact():
    size = 1500
    run = Run(batch_groups=size)
    for i in range(size):
        run.replay.join(role="actor", name=f"actor-{i}", incarnation="1", now=0.0)
    for i in range(size):
        run.ticket(f"actor-{i}", f"environment-{i % 700}-{'x' * 3000}")
    frames = [Refused("s" * 1000, "r" * 1000, b"\0" * 65536, 0.0)] * 64
    found = run.look(frames)
    assert (found["actors"]["live"], found["tickets"]["open"], found["tickets"]["pairs"]) == (size + 2, size, size)
    assert found["environments"]["known"] == 700
    listed = found["actors"]["listed"], found["environments"]["listed"], found["tickets"]["by_actor_and_environment"]
    assert [len(part) for part in listed] == [LISTED] * 3
    assert len(found["tickets"]["most_urgent"]) == URGENT
    assert len(pack(found)) < 300_000


def test_reasons_beyond_the_first_are_added_up_and_none_ever_falls():
    counts = {f"reason {i}": i for i in range(REASONS + 10)}
    shown = first_reasons(counts)
    assert len(shown) == REASONS + 1
    assert sum(shown.values()) == sum(counts.values())
    assert shown[OTHER] == sum(range(REASONS, REASONS + 10))
    counts["one more"] = 5
    later = first_reasons(counts)
    assert all(later[reason] >= number for reason, number in shown.items())


@pytest.mark.parametrize("saved", [True, False])
def test_a_restored_queue_shows_the_same(saved):
    run = Run()
    for _ in range(3):
        run.put(run.ticket())
    run.ticket("b", "words")
    run.replay.lease(version=0, now=2.0)
    if saved:
        run.replay.trained(version=0)
    rows: dict = {}
    for (table, key), value in run.replay.drain().rows.items():
        if value is not None:
            rows.setdefault(table, {})[key] = value
    restored = Replay.restore(run.replay.rules, rows, now=3.0)
    seen, again = run.look(), inspect(restored, [], now=3.0)
    for found in (seen, again):
        for client in [found["learner"], *found["actors"]["listed"]]:
            del client["heard_seconds_ago"]
            client.pop("groups_per_second", None)
    assert again == seen
