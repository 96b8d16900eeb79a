"""An actor without an engine: it speaks with the queue as the real one does, about groups of random numbers.

python -m lachesis_bench.chaos_actor ADDRESS FOLDER NAME SEED
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from uuid import uuid4

import numpy as np
import trio

from lachesis_bench.chaos_history import NO_VARIANCE, Journal
from lachesis_bench.chaos_learner import read_newest
from lachesis_transport.messages import Group, Scores, Trajectory, content_id
from lachesis_transport.producer import Finished, Producer, Ticket, open_producer

ENVIRONMENT = "arithmetic"
WORKERS = 8
"""Groups that an actor works on at once."""
GENERATION_SECONDS, GENERATION_SIGMA = 0.008, 1.0
"""Median of what a group takes, and the spread of its logarithm."""
GROUP_BYTES = (1_000, 200_000)
ARRIVAL_SECONDS = 0.002
"""What new weights take to arrive, on average."""
BYTES_A_TOKEN = 17
VOID_SHARE = PUT_TWICE_SHARE = BREAK_OFF_SHARE = 0.08


class Actor:
    """One incarnation of it."""

    def __init__(self, producer: Producer, folder: Path, name: str, seed: int) -> None:
        self._producer, self._folder, self._name = producer, folder, name
        # Another incarnation makes other groups.
        incarnation = uuid4().int
        self._random = random.Random(f"{seed} {incarnation}")
        self._numbers = np.random.default_rng([seed, incarnation])
        self._journal = Journal(folder / f"{name}.jsonl")
        self._version = 0

    async def run(self) -> None:
        """Until the run has finished."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._receive_weights)
            async with trio.open_nursery() as workers:
                for _ in range(WORKERS):
                    workers.start_soon(self._work)
            nursery.cancel_scope.cancel()

    async def _receive_weights(self, task_status: trio.TaskStatus[None]) -> None:
        started = False
        while True:
            newest = read_newest(self._folder)
            if newest is not None and (newest > self._version or not started):
                await trio.sleep(self._random.expovariate(1 / ARRIVAL_SECONDS))
                self._version = newest
                self._producer.serving(newest)
                if not started:
                    started = True
                    task_status.started()
            await trio.sleep(ARRIVAL_SECONDS / 2)

    async def _work(self) -> None:
        while True:
            ticket = await self._producer.ticket(version=self._version, environment=ENVIRONMENT)
            if isinstance(ticket, Finished):
                return
            self._journal.note(ticket=ticket.ticket, item=ticket.item)
            await trio.sleep(GENERATION_SECONDS * math.exp(self._random.gauss(0, GENERATION_SIGMA)))
            if self._random.random() < VOID_SHARE:
                await self._producer.void(ticket.ticket, NO_VARIANCE, Scores.of([1.0, 1.0]))
                continue
            await self._put(self._group(ticket))

    async def _put(self, group: Group) -> None:
        self._journal.note(sent=group.group_id, content=content_id(group.trajectories))
        if self._random.random() < BREAK_OFF_SHARE:
            # Whether the queue has it is open then: it is put again.
            with trio.move_on_after(self._random.uniform(0, 0.01)):
                await self._put_once(group)
        await self._put_once(group)
        if self._random.random() < PUT_TWICE_SHARE:
            await self._put_once(group)

    async def _put_once(self, group: Group) -> None:
        reply = await self._producer.put(group)
        self._journal.note(answer=reply.status, group=group.group_id, reason=reply.reason)

    def _group(self, ticket: Ticket) -> Group:
        low, high = GROUP_BYTES
        size = self._random.choice((2, 4, 8))
        tokens = int(low * (high / low) ** self._random.random()) // (BYTES_A_TOKEN * size)
        return Group(
            group_id=f"{ticket.ticket}:0",
            ticket=ticket.ticket,
            actor=self._name,
            environment=ENVIRONMENT,
            trajectories=tuple(self._trajectory(max(4, tokens), ticket.version) for _ in range(size)),
        )

    def _trajectory(self, tokens: int, begun: int) -> Trajectory:
        """Sampled from the version that it began with up to, in a part of them, the one that is served now."""
        mask = (np.arange(tokens) >= max(1, tokens // 4)).astype(np.uint8)
        last = self._random.choice((begun, self._version))
        versions = np.sort(self._numbers.choice(np.unique([begun, last]), tokens))
        return Trajectory(
            tokens=self._numbers.integers(0, 1 << 31, tokens, dtype=np.int32),
            mask=mask,
            logprobs=-0.5 * mask.astype(np.float32),
            versions=np.where(mask, versions, -1).astype(np.int32),
            advantages=mask.astype(np.float32),
            score=float(self._random.randint(0, 1)),
        )


async def _act(address: str, folder: Path, name: str, seed: int) -> None:
    async with open_producer(address, name, uuid4().hex) as producer:
        await Actor(producer, folder, name, seed).run()


if __name__ == "__main__":
    trio.run(_act, sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
