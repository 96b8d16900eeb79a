"""Whole runs through a real queue, from ticket to trained: its rate, its scaling, its memory and its waste."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import trio
import zmq

from lachesis_bench.figures import Figure
from lachesis_bench.queue_load import Groups, Shape, fleet, run_folder, running_echo, running_queue
from lachesis_bench.queue_puts import spread
from lachesis_transport.client import queue_status
from lachesis_transport.messages import pack
from lachesis_transport.producer import Ticket
from lachesis_transport.queue_files import DATABASE, STATISTICS

BATCH, STALENESS = 16, 2
SCALING_BATCH = 32
"""Pacing lets 64 actors in at once."""
MIDDLE = Shape(trajectories=8, tokens=512)
SMALL = Shape(trajectories=2, tokens=32)

LATE_ROLLOUTS = 10.0
"""staleness.late_seconds in mean rollouts: what the default's two minutes are to rollouts of twelve seconds."""


class Lost(AssertionError):
    """Groups that were acknowledged are gone."""


# ---------------------------------------------------------------------- groups


def groups(*, batches: int, runs: int) -> Figure:
    """queue.groups: groups a second from ticket to trained and committed, 16 under way at once."""
    # Alternating, so that what else the machine does falls on both.
    pairs = [(trio.run(_rate, 1, 16, batches), _echo_rate(batches)) for _ in range(runs)]
    ratios = [ours / raw for ours, raw in pairs]
    return Figure(
        figure="queue.groups",
        value=statistics.median(ours for ours, _ in pairs),
        unit="groups/s",
        against="raw ZeroMQ round trips, the same bytes in and out, nothing on disk, same run",
        reference=statistics.median(raw for _, raw in pairs),
        ratio=statistics.median(ratios),
        runs=runs,
        spread=spread(ratios),
    )


async def _rate(actors: int, tasks: int, batches: int, batch: int = BATCH) -> float:
    """Groups a second. Raises Lost unless everything that was acknowledged is trained or held."""
    with run_folder() as folder, running_queue(folder, batch=batch, staleness=STALENESS) as queue:
        async with fleet(queue.address, actors=actors, tasks=tasks, shape=MIDDLE) as run:
            await run.learn(2)
            start = time.perf_counter()
            await run.learn(batches)
            seconds = time.perf_counter() - start
        queue.end()
        counts = json.loads((folder / STATISTICS).read_text())
        # What was under way when the run ended is refused.
        voided = sum(counts["tickets_voided"].values()) - run.refused
        if run.accepted != counts["groups_trained"] + counts["groups_left"] or voided or counts["groups_dropped"]:
            raise Lost(f"{run.accepted} groups acknowledged, {run.refused} refused: {counts}")
        return batches * batch / seconds


def _echo_rate(batches: int) -> float:
    """A group is a small round trip (its ticket), one with its bytes (put), and its bytes back once a batch (lease)."""
    small = pack({"op": "ticket"})
    ticket = Ticket(ticket=0, deadline=0, version=0, item=0)
    group = pack({"group": Groups(MIDDLE, "actor-0").of(ticket).pack()})
    with running_echo() as echo, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(echo.address)
        start = time.perf_counter()
        for _ in range(batches):
            for asked in ([small, b"0"], [group, b"0"]):
                for _ in range(BATCH):
                    socket.send_multipart(asked, copy=False)
                for _ in range(BATCH):
                    socket.recv_multipart(copy=False)
            socket.send_multipart([small, str(BATCH * len(group)).encode()])
            socket.recv_multipart(copy=False)
        return batches * BATCH / (time.perf_counter() - start)


# ---------------------------------------------------------------------- scaling


