"""Waste and stalls of the queue, in virtual time: a simulation of actors, learner and queue, event by event.

Rollouts take log-normal times (sigma 1: one in a thousand takes 20 times the median). Time is counted in mean rollouts.
Actors have workers that ask for a ticket, roll out, put and ask again. A version reaches an actor some time after its
publication; the tokens of a group are of every version that its actor served meanwhile. Requests for tickets are tried
as the broker tries them: after every change, the environment and the actor whose turn it is first.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lachesis_transport.decisions import Grant, Rules
from lachesis_transport.records import Lease
from lachesis_transport.replay import Replay

sys.path.insert(0, str(Path(__file__).parent))
import exploration

SIGMA = 1.0
TRANSFER = 0.1
"""Time from a publication until an actor serves it, at most."""
TICK = 0.5
LATE = 30.0
B = 8


@dataclass(slots=True)
class Worker:
    """One environment's worker at an actor."""

    actor: str
    environment: str
    since: float = 0.0
    """When it asked for the ticket that it waits for."""


@dataclass
class Simulation:
    """One run. `learner_seconds`: time of a batch."""

    rules: Rules
    workers: list[Worker]
    learner_seconds: float
    transfer: dict[str, float] = field(default_factory=dict)
    """By actor: how long a version takes to it, where that is not left to chance."""
    seed: int = 0
    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    """Of the learner for each batch."""
    ticket_waits: list[tuple[str, float]] = field(default_factory=list)
    grants: Counter[tuple[str, str]] = field(default_factory=Counter)
    busy: float = 0.0
    """Time of all rollouts together."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.replay = Replay(self.rules)
        self.actors = sorted({worker.actor for worker in self.workers})
        self.served: dict[str, list[int]] = {actor: [] for actor in self.actors}
        self.asking = list(self.workers)
        self.rollouts: dict[int, tuple[int, float]] = {}
        """By ticket: its version, and when its rollout ends."""
        self.leasing: float | None = None
        self.explained = 0.0
        """Until when the learner may have to wait for rollouts."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = self.asks = 0
        for name in self.actors:
            self.replay.join(role="actor", name=name, incarnation="1", now=0.0)
        self.replay.join(role="learner", name="l", incarnation="1", now=0.0)
        self.publish(None)
        self.tick()

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, what))

    def run(self, batches: int) -> Simulation:
        """Until so many batches were leased, from the start."""
        while len(self.waits) < batches:
            self.now, _, what = heapq.heappop(self.events)
            what()
            self.go_on()
            self.replay.drain()
        return self

    def tick(self) -> None:
        self.at(TICK, self.tick)

    def publish(self, parent: int | None) -> None:
        version = self.version = self.replay.reserve(parent=parent, key=str(parent))
        self.replay.published(version)
        for actor in self.actors:
            delay = self.transfer.get(actor, self.random.uniform(0.5, 1.0) * TRANSFER)
            self.at(delay, lambda actor=actor: self.served[actor].append(version))
        self.leasing = self.now
        self.explained = max((end for _, end in self.rollouts.values()), default=self.now)

    def go_on(self) -> None:
        if self.leasing is not None:
            answer = self.replay.lease(version=self.version, now=self.now)
            if isinstance(answer, Lease):
                assert max(answer.distances.values()) <= self.rules.staleness_max
                assert self.now <= self.explained or self.rules.order != "deadline", "nobody is to blame for this wait"
                self.waits.append(self.now - self.leasing)
                self.leasing = None
                self.at(self.learner_seconds, self.trained)
        refused = set()
        self.kept: list[int] = []
        while self.asking:
            worker = min(
                (w for w in self.asking if w.actor not in refused and self.served[w.actor]),
                key=lambda w: (*self.replay.turn(w.actor, w.environment), w.since),
                default=None,
            )
            if worker is None:
                return
            if not self.grant(worker):
                refused.add(worker.actor)

    def grant(self, worker: Worker) -> bool:
        version = self.served[worker.actor][-1]
        self.asks += 1
        progress = self.replay.statistics()["live_tickets"]
        answer = self.replay.ticket(
            actor=worker.actor,
            ask=self.asks,
            version=version,
            environment=worker.environment,
            now=self.now,
            kept=self.kept,
            waiting=sum(w.actor == worker.actor for w in self.asking),
        )
        if not isinstance(answer, Grant):
            # An actor waits only for a learner that has as much to do as the bound allows an actor at its version.
            places = (self.rules.staleness_max + 1 - (self.replay.next_depth - version)) * B
            assert progress + len(self.kept) >= places or self.rules.order != "deadline"
            return False
        self.asking.remove(worker)
        self.ticket_waits.append((worker.actor, self.now - worker.since))
        self.grants[worker.actor, worker.environment] += 1
        seconds = self.random.lognormvariate(-(SIGMA**2) / 2, SIGMA)  # of mean 1
        self.busy += seconds
        self.rollouts[answer.ticket] = version, self.now + seconds
        if version < self.version or progress < B:
            self.explained = max(self.explained, self.now + seconds)
        self.at(seconds, lambda: self.put(worker, answer.ticket))
        return True

    def put(self, worker: Worker, ticket: int) -> None:
        start, _ = self.rollouts.pop(ticket)
        versions = tuple(v for v in self.served[worker.actor] if v >= start)
        group = exploration.Sketch(f"{ticket}:0", ticket, worker.actor, versions, worker.environment)
        self.replay.put(group, b"", actor=worker.actor, final=True, now=self.now)
        worker.since = self.now
        self.asking.append(worker)

    def trained(self) -> None:
        self.replay.trained(version=self.version)
        self.replay.commit(version=self.version, checkpoint="c")
        self.publish(self.version)

    @property
    def waste(self) -> float:
        """Share of the tickets whose group was lost to its age."""
        counts = self.replay.statistics()
        lost = sum(counts["groups_dropped"].values()) + counts["tickets_voided"].get("late", 0)
        return lost / counts["tickets_issued"]


