"""Visits every state that a small queue can reach, and checks the promises of docs/queue.md in each.

Breadth first from the empty queue. A state is what the queue has saved; each step restores a queue from it, so that
the queue is restarted everywhere, at no cost of its own. Histories that differ only in names lead to one state.

Where the learner never comes back, versions count from the one to be trained (`rolling`): the states are then finitely
many, all of them are visited, and what is found holds for histories of any length. With a learner that comes back the
tree of versions itself matters, and histories end with `versions` of them.

Actors are freer here than real ones: a ticket is asked at any published version, its group's tokens are of any versions
from the ticket's on. So one actor stands for any number that lag as they like; a second one only expires.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from lachesis_transport.decisions import Grant, Rules, Wait
from lachesis_transport.messages import Scores
from lachesis_transport.records import Entry, Lease, Ticket
from lachesis_transport.replay import Replay

LATE = 10.0
ENDLESS = 1 << 20


class Scored(NamedTuple):
    score: float


@dataclass(frozen=True)
class Sketch:
    """What the state machine looks at of a group, without arrays."""

    group_id: str
    ticket: int
    actor: str
    versions: tuple[int, ...]
    environment: str = "e"
    nbytes: int = 100
    trajectories: tuple[Scored, ...] = (Scored(1.0),)

    def validate(self) -> None:
        pass


@dataclass(frozen=True)
class Scope:
    """Which histories are explored."""

    bound: int
    size: int
    reuse: int = 1
    late: str = "wait"
    order: str = "deadline"
    actors: str = "a"
    steps: int = ENDLESS
    restarts: int = 0
    """How often the learner may come back from its checkpoint."""
    versions: int = 0
    """Versions until a history ends; 0: never."""
    failures: bool = False
    """Whether tickets also fail by their own fault, and end with scores of a group that trains nothing."""
    several: bool = False
    """Whether a ticket may bring more than one group."""

    @property
    def rules(self) -> Rules:
        return Rules(
            batch_groups=self.size,
            staleness_max=self.bound,
            steps=self.steps,
            late=self.late,
            late_seconds=LATE,
            reuse=self.reuse,
            order=self.order,
        )

    @property
    def orderly(self) -> bool:
        """Whether nothing that is accepted may be dropped."""
        return not self.restarts and not self.several and self.order == "deadline" and self.late != "mask_tokens"

    @property
    def alike(self) -> bool:
        """Whether two things of the same deadline are the same, whichever is older."""
        simple = self.rolling and not self.failures and not self.several and len(self.actors) == 1
        return simple and self.reuse == 1 and self.late != "mask_tokens"

    @property
    def rolling(self) -> bool:
        return not self.versions


@dataclass
class State:
    """What the queue saved, and what really happened."""

    rows: dict[str, dict] = field(default_factory=dict)
    contents: frozenset[str] = frozenset()
    parents: tuple[int | None, ...] = ()
    made: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Groups that trained each version, those undone by a restart not among them."""
    accepted: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    """Each group's item, and whether it was dropped or left since ("" if not)."""
    spent: frozenset[int] = frozenset()
    """Items that scores were given for, or that were skipped."""
    checkpoint: int | None = None
    life: int = 1
    is_trained: bool = False

    @property
    def current(self) -> int:
        return len(self.parents) - 1


class Broken(AssertionError):
    pass


