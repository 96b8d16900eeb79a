"""What a durable put costs: a real queue's acknowledgements against SQLite's own commits of the same bytes.

Both write in rounds, in turn, into databases with the same pages and pragmas. What a round added is deleted before the
next, as a learner's checkpoint deletes it from the queue, outside the measured time. SQLite commits as many groups at
once as the queue did in the round just before: groups that wait for the disk together share one commit.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

from lachesis_bench.figures import Figure
from lachesis_bench.queue_load import Groups, Shape, run_folder, running_queue
from lachesis_transport.consumer import Consumer, open_consumer
from lachesis_transport.database import configure
from lachesis_transport.messages import Group
from lachesis_transport.producer import Producer, Ticket, open_producer
from lachesis_transport.queue_files import EVENTS

IN_FLIGHT = 64
BATCH = 50
"""Groups that are leased and deleted at once, outside the measured time."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the queue and the one of SQLite after it. Times are in seconds."""

    ours: float
    raw: float
    put_times: list[float]
    """Of each put's round trip."""
    commit_times: list[float]
    """Of each commit of SQLite."""
    commit_size: float
    """Mean groups that the queue saved at once."""


def durable_put(figure: str, shape: Shape, *, groups: int, rounds: int) -> Figure:
    """Groups a second from the first put to the last acknowledgement, IN_FLIGHT at a time, their tickets taken before.

    groups: a round, a multiple of BATCH.
    """
    measured = trio.run(_rounds, shape, groups, rounds, IN_FLIGHT)
    ratios = [one.raw / one.ours for one in measured]
    size = statistics.median(one.commit_size for one in measured)
    return Figure(
        figure=figure,
        value=statistics.median(groups / one.ours for one in measured),
        unit="groups/s",
        against=f"SQLite's own commits of {size:.1f} groups, same bytes and pragmas, same run",
        reference=statistics.median(groups / one.raw for one in measured),
        ratio=statistics.median(ratios),
        runs=rounds,
        spread=spread(ratios),
    )


def put_latency(shape: Shape, *, groups: int, rounds: int) -> list[Figure]:
    """queue.put_p50, queue.put_p95, queue.put_p99: a put's round trip, one at a time."""
    measured = trio.run(_rounds, shape, groups, rounds, 1)
    figures = []
    for percent in (50, 95, 99):
        pairs = [
            (1e3 * np.percentile(r.put_times, percent), 1e3 * np.percentile(r.commit_times, percent)) for r in measured
        ]
        ratios = [float(raw / ours) for ours, raw in pairs]
        figures.append(
            Figure(
                figure=f"queue.put_p{percent}",
                value=statistics.median(float(ours) for ours, _ in pairs),
                unit="ms",
                against="one commit of SQLite, same bytes and pragmas, same run",
                reference=statistics.median(float(raw) for _, raw in pairs),
                ratio=statistics.median(ratios),
                runs=rounds,
                spread=spread(ratios),
            )
        )
    return figures


def spread(values: Sequence[float]) -> float | None:
    """Half the distance between the quartiles, relative to the median; None for fewer than 2."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


async def _rounds(shape: Shape, groups: int, rounds: int, in_flight: int) -> list[Round]:
    with run_folder() as folder:
        async with _queue(folder, groups) as queue:
            with closing(_database(folder / "raw.db")) as raw:
                measured = []
                for number in range(rounds + 1):
                    batch = await queue.groups(shape, groups)
                    put_times, ours = await queue.put(batch, in_flight)
                    size = queue.commit_size()
                    await queue.train(groups)
                    commit_times, seconds = _commit_rows(raw, batch, size)
                    if number:  # the first one makes both databases as large as they get
                        measured.append(Round(ours, seconds, put_times, commit_times, size))
                return measured


class _Queue:
    def __init__(self, folder: Path, consumer: Consumer, producer: Producer) -> None:
        self._consumer, self._producer = consumer, producer
        self._events = (folder / EVENTS).open()
        self._version: int | None = None

    async def publish(self) -> None:
        self._version = await self._consumer.reserve(self._version)
        await self._consumer.published(self._version)
        self._producer.serving(self._version)

    async def groups(self, shape: Shape, count: int) -> list[Group]:
        """So many groups, each with its ticket."""
        made, groups = [], Groups(shape, "actor-0")

        async def take() -> None:
            ticket = await self._producer.ticket(version=0, environment="bench")
            assert isinstance(ticket, Ticket)
            made.append(groups.of(ticket))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(take)
        self._events.read()
        return made

    async def put(self, groups: list[Group], in_flight: int) -> tuple[list[float], float]:
        """Seconds of each put, and of all."""
        waiting, times = iter(groups), []

        async def put() -> None:
            for group in waiting:
                start = time.perf_counter()
                answer = await self._producer.put(group)
                times.append(time.perf_counter() - start)
                assert answer.status == "accepted", answer

        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(put)
        return times, time.perf_counter() - start

    def commit_size(self) -> float:
        """Groups accepted since `groups`, a commit: all events of one commit have the same time."""
        accepted = [event["time"] for event in map(json.loads, self._events) if event["kind"] == "accepted"]
        return len(accepted) / len(set(accepted))

    async def train(self, groups: int) -> None:
        """Train what was put, and let go of it."""
        assert self._version is not None
        for _ in range(groups // BATCH):
            await self._consumer.lease(self._version)
            await self._consumer.trained(self._version)
            await self.publish()
        await self._consumer.commit(self._version, "none")


@asynccontextmanager
async def _queue(folder: Path, groups: int) -> AsyncIterator[_Queue]:
    # At one version pacing allows batch * (staleness + 1) tickets.
    with running_queue(folder, batch=BATCH, staleness=groups // BATCH - 1) as child:
        async with (
            open_consumer(child.address, "learner", "bench") as consumer,
            open_producer(child.address, "actor-0", "bench") as producer,
        ):
            queue = _Queue(folder, consumer, producer)
            await queue.publish()
            yield queue


def _database(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    configure(db)
    db.execute("CREATE TABLE contents (id TEXT PRIMARY KEY, content BLOB)")
    return db


def _commit_rows(db: sqlite3.Connection, groups: list[Group], size: float) -> tuple[list[float], float]:
    """Commit the packed groups, `size` at once on average, and delete them. Seconds of each commit, and of all."""
    rows = [(group.group_id, group.pack()) for group in groups]
    times, done, commits = [], 0, 0
    while done < len(rows):
        commits += 1
        until = min(max(done + 1, round(commits * size)), len(rows))
        start = time.perf_counter()
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO contents VALUES (?, ?)", rows[done:until])
        db.execute("COMMIT")
        times.append(time.perf_counter() - start)
        done = until
    db.execute("DELETE FROM contents")
    return times, sum(times)
