"""What keeps the queue's benchmarks busy: a real queue in its own process, actors without engines, and a learner that
trains nothing. Actors and learner share the process of the benchmark, so that a version reaches actors at once."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import trio
import zmq

from lachesis_configs.schema import Config
from lachesis_transport.broker import serve_queue
from lachesis_transport.consumer import Consumer, open_consumer
from lachesis_transport.messages import Group, Trajectory
from lachesis_transport.producer import Finished, Producer, Ticket, open_producer

ENDING_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a group."""

    trajectories: int
    tokens: int


class Groups:
    """Groups of one shape from one actor; their arrays are made once a version."""

    def __init__(self, shape: Shape, actor: str) -> None:
        self._shape, self._actor = shape, actor
        self._version = -1
        self._trajectories: tuple[Trajectory, ...] = ()

    def of(self, ticket: Ticket) -> Group:
        """The group of a ticket."""
        if ticket.version != self._version:
            self._version = ticket.version
            self._trajectories = (_trajectory(self._shape.tokens, ticket.version),) * self._shape.trajectories
        return Group(
            group_id=f"{ticket.ticket}:0",
            ticket=ticket.ticket,
            actor=self._actor,
            environment="bench",
            trajectories=self._trajectories,
        )


def _trajectory(tokens: int, version: int) -> Trajectory:
    """An eighth of it is the prompt."""
    mask = (np.arange(tokens) >= max(1, tokens // 8)).astype(np.uint8)
    return Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        mask=mask,
        logprobs=-0.5 * mask.astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        score=1.0,
    )


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Child:
    """A process that listens."""

    process: subprocess.Popen[str]
    address: str

    def end(self) -> None:
        """Wait until it has ended by itself, as a queue does after its run. Raises subprocess.TimeoutExpired."""
        self.process.wait(timeout=ENDING_SECONDS)

    def resident_mb(self) -> float:
        """Memory that it has in use, in MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6


@contextmanager
def running_queue(folder: Path, *, batch: int, staleness: int, late_seconds: float = 120.0) -> Iterator[Child]:
    """A queue in a process of its own, its files in `folder`, with room for all that pacing lets in; killed at the
    end."""
    config = {
        "run": {"name": "bench", "steps": 1_000_000_000},
        "queue": {
            "address": "tcp://127.0.0.1:0",
            "batch_groups": batch,
            "max_bytes": 1 << 36,
            "max_uncommitted_bytes": 1 << 36,
        },
        "staleness": {"max": staleness, "late_seconds": late_seconds},
    }
    with _running("queue", Config.model_validate(config).model_dump_json(), str(folder)) as child:
        yield child


@contextmanager
def running_echo() -> Iterator[Child]:
    """Answers [anything, n] with n bytes, over plain ZeroMQ; killed at the end."""
    with _running("echo") as child:
        yield child


@contextmanager
def _running(*arguments: str) -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdout=subprocess.PIPE, text=True)
    over = threading.Event()

    def watch() -> None:
        """Its clients would wait for it for ever."""
        code = process.wait()
        if code and not over.is_set():
            print(f"lachesis bench: the process of the {arguments[0]} ended with {code}", file=sys.stderr, flush=True)
            signal.raise_signal(signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"{arguments[0]}: the process ended before it listened")
        yield Child(process, address)
    finally:
        over.set()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder on disk for one queue."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
        yield Path(folder)


async def _serve_queue(config: str, folder: str) -> None:
    async with trio.open_nursery() as nursery:
        print(await nursery.start(serve_queue, Config.model_validate_json(config), Path(folder)), flush=True)


def _serve_echo() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
        while True:
            route, _, size = socket.recv_multipart()
            socket.send_multipart([route, bytes(int(size))], copy=False)


# ---------------------------------------------------------------------- actors and a learner


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Actors that ask for a ticket, roll out and put, again and again, and the learner that they feed."""

    consumer: Consumer
    producers: list[Producer]
    version: int = 0
    accepted: int = 0
    """Groups that the queue acknowledged."""
    refused: int = 0
    """Puts with another answer."""
    longest_rollout: float = 0.0
    """In seconds, as the three that follow."""
    longest_ticket: float = 0.0
    """Longest time in which actors waited for a ticket and none of them got one."""
    longest_lease: float = 0.0
    """Longest wait for a batch."""
    longest_batch: float = 0.0
    """Longest time from one version published to the next one: a batch leased, trained and committed."""
    most_batches: int = 0
    """Most versions published while one task waited for its ticket."""
    waiting: int = 0
    """Tasks that wait for a ticket."""
    waiting_since: float = 0.0
    """When the first of them began to wait, or another one got a ticket since."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    async def act(self, actor: int, shape: Shape, rollout: float) -> None:
        """One task of an actor, until the run has finished. rollout: mean seconds, log-normal with sigma 1; 0 none."""
        producer, groups = self.producers[actor], Groups(shape, f"actor-{actor}")
        while True:
            ticket = await self._ticket(producer)
            if isinstance(ticket, Finished):
                return
            started = trio.current_time()
            if rollout:
                await trio.sleep(self.random.lognormal(math.log(rollout) - 0.5, 1.0))
                self.longest_rollout = max(self.longest_rollout, trio.current_time() - started)
            answer = await producer.put(groups.of(ticket))
            self.accepted += answer.status == "accepted"
            self.refused += answer.status != "accepted"

    async def _ticket(self, producer: Producer) -> Ticket | Finished:
        asked_at = self.version
        if not self.waiting:
            self.waiting_since = trio.current_time()
        self.waiting += 1
        ticket = await producer.ticket(version=self.version, environment="bench")
        self.waiting -= 1
        if isinstance(ticket, Ticket):
            now = trio.current_time()
            self.longest_ticket = max(self.longest_ticket, now - self.waiting_since)
            self.waiting_since = now
            self.most_batches = max(self.most_batches, ticket.version - asked_at)
        return ticket

    async def learn(self, batches: int, train: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint) -> None:
        """Train `batches` batches, each with its publication and a commit."""
        for _ in range(batches):
            asked = trio.current_time()
            await self.consumer.lease(self.version)
            self.longest_lease = max(self.longest_lease, trio.current_time() - asked)
            await train()
            await self.consumer.trained(self.version)
            trained = self.version
            await self._publish(trained)
            await self.consumer.commit(trained, "none")
            self.longest_batch = max(self.longest_batch, trio.current_time() - asked)

    async def _publish(self, parent: int | None) -> None:
        version = await self.consumer.reserve(parent)
        await self.consumer.published(version)
        self.version = version  # no ticket is asked for at a version that the queue does not know
        for producer in self.producers:
            producer.serving(self.version)

    async def finish(self) -> None:
        """End the run."""
        await self.consumer.finish(self.version)


@asynccontextmanager
async def fleet(address: str, *, actors: int, tasks: int, shape: Shape, rollout: float = 0.0) -> AsyncIterator[Fleet]:
    """A fleet at work, each actor with `tasks` groups under way; on exit the run ends."""
    async with AsyncExitStack() as stack:
        consumer = await stack.enter_async_context(open_consumer(address, "learner", "bench"))
        producers = [
            await stack.enter_async_context(open_producer(address, f"actor-{i}", "bench")) for i in range(actors)
        ]
        group = Fleet(consumer=consumer, producers=producers)
        await group._publish(None)
        async with trio.open_nursery() as nursery:
            for actor in range(actors):
                for _ in range(tasks):
                    nursery.start_soon(group.act, actor, shape, rollout)
            yield group
            await group.finish()


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _serve_echo()
    else:
        trio.run(_serve_queue, sys.argv[2], sys.argv[3])