class Exploration:
    """All states of one scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.rules = scope, scope.rules
        self.found: dict[Any, tuple[Any, Any]] = {}
        self.steps = 0

    # ------------------------------------------------------------------ the search

    def run(self, limit: int = 1 << 30) -> int:
        """Visit all states, or `limit` of them; returns how many."""
        start, replay = State(), Replay(self.rules)
        for actor in self.scope.actors:
            replay.join(role="actor", name=actor, incarnation="1", now=0.0)
        replay.join(role="learner", name="l", incarnation="1", now=0.0)
        self.publish(start, replay, None)
        self.save(start, replay)
        queue = deque([(self.name(start), start)])
        self.found[queue[0][0]] = (None, "start")
        while queue and len(self.found) < limit:
            name, state = queue.popleft()
            for action in self.actions(state):
                self.steps += 1
                try:
                    after, replay = self.step(state, action)
                    new = self.name(after)
                    if new not in self.found:
                        self.found[new] = (name, action)
                        self.check_restart(after, replay)
                        queue.append((new, after))
                except Exception as error:
                    raise Broken(f"{error!r}\nin {self.scope}\nafter {[*self.history(name), action]}") from error
        return len(self.found)

    def history(self, name: Any) -> list[Any]:
        actions = []
        while name is not None:
            name, action = self.found[name]
            actions.append(action)
        return actions[::-1]

    def name(self, state: State) -> Any:
        """The state without what cannot matter: names, counts and what is over."""
        scope = self.scope
        rows, shift = state.rows, state.current if scope.rolling else 0
        whole = not scope.rolling or scope.late == "mask_tokens"
        order: list[tuple[Any, ...]] = []
        for number, (version, actor, _, _, _, attempts, groups, used) in rows.get("ticket", {}).items():
            order.append((number, -1, version - shift, actor, attempts if scope.failures else 0, groups, used))
        numbers = {}
        for group, row in rows.get("group", {}).items():
            ticket, index, versions, _, _, _, _, uses, ready = row
            held = ((versions[0] - shift, versions[-1] - shift) if whole else (versions[0] - shift,), uses, ready)
            order.append((ticket, index, *held))
            numbers[group] = ticket, index
        order.sort()
        rank = {place[:2]: i for i, place in enumerate(order)}
        batches = tuple(
            (v - shift, tuple(rank[numbers[g]] for g in batch[0]), batch[5])
            for v, batch in rows.get("batch", {}).items()
        )
        stream = rows.get("stream", {}).get("e", [0, []])
        returned = tuple(a for _, a in stream[1]) if scope.failures else ()
        step = rows["state"][""]["step"]
        tree = () if scope.rolling else (state.parents, tuple(state.made), state.checkpoint, state.life)
        left = () if scope.steps == ENDLESS else (step,)
        counts = () if scope.rolling else tuple(ticket for ticket, *_ in order if ticket < 0)
        things = [place[2:] if place[1] < 0 else (place[1] > 0, *place[2:]) for place in order]
        if scope.alike:
            things.sort(key=repr)
            batches = tuple((v, trained) for v, _, trained in batches)
        return tuple(things), batches, returned, state.is_trained, tree, left, counts

    # ------------------------------------------------------------------ what may happen

    def actions(self, state: State) -> Iterator[tuple[Any, ...]]:
        scope, current = self.scope, state.current
        if not state.is_trained and state.rows["state"][""]["step"] < scope.steps:
            yield ("lease",)
        if any(not batch[5] for batch in state.rows.get("batch", {}).values()):
            yield ("train",)
        elif state.is_trained and (scope.rolling or current + 1 < scope.versions):
            yield ("publish",)
        for version in range(max(0, current - scope.bound - 1) if scope.rolling else 0, current + 1):
            yield from (("ask", actor, version) for actor in scope.actors)
        seen = set()
        for number, row in state.rows.get("ticket", {}).items():
            kind = (row[0], row[1], row[5], row[6])
            if kind in seen and not scope.several:
                continue  # another like it: the older one has the more urgent place, the rest is the same
            seen.add(kind)
            yield "void", number, "cancelled", None
            if scope.failures:
                yield "void", number, "failed", None
                yield "void", number, "no_variance", Scores.of([1.0])
            for low, high in combinations_with_replacement(range(row[0], current + 1), 2):
                if scope.late == "mask_tokens" or not scope.rolling or high == current:
                    yield "put", number, (low, high), True
                    if scope.several and row[6] < 2:
                        yield "put", number, (low, high), False
        for actor in scope.actors[1:]:
            yield "expire", actor
        if scope.restarts:
            if state.checkpoint != current and not state.is_trained:
                yield ("save",)
            if state.checkpoint is not None:
                yield ("commit",)
                if state.life <= scope.restarts and current + 1 < scope.versions:
                    yield ("restart",)

    def step(self, before: State, action: tuple[Any, ...]) -> tuple[State, Replay]:
        state = replace(before)
        replay = Replay.restore(self.rules, before.rows, now=0.0)
        getattr(self, f"do_{action[0]}")(state, replay, *action[1:])
        self.save(state, replay)
        self.check(state, replay)
        if action == ("lease",) and replay.leased is None and not replay.tickets:
            self.check_alive(state, replay)
        return state, replay

    def do_lease(self, state: State, replay: Replay) -> None:
        answer, now = replay.lease(version=state.current, now=0.0), 0.0
        while isinstance(answer, Wait) and now == 0.0 and replay.tickets:
            opened, now = len(replay.tickets), LATE
            answer = replay.lease(version=state.current, now=now)
            assert isinstance(answer, Lease) or len(replay.tickets) < opened, "a wait without an end"
        if isinstance(answer, Lease):
            self.check_batch(state, answer)

    def check_alive(self, state: State, replay: Replay) -> None:
        """A batch that waits, and no ticket is open: whoever is current may start a group."""
        grant = Replay.restore(self.rules, state.rows, now=0.0).ticket(
            actor="a", ask=-1, version=state.current, environment="e", now=0.0
        )
        assert isinstance(grant, Grant), grant

    def do_train(self, state: State, replay: Replay) -> None:
        lease = replay.leased
        assert lease is not None
        replay.trained(version=state.current)
        state.is_trained = True
        state.made = {**state.made, state.current: tuple(lease.names)}
        if self.scope.rolling:
            self.publish(state, replay, state.current)
            replay.commit(version=state.current, checkpoint="c")

    def do_publish(self, state: State, replay: Replay) -> None:
        self.publish(state, replay, state.current)

    def publish(self, state: State, replay: Replay, parent: int | None) -> None:
        version = replay.reserve(parent=parent, key=str(len(state.parents)))
        assert version == len(state.parents)
        replay.published(version)
        state.parents, state.is_trained = (*state.parents, parent), False

    def do_ask(self, state: State, replay: Replay, actor: str, version: int) -> None:
        ask = state.rows["state"][""]["next_ticket"]
        replay.ticket(actor=actor, ask=ask, version=version, environment="e", now=0.0)

    def do_void(self, state: State, replay: Replay, ticket: int, reason: str, scores: Scores | None) -> None:
        held = next(t for t in replay.tickets if t.number == ticket)
        if scores is not None and not held.used:
            state.spent |= {held.item}
        replay.void(actor=held.actor, ticket=ticket, reason=reason, scores=scores, now=0.0)

    def do_put(self, state: State, replay: Replay, ticket: int, span: tuple[int, int], final: bool) -> None:
        held = next(t for t in replay.tickets if t.number == ticket)
        versions = tuple(range(span[0], span[1] + 1)) if self.scope.rolling else tuple(sorted(set(span)))
        group = Sketch(f"{ticket}:{held.groups}", ticket, held.actor, versions)
        item = None if held.used else held.item
        answer = replay.put(group, b"content", actor=held.actor, final=final, now=0.0)
        assert answer.status in ("accepted", "stale")
        if answer.status == "accepted":
            state.accepted = {**state.accepted, group.group_id: (item, "")}
        else:
            assert not self.scope.orderly, answer
            assert span[0] != state.current, answer
        again = replay.put(group, b"content", actor=held.actor, final=final, now=0.0)
        assert again.status == ("duplicate" if answer.status == "accepted" else "stale")

    def do_expire(self, state: State, replay: Replay, actor: str) -> None:
        replay.leave(role="actor", name=actor, reason="expired")
        replay.join(role="actor", name=actor, incarnation="1", now=0.0)

    def do_save(self, state: State, replay: Replay) -> None:
        state.checkpoint = state.current

    def do_commit(self, state: State, replay: Replay) -> None:
        replay.commit(version=state.checkpoint, checkpoint="c")

    def do_restart(self, state: State, replay: Replay) -> None:
        state.life += 1
        replay.leave(role="learner", name="l", reason="expired")
        replay.join(role="learner", name="l", incarnation=str(state.life), now=0.0)
        kept = self.path(state, state.checkpoint)[1:]
        state.made = {v: names for v, names in state.made.items() if v in kept}
        self.publish(state, replay, state.checkpoint)

    # ------------------------------------------------------------------ what must hold

    def save(self, state: State, replay: Replay) -> None:
        writing = replay.drain()
        rows, mine = dict(state.rows), set()
        for (table, key), row in writing.rows.items():
            if table not in mine:
                mine.add(table)
                rows[table] = dict(rows.get(table, {}))
            if row is None:
                rows[table].pop(key, None)
            else:
                rows[table][key] = row
        state.rows = rows
        if writing.contents:
            state.contents = (state.contents | {n for n, c in writing.contents.items() if c is not None}) - {
                n for n, c in writing.contents.items() if c is None
            }
        for event in writing.events:
            if event.kind in ("dropped", "left"):
                name = event.fields["group"]
                assert not self.scope.orderly, f"{name} was thrown away"
                if name in state.accepted:
                    item, fate = state.accepted[name]
                    assert not fate, f"{name} came to two ends"
                    state.accepted = {**state.accepted, name: (item, event.kind)}
            elif event.kind == "skipped":
                assert event.fields["item"] not in state.spent
                state.spent |= {event.fields["item"]}

    def check(self, state: State, replay: Replay) -> None:
        counts = replay.statistics()
        assert counts["bound_violations"] == 0
        assert counts["groups_accepted"] == len(state.accepted)
        assert counts["groups_trained"] == sum(map(len, state.made.values()))
        assert set(replay.held) == state.contents == set(state.rows.get("group", {}))
        assert {t.number for t in replay.tickets} == set(state.rows.get("ticket", {}))
        uses: dict[str, int] = {}
        for names in state.made.values():
            for name in names:
                uses[name] = uses.get(name, 0) + 1
        assert max(uses.values(), default=0) <= self.scope.reuse, "a group was trained too often"
        leased = replay.leased.groups if replay.leased else ()
        at_hand = {entry.group_id for entry in [*replay.ready, *leased]}
        assert at_hand <= state.contents
        items = [t.item for t in replay.tickets if not t.used]
        for name, (item, end) in state.accepted.items():
            assert bool(end) + (name in uses or name in at_hand) == 1, f"{name} is lost, or twice"
            if item is not None and not end:
                items.append(item)
        stream = replay.items.streams.get("e")
        if stream is not None:
            items += [item for item, _ in stream.returned] + list(state.spent)
            assert sorted(items) == list(range(stream.next)), "an item is lost, or twice"
        if self.scope.orderly:
            self.check_pacing(state, replay)

    def check_pacing(self, state: State, replay: Replay) -> None:
        """(1), counted anew: a version's depth is its number here."""
        first, last, reuse = state.current, self.scope.steps - 1, self.scope.reuse
        end = last if reuse == 1 else ENDLESS  # in the last batches the second use of one may take the first of another
        due: list[int] = []
        for thing in [*replay.tickets, *replay.ready]:
            low, uses = (thing.version, 0) if isinstance(thing, Ticket) else (thing.versions[0], thing.uses)
            assert low + self.scope.bound >= first, "overdue"
            due += places(low + self.scope.bound, uses, reuse, first, end)
        if replay.leased is not None:
            for entry in replay.leased.groups:
                due.append(first)
                due += places(entry.versions[0] + self.scope.bound, entry.uses + 1, reuse, first + 1, end)
        for d in {d for d in due if d <= last}:
            assert sum(x <= d for x in due) <= (d - first + 1) * self.scope.size, f"too many are due by {d}: {due}"

    def check_batch(self, state: State, batch: Lease) -> None:
        assert len(set(batch.names)) == self.scope.size
        for entry in batch.groups:
            ages = {v: self.distance(state, v, batch.version) for v in entry.versions}
            old = {v for v, age in ages.items() if age > self.scope.bound}
            assert old == set(ages) & set(batch.masked), "the bound is broken"
            assert old != set(ages), "nothing of it is young enough"
            assert self.scope.late == "mask_tokens" or not old
            assert all(batch.distances[v] == age for v, age in ages.items() if v not in old)

    def check_restart(self, state: State, replay: Replay) -> None:
        """A queue that goes on from what was saved is the one that saved it."""
        again = Replay.restore(self.rules, state.rows, now=0.0)
        assert not again.drain().rows
        for queue in (again, replay):
            for thing in [*queue.tickets, *queue.ready, *(queue.leased.groups if queue.leased else ())]:
                thing.deadline = max(thing.deadline, queue.next_depth - 1)  # how long overdue does not matter
        assert again.statistics() == replay.statistics()
        assert (again.tickets, sorted(again.held)) == (replay.tickets, sorted(replay.held))
        assert sorted(again.ready, key=order) == sorted(replay.ready, key=order)
        assert again.leased == replay.leased
        assert [lease.to_row() for lease in again.uncommitted] == [lease.to_row() for lease in replay.uncommitted]
        assert again.items.streams == replay.items.streams
        assert (again.next_depth, sorted(again.deadlines())) == (replay.next_depth, sorted(replay.deadlines()))

    def path(self, state: State, version: int | None) -> list[int]:
        way = []
        while version is not None:
            way.append(version)
            version = state.parents[version]
        return way

    def distance(self, state: State, a: int, b: int) -> int:
        up, over = self.path(state, a), self.path(state, b)
        return next((i + over.index(v) for i, v in enumerate(up) if v in over), ENDLESS)


def order(entry: Entry) -> tuple[int, int]:
    return entry.order


def places(deadline: int, used: int, reuse: int, first: int, last: int) -> list[int]:
    """Which batches, from `first` on, are to use a group that was used `used` times. Of what lies beyond the run's
    `last` batch only a first use is needed."""
    due = [d for d in range(deadline - reuse + used + 1, deadline + 1) if d >= first]
    return [d for d in due if d <= last] or ([] if used else [last])


def explore(scopes: list[Scope], limit: int = 1 << 30) -> int:
    """Visit the states of all scopes and say how many there are."""
    total, began = 0, time.process_time()
    for scope in scopes:
        exploration = Exploration(scope)
        states = exploration.run(limit)
        total += states
        print(f"{states:7} states, {exploration.steps:8} steps{', cut off' * (states >= limit)}: {scope}")
    print(f"{total} states in {time.process_time() - began:.1f} s")
    return total
