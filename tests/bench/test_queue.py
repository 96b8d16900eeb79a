from __future__ import annotations

from contextlib import closing

import pytest

from lachesis_bench import queue_puts, queue_runs
from lachesis_bench.queue_load import Groups, Shape
from lachesis_transport.producer import Ticket

SMALL = Shape(trajectories=2, tokens=32)


def test_durable_puts_are_measured_beside_commits_of_the_same_size():
    figure = queue_puts.durable_put("queue.small", SMALL, groups=50, rounds=2)
    assert (figure.figure, figure.unit, figure.runs) == ("queue.small", "groups/s", 2)
    assert figure.reference is not None
    assert figure.value > 0 < figure.reference
    size = float(figure.against.split("commits of ")[1].split()[0])
    assert 1 <= size <= 50


@pytest.mark.parametrize(("size", "commits"), [(1.0, 7), (2.5, 3), (7.0, 1), (3.5, 2)])
def test_sqlite_commits_so_many_groups_at_once_and_deletes_them(tmp_path, size, commits):
    groups = [
        Groups(SMALL, "actor-0").of(Ticket(ticket=number, deadline=0, version=0, item=number)) for number in range(7)
    ]
    with closing(queue_puts._database(tmp_path / "raw.db")) as db:
        times, seconds = queue_puts._commit_rows(db, groups, size)
        assert len(times) == commits
        assert seconds == pytest.approx(sum(times))
        assert db.execute("SELECT count(*) FROM contents").fetchone() == (0,)


def test_a_run_loses_nothing_and_its_memory_is_measured():
    grown, file = queue_runs.memory(1000)
    assert (grown.figure, file.figure) == ("queue.memory", "queue.file")
    assert file.value > 0