def rules(bound: int, **others) -> Rules:
    return Rules(**{"batch_groups": B, "staleness_max": bound, "steps": 1 << 20, "late_seconds": LATE, **others})


def fleet(number: int, actors: str = "abc", environment: str = "e") -> list[Worker]:
    return [Worker(actors[i % len(actors)], environment) for i in range(number)]


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_nothing_is_wasted_and_each_side_waits_only_for_the_other(bound, speed):
    """`speed`: time of a batch, over the time in which all workers together roll out B groups without a pause. The
    exact reasons of each wait are asserted in the simulation."""
    workers = (bound + 1) * B
    run = Simulation(rules(bound), fleet(workers), speed * B / workers).run(100)
    counts = run.replay.statistics()
    assert counts["bound_violations"] == 0
    assert counts["staleness_max"] <= bound
    assert run.waste < 0.01
    assert counts["groups_trained"] == 99 * B
    if speed == 10.0:  # the slow side never rests: but for the first batch, and the longest stragglers
        assert 99 * run.learner_seconds / run.now > 0.85


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_workers_that_are_few_for_the_bound_are_never_held_up(late):
    """While the slowest rollout of a batch runs, the others bring up to S * B groups: four workers need eight mean
    rollouts for that, and few are longer."""
    run = Simulation(rules(4, late=late), fleet(4, "ab"), 0.1).run(100)
    assert run.busy / (4 * run.now) > 0.85
    assert run.waste < 0.01


@pytest.mark.parametrize("order", ["freshest", "uniform"])
@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_other_orders_keep_the_bound(order, speed):
    run = Simulation(rules(2, order=order), fleet(24), speed / 3).run(100)
    counts = run.replay.statistics()
    assert counts["bound_violations"] == 0
    assert counts["staleness_max"] <= 2
    assert run.waste > 0.01 or speed < 10.0  # what they cost, and the order by deadline does not


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_environments_get_tickets_by_their_weights(speed):
    workers = fleet(24, environment="often") + fleet(24, environment="rarely")
    run = Simulation(rules(2, weights={"often": 3.0, "rarely": 1.0}), workers, speed / 3).run(100)
    often = sum(n for (_, environment), n in run.grants.items() if environment == "often")
    assert often / run.grants.total() == pytest.approx(0.75, abs=0.02)


def test_an_environment_without_work_leaves_its_share_to_the_others_and_saves_up_little():
    often, rarely = fleet(24, environment="often"), fleet(24, environment="rarely")
    run = Simulation(rules(2, weights={"often": 3.0, "rarely": 1.0}), [*rarely, *often], 1.0)
    run.asking = list(rarely)
    run.run(50)
    assert {environment for _, environment in run.grants} == {"rarely"}
    assert run.grants.total() >= 50 * B
    before = run.grants.total()
    run.asking += often
    run.run(100)
    later = sum(n for (_, environment), n in run.grants.items() if environment == "often")
    share = later / (run.grants.total() - before)
    # Its credit is one filling of the queue, (S + 1) * B tickets.
    assert 0.75 - 0.02 < share < 0.75 + 24 / (run.grants.total() - before) + 0.02


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("transfer", [TRANSFER / 2, TRANSFER, 2 * TRANSFER])
def test_an_actor_that_floods_the_queue_starves_none(speed, transfer):
    """With each batch places come free; the actor with the fewest open tickets gets its share of them, also when it
    activates later than the one that floods. It waits for two batches at most."""
    run = Simulation(rules(2), fleet(100, "a") + fleet(4, "b"), speed, transfer={"a": TRANSFER, "b": transfer}).run(100)
    waits = [seconds for actor, seconds in run.ticket_waits if actor == "b"]
    assert max(waits) <= 2 * (max(run.waits) + run.learner_seconds + 2 * TRANSFER + TICK)
    assert len(waits) > 150


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("workers", [12, 24])
def test_of_two_equal_actors_the_later_one_gets_its_share(workers, speed):
    transfer = {"a": TRANSFER / 2, "b": TRANSFER}
    run = Simulation(rules(2), fleet(2 * workers, "ab"), speed, transfer=transfer).run(100)
    given = Counter(actor for actor, _ in run.ticket_waits)
    assert 0.4 < given["b"] / given.total() < 0.6