def scaling(counts: tuple[int, ...], *, batches: int, runs: int) -> list[Figure]:
    """queue.groups_ACTORS: groups a second with so many actors, one group each under way, relative to one actor."""
    rates: dict[int, list[float]] = {actors: [] for actors in counts}
    for _ in range(runs):
        for actors in counts:
            rates[actors].append(
                trio.run(_rate, actors, 1, max(1, batches if actors > 1 else batches // 4), SCALING_BATCH)
            )
    one = rates[counts[0]]
    figures = []
    for actors, found in rates.items():
        ratios = [many / single for many, single in zip(found, one, strict=True)]
        figures.append(
            Figure(
                figure=f"queue.groups_{actors}",
                value=statistics.median(found),
                unit="groups/s",
                against="one actor, same run; nothing was lost",
                reference=statistics.median(one),
                ratio=statistics.median(ratios),
                runs=runs,
                spread=spread(ratios),
            )
        )
    return figures


# ---------------------------------------------------------------------- memory


def memory(count: int) -> list[Figure]:
    """queue.memory and queue.file: what the queue's process grows by from a tenth of so many small groups to all of
    them, each put, leased, trained and committed, and how large its database is then."""
    grown, size, seconds = trio.run(_memory, count)
    return [
        Figure(figure="queue.memory", value=grown, unit="MB", against=f"growth over {count} groups in {seconds:.0f} s"),
        Figure(figure="queue.file", value=size, unit="MB", against=f"database after {count} groups"),
    ]


async def _memory(count: int) -> tuple[float, float, float]:
    batch = 50
    with run_folder() as folder, running_queue(folder, batch=batch, staleness=STALENESS) as queue:
        start = time.perf_counter()
        async with fleet(queue.address, actors=1, tasks=64, shape=SMALL) as run:
            await run.learn(count // batch // 10)
            before = queue.resident_mb()
            await run.learn(count // batch * 9 // 10)
            after = queue.resident_mb()
        return after - before, _size_mb(folder / DATABASE), time.perf_counter() - start


def _size_mb(database: Path) -> float:
    return sum(file.stat().st_size for file in database.parent.glob(f"{database.name}*")) / 1e6


# ---------------------------------------------------------------------- waste


def waste(*, seconds: float) -> list[Figure]:
    """queue.waste_slow_learner, queue.waste_fast_learner, and the longest stalls beside them."""
    slow = trio.run(_waste, "slow_learner", 0.02, 10.0, seconds)
    fast = trio.run(_waste, "fast_learner", 0.2, 0.1, seconds)
    return [*slow, *fast]


async def _waste(name: str, rollout: float, slowness: float, seconds: float) -> list[Figure]:
    """A learner that needs `slowness` times as long for a batch as the actors, for about so many seconds."""
    tasks, batch = 16, 8
    made = batch * rollout / tasks  # seconds in which the actors make a batch
    step = made * slowness
    batches = max(10, round(seconds / max(step, made)))

    async def train() -> None:
        await trio.sleep(step)

    with (
        run_folder() as folder,
        running_queue(folder, batch=batch, staleness=STALENESS, late_seconds=LATE_ROLLOUTS * rollout) as queue,
    ):
        async with fleet(queue.address, actors=4, tasks=tasks // 4, shape=SMALL, rollout=rollout) as run:
            await run.learn(batches, train)
            counts = await queue_status(queue.address)
        lost = sum(counts["groups_dropped"].values()) + sum(counts["tickets_voided"].values())
        share = lost / (lost + counts["groups_accepted"])
        if slowness > 1:
            # Each batch that is trained makes room for as many tickets as it had groups; whose turn it is, is another
            # matter: an actor whose rollouts take longer than a batch has tickets open, so others go first.
            excuse, wait = run.longest_batch, run.longest_ticket
            who = f"actors wait and none gets a ticket; a task waits for up to {run.most_batches} batches"
            about = f"{excuse:.2f} s from version to version"
        else:
            excuse, wait = run.longest_rollout, run.longest_lease
            who, about = "the learner without a batch", f"{excuse:.2f} s the longest rollout"
    return [
        Figure(
            figure=f"queue.waste_{name}", value=share, unit="of groups", against=f"dropped or voided, {batches} batches"
        ),
        Figure(
            figure=f"queue.stall_{name}",
            value=max(0.0, wait - excuse),
            unit="s",
            against=f"{who}, beyond what the slower side explains ({about})",
        ),
    ]
