"""The queue against whatever may happen, in any order: after every step its promises are checked."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import msgpack
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lachesis_transport.decisions import Grant, Rules, Wait
from lachesis_transport.messages import Scores
from lachesis_transport.records import Lease
from lachesis_transport.replay import Replay

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)

picks = st.integers(0, 1 << 30)


def pick(number: int, items):
    items = list(items)
    return items[number % len(items)]


class QueueModel(RuleBasedStateMachine):
    """Two actors, one learner. `orderly` until a rollback, a ticket of several groups or a group older than its ticket:
    till then nothing accepted may ever be dropped."""

    @initialize(
        size=st.integers(1, 3),
        bound=st.integers(0, 3),
        late=st.sampled_from(["wait", "drop", "mask_tokens"]),
        order=st.sampled_from(["deadline", "deadline", "deadline", "freshest", "uniform"]),
        reuse=st.sampled_from([1, 1, 2, 3]),
    )
    def start(self, size, bound, late, order, reuse):
        self.size, self.bound, self.reuse = size, bound, min(reuse, bound + 1)
        self.rules = Rules(
            batch_groups=size,
            staleness_max=bound,
            steps=1 << 20,
            late=late,
            late_seconds=10.0,
            reuse=self.reuse,
            order=order,
            max_bytes=1 << 20,
            heartbeat_seconds=30.0,
        )
        self.replay = Replay(self.rules)
        self.rows: dict[str, dict] = {}
        self.contents: set[str] = set()
        self.now, self.asks, self.keys, self.life = 0.0, 0, 0, 1
        self.open: dict[int, tuple[str, int]] = {}
        self.accepted: dict[str, object] = {}
        self.trained: Counter[str] = Counter()
        self.dropped: set[str] = set()
        self.versions: list[int] = []
        self.parents: dict[int, int | None] = {}
        self.made_by: dict[int, list[str]] = {}
        self.checkpoint: int | None = None
        self.orderly = order == "deadline" and late != "mask_tokens"
        self.join_all()
        self.publish(None)

    def join_all(self):
        for role, name, life in (("actor", "a", "1"), ("actor", "b", "1"), ("learner", "l", str(self.life))):
            self.replay.join(role=role, name=name, incarnation=life, now=self.now)

    def publish(self, parent):
        self.keys += 1
        version = self.replay.reserve(parent=parent, key=str(self.keys))
        assert version == self.replay.reserve(parent=parent, key=str(self.keys))
        assert version not in self.parents
        self.parents[version] = parent
        self.replay.published(version)
        self.current, self.is_trained = version, False
        self.versions.append(version)

    def path(self, version):
        while version is not None:
            yield version
            version = self.parents[version]

    def distance(self, a, b):
        up, over = list(self.path(a)), list(self.path(b))
        common = next((v for v in up if v in over), None)
        return None if common is None else up.index(common) + over.index(common)

    def take_events(self):
        writing = self.replay.drain()
        for (table, key), row in writing.rows.items():
            if row is None:
                self.rows.get(table, {}).pop(key, None)
            else:
                self.rows.setdefault(table, {})[key] = msgpack.unpackb(msgpack.packb(row), strict_map_key=False)
        for name, content in writing.contents.items():
            (self.contents.discard if content is None else self.contents.add)(name)
        for event in writing.events:
            if event.kind == "voided":
                self.open.pop(event.fields["ticket"], None)
            elif event.kind in ("dropped", "left"):
                name = event.fields["group"]
                assert name not in self.dropped
                self.dropped.add(name)
                assert not self.orderly, f"{name} was thrown away"

    @rule()
    def queue_restarts(self):
        """From what was saved the same queue comes back."""
        self.take_events()
        before, self.replay = self.replay, Replay.restore(self.rules, self.rows, now=self.now)
        assert self.replay.statistics() == before.statistics()
        assert sorted(self.replay.deadlines()) == sorted(before.deadlines())
        assert self.replay.next_depth == before.next_depth
        assert self.replay.items.streams == before.items.streams
        assert sorted(self.replay.held) == sorted(before.held)
        assert not self.replay.drain()

    # ---------------------------------------------------------------- actors

    @rule(actor=st.sampled_from("ab"), back=st.integers(0, 4))
    def ask(self, actor, back):
        version = self.versions[max(0, len(self.versions) - 1 - back)]
        self.asks += 1
        answer = self.replay.ticket(actor=actor, ask=self.asks, version=version, environment="e", now=self.now)
        if isinstance(answer, Grant):
            self.open[answer.ticket] = (actor, version)
            assert answer == self.replay.ticket(
                actor=actor, ask=self.asks, version=version, environment="e", now=self.now
            )
        else:
            assert isinstance(answer, Wait)

    def put(self, ticket, versions, *, index=0, final=True):
        actor, _ = self.open[ticket]
        group = groups.group(ticket, versions, index=index, actor=actor, environment="e")
        answer = self.replay.put(group, group.pack(), actor=actor, final=final, now=self.now)
        if answer.status == "accepted":
            self.accepted[group.group_id] = group
        if final and answer.status in ("accepted", "stale", "duplicate"):
            self.open.pop(ticket)
        return answer

    @precondition(lambda self: self.open)
    @rule(which=picks, ahead=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def put_one(self, which, ahead):
        ticket = pick(which, self.open)
        first = self.versions.index(self.open[ticket][1])
        versions = [self.versions[min(first + a, len(self.versions) - 1)] for a in ahead]
        answer = self.put(ticket, versions)
        assert answer.status == "accepted" or not self.orderly, answer

    @precondition(lambda self: self.open)
    @rule(which=picks, sampled=st.lists(picks, min_size=1, max_size=3), index=st.integers(0, 2), final=st.booleans())
    def put_anything(self, which, sampled, index, final):
        self.orderly = False
        versions = [pick(s, self.versions) for s in sampled]
        self.put(pick(which, self.open), versions, index=index, final=final)

    @precondition(lambda self: self.accepted)
    @rule(which=picks)
    def put_again(self, which):
        group = self.accepted[pick(which, self.accepted)]
        before = self.replay.statistics()
        answer = self.replay.put(group, group.pack(), actor=group.actor, final=True, now=self.now)
        self.open.pop(group.ticket, None)
        after = self.replay.statistics()
        assert answer.status in ("duplicate", "stale")
        assert before["groups_accepted"] == after["groups_accepted"]
        assert before["ready"] == after["ready"]

    @precondition(lambda self: self.open)
    @rule(which=picks, scored=st.booleans())
    def void(self, which, scored):
        ticket = pick(which, self.open)
        scores = Scores.of([1.0, 1.0]) if scored else None
        for _ in range(2):
            self.replay.void(actor=self.open[ticket][0], ticket=ticket, reason="r", scores=scores, now=self.now)
        self.open.pop(ticket)

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        for role, name, life in (("actor", "a", "1"), ("learner", "l", str(self.life))):
            self.replay.heard(role=role, name=name, incarnation=life, now=self.now)
        self.replay.expire(self.now)
        self.take_events()
        self.replay.join(role="actor", name="b", incarnation="1", now=self.now)

    # ---------------------------------------------------------------- the learner

    def train(self, batch):
        names = [g.group_id for g in batch.groups]
        assert len(names) == self.size
        for group in batch.groups:
            for version in group.versions:
                age = self.distance(version, batch.version)
                assert batch.distances.get(version, age) == age
                assert (age <= self.bound) == (version not in batch.masked)
            assert not set(group.versions) <= set(batch.masked)
        self.replay.trained(version=batch.version)
        self.is_trained = True
        self.made_by[batch.version] = names
        self.trained.update(names)
        assert set(self.trained.values()) <= set(range(self.reuse + 1)), "a group was trained too often"

    @precondition(lambda self: not self.is_trained)
    @rule(train=st.booleans())
    def lease(self, train):
        answer = self.replay.lease(version=self.current, now=self.now)
        if isinstance(answer, Lease):
            assert answer is self.replay.lease(version=self.current, now=self.now)
            if train:
                self.train(answer)

    @precondition(lambda self: self.is_trained)
    @rule()
    def go_on(self):
        self.publish(self.current)

    @rule(back=st.integers(0, 3))
    def commit(self, back):
        path = list(self.path(self.current))
        version = path[min(back, len(path) - 1)]
        if self.checkpoint is None or self.checkpoint in self.path(version):
            self.checkpoint = version
            self.replay.commit(version=version, checkpoint=f"c{version}")

    @precondition(lambda self: self.checkpoint is not None and self.life < 4)
    @rule()
    def learner_restarts(self):
        self.orderly = False
        self.life += 1
        self.replay.leave(role="learner", name="l")
        self.join_all()
        kept = list(self.path(self.checkpoint))[1:]
        for version in [v for v in self.made_by if v not in kept]:
            self.trained.subtract(self.made_by.pop(version))
        self.publish(self.checkpoint)

    @precondition(lambda self: not self.is_trained)
    @rule()
    def everything_comes(self):
        """Actors that are current and deliver what they hold always complete the batch."""
        for ticket, (_, version) in list(self.open.items()):
            self.put(ticket, [version])
        self.take_events()
        for _ in range(self.size * (self.bound + 2) * 4):
            answer = self.replay.lease(version=self.current, now=self.now)
            self.take_events()
            if isinstance(answer, Lease):
                return
            self.asks += 1
            grant = self.replay.ticket(actor="a", ask=self.asks, version=self.current, environment="e", now=self.now)
            assert isinstance(grant, Grant), (answer, grant)
            self.open[grant.ticket] = ("a", self.current)
            self.put(grant.ticket, [self.current])
        raise AssertionError(f"never complete: {answer}")

    # ---------------------------------------------------------------- promises

    @invariant()
    def promises(self):
        self.take_events()
        counts = self.replay.statistics()
        assert counts["bound_violations"] == 0
        assert counts["staleness_max"] <= self.bound
        trained = sum(self.trained.values())
        assert counts["groups_trained"] == trained
        held = set(self.replay.held)
        assert held == self.contents
        assert counts["groups_accepted"] == len(self.accepted)
        at_hand = {entry.group_id for entry in self.replay.ready}
        at_hand |= set(self.replay.leased.names if self.replay.leased else ())
        assert at_hand <= held
        for name in self.accepted:
            # Nothing is lost, and nothing is trained that was dropped.
            assert (name in self.dropped) + (self.trained[name] > 0 or name in at_hand) == 1, name
        items = (
            [t.item for t in self.replay.tickets] + [i for i, _ in self.replay.items.streams["e"].returned]
            if ("e" in self.replay.items.streams)
            else []
        )
        assert len(items) == len(set(items))
        if self.orderly:
            first, deadlines = self.replay.next_depth, self.replay.deadlines()
            for due in range(first, max(deadlines, default=first) + 1):
                assert sum(d <= due for d in deadlines) <= (due - first + 1) * self.size
            assert not [d for d in deadlines if d < first]


QueueModel.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
TestQueueModel = QueueModel.TestCase
