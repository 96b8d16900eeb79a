"""What sockets and wire types cost: Lachesis's sockets under trio against plain ZeroMQ, and the codec by itself.

A child process sends, this one receives; both ends of a measurement are of the same kind.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import trio
import zmq

from lachesis_bench.figures import Figure, Length
from lachesis_transport.messages import Trajectory, pack, unpack
from lachesis_transport.sockets import open_socket

HIGH_WATER = 64
MEGABYTE, SMALL = 1 << 20, 16 << 10

AMOUNT: dict[Length, tuple[int, int, int, int]] = {
    "short": (500, 10_000, 200, 9),
    "normal": (1_000, 50_000, 1_000, 15),
    "long": (4_000, 200_000, 5_000, 15),
}
"""Messages of 1 MiB, of 16 KiB, round trips through the codec, and runs of each: many, as one run may have half the
speed of the next, whosever it is."""


def run(length: Length) -> list[Figure]:
    """transport.throughput_1mb, transport.messages_16kb, transport.codec_2048."""
    large, small, codings, runs = AMOUNT[length]
    return [
        _against_raw("transport.throughput_1mb", "MB/s", size=MEGABYTE, count=large, each=MEGABYTE / 1e6, runs=runs),
        _against_raw("transport.messages_16kb", "messages/s", size=SMALL, count=small, each=1.0, runs=runs),
        _codec(codings, runs),
    ]


def _against_raw(figure: str, unit: str, *, size: int, count: int, each: float, runs: int) -> Figure:
    # Alternating, so that what else the machine does falls on both.
    pairs = [(_seconds("trio", size, count), _seconds("raw", size, count)) for _ in range(runs)]
    ratios = [raw / ours for ours, raw in pairs]
    return Figure(
        figure=figure,
        value=each * count / statistics.median(ours for ours, _ in pairs),
        unit=unit,
        against="raw ZeroMQ, same sizes, same run",
        reference=each * count / statistics.median(raw for _, raw in pairs),
        ratio=statistics.median(ratios),
        runs=runs,
        spread=_spread(ratios),
    )


def _seconds(kind: str, size: int, count: int) -> float:
    """Seconds from the first of `count` messages to the last."""
    receive: Callable[[int, list[str]], float] = _receive_raw if kind == "raw" else _receive_trio
    return receive(count, [sys.executable, "-m", __name__, kind, str(size), str(count)])


def _receive_raw(count: int, sender: list[str]) -> float:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(HIGH_WATER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with subprocess.Popen([*sender, f"tcp://127.0.0.1:{port}"]):
            socket.recv_multipart(copy=False)
            start = time.perf_counter()
            for _ in range(count - 1):
                socket.recv_multipart(copy=False)
            return time.perf_counter() - start


def _receive_trio(count: int, sender: list[str]) -> float:
    async def receive() -> float:
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", high_water=HIGH_WATER) as socket:
            with subprocess.Popen([*sender, socket.address]):
                await socket.receive()
                start = time.perf_counter()
                for _ in range(count - 1):
                    await socket.receive()
                return time.perf_counter() - start

    return trio.run(receive)


def _send_raw(size: int, count: int, address: str) -> None:
    block = bytes(size)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(HIGH_WATER)
        socket.connect(address)
        for _ in range(count):
            socket.send_multipart([block], copy=False)


def _send_trio(size: int, count: int, address: str) -> None:
    async def send() -> None:
        block = bytes(size)
        async with open_socket(zmq.DEALER, connect=address, high_water=HIGH_WATER) as socket:
            for _ in range(count):
                await socket.send([block])

    trio.run(send)
    zmq.Context.instance().term()


def _codec(count: int, runs: int) -> Figure:
    n = 2048
    random = np.random.default_rng(0)
    mask = (np.arange(n) >= 256).astype(np.uint8)
    trajectory = Trajectory(
        tokens=random.integers(0, 49_152, n).astype(np.int32),
        mask=mask,
        logprobs=(-random.random(n) * mask).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        advantages=(random.standard_normal(n) * mask).astype(np.float32),
        score=1.0,
    )
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            Trajectory.from_wire(unpack(pack(trajectory.to_wire())))
        times.append((time.perf_counter() - start) / count * 1e6)
    return Figure(
        figure="transport.codec_2048", value=statistics.median(times), unit="us", runs=runs, spread=_spread(times)
    )


def _spread(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


if __name__ == "__main__":
    {"raw": _send_raw, "trio": _send_trio}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
