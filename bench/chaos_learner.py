"""A learner without an engine: it speaks with the queue as the real one does, and its weights are the list of groups
that were trained.

python -m lachesis_bench.chaos_learner ADDRESS FOLDER SEED
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from uuid import uuid4

import trio

from lachesis_bench.chaos_history import (
    LEARNER_JOURNAL,
    Checkpoint,
    Journal,
    Trained,
    newest_checkpoint,
    save_checkpoint,
)
from lachesis_transport.consumer import Consumer, open_consumer
from lachesis_transport.messages import content_id

NEWEST = "newest"
"""File with the newest version whose weights have left the learner."""
CHECKPOINT_EVERY = 4
"""Versions between two checkpoints."""
TRAIN_SECONDS = 0.005
"""What a batch takes, on average."""


class Learner:
    """One incarnation of it."""

    def __init__(self, consumer: Consumer, folder: Path, seed: int) -> None:
        self._consumer, self._folder = consumer, folder
        self._random = random.Random(f"{seed} {uuid4()}")
        self._journal = Journal(folder / LEARNER_JOURNAL)
        self._trained: list[Trained] = []
        self._version = self._step = 0
        self._parent: int | None = None

    async def run(self) -> None:
        """From the newest checkpoint to the end of the run."""
        if self._consumer.state.finished:
            return
        checkpoint = newest_checkpoint(self._folder)
        parent: int | None = None
        if checkpoint is not None:
            if checkpoint.queue != self._consumer.queue_id:
                raise RuntimeError(f"queue: {self._consumer.queue_id}, expected {checkpoint.queue} of the checkpoint")
            parent, self._step, self._trained = checkpoint.version, checkpoint.step, checkpoint.trained
        elif self._consumer.state.current is not None:
            parent = 0  # nothing is trained yet: these weights are those of version 0
        await self._publish(parent)
        # Asked anew each time: a queue may come back with fewer steps.
        while self._step < self._consumer.welcome.steps:
            await self._batch()
        await self._commit()
        await self._consumer.finish(self._version)

    async def _batch(self) -> None:
        version = self._version
        batch = await self._consumer.lease(version)
        trained = [Trained(g.group_id, content_id(g.trajectories), version, g.versions) for g in batch.groups]
        self._journal.note(batch=version, groups=[[t.group, t.content, t.versions] for t in trained])
        await self._linger(TRAIN_SECONDS)
        self._trained += trained
        self._step += 1
        checkpoint_wanted = await self._consumer.trained(version)
        await self._linger()
        await self._publish(version)
        if self._step % CHECKPOINT_EVERY == 0 or checkpoint_wanted:
            await self._commit()

    async def _publish(self, parent: int | None) -> None:
        self._parent, self._version = parent, await self._consumer.reserve(parent)
        self._journal.note(reserved=self._version, parent=parent)
        await self._linger()
        await self._consumer.published(self._version)
        await self._linger()
        write_newest(self._folder, self._version)

    async def _commit(self) -> None:
        save_checkpoint(
            self._folder,
            Checkpoint(
                version=self._version,
                parent=self._parent,
                step=self._step,
                queue=self._consumer.queue_id,
                trained=self._trained,
            ),
        )
        await self._linger()
        await self._consumer.commit(self._version, f"{self._version:08d}")

    async def _linger(self, seconds: float = 0.001) -> None:
        """Random pauses everywhere, so that a kill finds every state."""
        await trio.sleep(self._random.expovariate(1 / seconds))


def write_newest(folder: Path, version: int) -> None:
    """Hand the weights of `version` to the actors."""
    new = folder / f"{NEWEST}.new"
    new.write_text(str(version))
    new.replace(folder / NEWEST)


def read_newest(folder: Path) -> int | None:
    """The newest version that the actors may serve; None before the first."""
    try:
        return int((folder / NEWEST).read_text())
    except FileNotFoundError:
        return None


async def _learn(address: str, folder: Path, seed: int) -> None:
    async with open_consumer(address, "learner", uuid4().hex) as consumer:
        await Learner(consumer, folder, seed).run()


if __name__ == "__main__":
    trio.run(_learn, sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
