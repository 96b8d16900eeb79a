"""What the whole queue costs a group: ticket, put, lease and all, against plain ZeroMQ round trips of the same bytes.

The queue, or the echo, is a child process. Sixteen tasks of an actor and a learner that trains nothing keep it busy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio
import zmq

from lachesis_bench.figures import Figure, Length
from lachesis_configs.schema import Config
from lachesis_transport.broker import serve_queue
from lachesis_transport.consumer import Consumer, open_consumer
from lachesis_transport.messages import Group, Trajectory, pack
from lachesis_transport.producer import Finished, Producer, Ticket, open_producer

TASKS, BATCH, GROUP_SIZE, TOKENS = 16, 16, 8, 512
CONFIG = Config.model_validate(
    {
        "run": {"steps": 1_000_000},
        "queue": {"address": "tcp://127.0.0.1:0", "batch_groups": BATCH},
        "staleness": {"max": 2},
    }
)

AMOUNT: dict[Length, tuple[int, int]] = {"short": (20, 3), "normal": (100, 5), "long": (500, 9)}
"""Batches, and runs."""


def run(length: Length) -> list[Figure]:
    """queue.groups: groups a second from ticket to trained, in memory."""
    batches, runs = AMOUNT[length]
    # Alternating, so that what else the machine does falls on both.
    pairs = [(_with_child("queue", batches), _with_child("echo", batches)) for _ in range(runs)]
    ratios = [ours / raw for ours, raw in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    ratio = statistics.median(ratios)
    return [
        Figure(
            figure="queue.groups",
            value=statistics.median(ours for ours, _ in pairs),
            unit="groups/s",
            against="raw ZeroMQ round trips, the same bytes in and out, same run",
            reference=statistics.median(raw for _, raw in pairs),
            ratio=ratio,
            runs=runs,
            spread=(high - low) / 2 / ratio,
        )
    ]


def _with_child(kind: str, batches: int) -> float:
    """Groups a second."""
    child = subprocess.Popen([sys.executable, "-m", __name__, kind], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        return _echo_rate(address, batches) if kind == "echo" else trio.run(_queue_rate, address, batches)
    finally:
        child.kill()
        child.wait()


async def _queue_rate(address: str, batches: int) -> float:
    async with (
        open_consumer(address, "learner", "bench") as consumer,
        open_producer(address, "actor-0", "bench") as producer,
        trio.open_nursery() as nursery,
    ):
        await consumer.published(await consumer.reserve(None))
        producer.serving(0)
        for _ in range(TASKS):
            nursery.start_soon(_act, producer)
        version = await _learn(consumer, producer, 0, 2)
        start = time.perf_counter()
        version = await _learn(consumer, producer, version, batches)
        seconds = time.perf_counter() - start
        await consumer.finish(version)
    return batches * BATCH / seconds


async def _act(producer: Producer) -> None:
    while not isinstance(ticket := await producer.ticket(version=0, environment="bench"), Finished):
        await producer.put(_group(ticket))


async def _learn(consumer: Consumer, producer: Producer, version: int, batches: int) -> int:
    for _ in range(batches):
        await consumer.lease(version)
        await consumer.trained(version)
        version = await consumer.reserve(version)
        await consumer.published(version)
        await consumer.commit(version, "none")
        producer.serving(version)
    return version


def _group(ticket: Ticket) -> Group:
    mask = (np.arange(TOKENS) >= 64).astype(np.uint8)
    trajectory = Trajectory(
        tokens=np.arange(TOKENS, dtype=np.int32),
        mask=mask,
        logprobs=-0.5 * mask.astype(np.float32),
        versions=np.where(mask, ticket.version, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        score=1.0,
    )
    return Group(
        group_id=f"{ticket.ticket}:0",
        ticket=ticket.ticket,
        actor="actor-0",
        environment="bench",
        trajectories=(trajectory,) * GROUP_SIZE,
    )


def _echo_rate(address: str, batches: int) -> float:
    """A group is a small round trip (its ticket), one with its bytes (put), and its bytes back once a batch (lease)."""
    small = pack({"op": "ticket"})
    group = pack({"group": _group(Ticket(ticket=0, deadline=0, version=0, item=0)).pack()})
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
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


def _serve_echo() -> None:
    """Answer [anything, n] with n bytes."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
        while True:
            route, _, size = socket.recv_multipart()
            socket.send_multipart([route, bytes(int(size))], copy=False)


async def _serve_queue() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            address: Any = await nursery.start(serve_queue, CONFIG, Path(folder))
            print(address, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _serve_echo()
    else:
        trio.run(_serve_queue)
