from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from lachesis_transport.decisions import Grant, Rules
from lachesis_transport.records import Lease
from lachesis_transport.replay import Replay

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)


class Run:
    """A queue whose actor puts a group for every ticket that it can get."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.replay, self.asks = rules, Replay(rules), 0
        self.replay.join(role="actor", name="a", incarnation="1", now=0.0)
        self.learners = 0
        self.learner_comes(None)

    def learner_comes(self, parent: int | None) -> None:
        """The learner before is gone, this one starts from its checkpoint `parent`."""
        self.replay.leave(role="learner", name="l")
        self.learners += 1
        self.replay.join(role="learner", name="l", incarnation=str(self.learners), now=0.0)
        self.publish(parent)

    def publish(self, parent: int | None) -> None:
        self.version = self.replay.reserve(parent=parent, key=str(len(self.replay.lineage)))
        self.replay.published(self.version)

    def act(self, random: random.Random, most: int) -> None:
        for _ in range(most):
            version = max(0, self.version - random.choice((0, 0, 0, 1, 2)))
            self.asks += 1
            ticket = self.replay.ticket(actor="a", ask=self.asks, version=version, environment="sums", now=0.0)
            if isinstance(ticket, Grant):
                sampled = sorted({version, random.randint(version, self.version)})
                group = groups.group(ticket.ticket, sampled)
                self.replay.put(group, group.pack(), actor="a", final=True, now=0.0)

    def train(self) -> bool:
        if not isinstance(self.replay.lease(version=self.version, now=0.0), Lease):
            return False
        self.replay.trained(version=self.version)
        self.publish(self.version)
        return True

    def due(self) -> list[int]:
        """Depths of the last batches that may still take what is ready, in order, found from the definition alone."""
        tree, last = self.replay.lineage, []
        for entry in self.replay.ready:
            oldest = max(tree.distance(v, self.version, limit=1000) for v in entry.versions)
            last.append(tree.depth(self.version) + self.rules.staleness_max - oldest)
        return sorted(last)

    @property
    def dropped(self) -> int:
        return self.replay.statistics()["groups_dropped"].get("stale", 0)


def fewest_lost(due: list[int], first: int, size: int) -> int:
    """What batches of `size` from depth `first` on cannot train in time, whatever their order: each takes those that
    are due first."""
    lost, filled = 0, 0
    for last in due:
        if first + filled // size > last:
            lost += 1
        else:
            filled += 1
    return lost


@pytest.mark.parametrize("seed", range(200))
def test_a_learner_that_comes_back_loses_no_more_than_any_order_of_batches_must(seed):
    rng = random.Random(seed)
    size, bound = rng.randint(1, 4), rng.randint(1, 4)
    run = Run(Rules(batch_groups=size, staleness_max=bound, steps=1000))
    for _ in range(rng.randint(1, 8)):
        run.act(rng, rng.randint(0, 3 * size * bound))
        run.train()
    checkpoint = run.version
    run.replay.commit(version=checkpoint, checkpoint="c")
    for _ in range(rng.randint(0, bound + 1)):
        run.act(rng, rng.randint(size, 3 * size * bound))
        run.train()
    run.act(rng, rng.randint(0, 3 * size * bound))
    before, held = run.dropped, {entry.group_id for entry in run.replay.ready}
    assert not before
    run.learner_comes(checkpoint)
    expected = fewest_lost(run.due(), run.replay.next_depth, size)
    assert held <= {entry.group_id for entry in run.replay.ready}
    for _ in range(bound + 1):
        while not run.train():
            run.act(rng, 1)
    assert run.dropped == expected
