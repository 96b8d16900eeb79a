"""The member processes of `lachesis bench publish`, and raw bytes to the same processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trio
import zmq

from lachesis_transport.weights.collective import Group, GroupSpec
from lachesis_transport.weights.rendezvous import Rendezvous

PROGRAM = "lachesis_bench.publish_member"
ANSWER_SECONDS = 120.0

Carry = Callable[..., Awaitable[float]]
"""await carry(uint8[n], copy=False): the seconds until the last member has the bytes (and copied them, if asked)."""


class Member:
    """One process."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self._process = process
        self._lines: deque[dict[str, Any]] = deque()
        self._changed = trio.Event()

    async def order(self, op: str, **fields: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps({"op": op, **fields}).encode() + b"\n")

    async def heard(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next line of this kind with these fields; others before it are forgotten.

        Raises RuntimeError when the process ended or said that something went wrong, TooSlowError after a while.
        """
        with trio.fail_after(ANSWER_SECONDS):
            while True:
                while not self._lines:
                    await self._changed.wait()
                line = self._lines.popleft()
                if line["kind"] in ("ended", "trouble"):
                    raise RuntimeError(f"{self.name}: {line}, expected {kind} {fields}")
                if line["kind"] == kind and fields.items() <= line.items():
                    return line

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """A command whose answer is a line of its name."""
        await self.order(op, **fields)
        return await self.heard(op)

    async def kill(self) -> None:
        """End the process."""
        self._process.kill()
        await self._process.wait()

    async def read(self) -> None:
        """Take in what the process says."""
        assert self._process.stdout is not None
        pending = b""
        async for piece in self._process.stdout:
            *lines, pending = (pending + piece).split(b"\n")
            self._add(json.loads(line) for line in lines)
        self._add([{"kind": "ended", "code": await self._process.wait()}])

    def _add(self, lines: Any) -> None:
        self._lines.extend(lines)
        self._changed.set()
        self._changed = trio.Event()


class Fleet:
    """Members that were started; `open_fleet` makes it."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._epoch = 0

    @asynccontextmanager
    async def raw(self, count: int, *, channel: Literal["collective", "stream"]) -> AsyncIterator[Carry]:
        """A way to carry bytes to the first `count` members by plain gloo (collective) or plain ZeroMQ (stream)."""
        members = self.members[:count]
        opened = self._raw_gloo(members) if channel == "collective" else self._raw_zeromq(members)
        async with opened as send:

            async def carry(data: np.ndarray, *, copy: bool) -> float:
                for member in members:
                    await member.order("raw", bytes=len(data), copy=copy)
                for member in members:
                    await member.heard("ready")
                began = time.monotonic()
                await trio.to_thread.run_sync(send, data)
                return max([(await member.heard("raw"))["time"] for member in members]) - began

            yield carry

    @asynccontextmanager
    async def _raw_gloo(self, members: list[Member]) -> AsyncIterator[Callable[[np.ndarray], None]]:
        self._epoch += 1
        rendezvous = Rendezvous("127.0.0.1", epoch=self._epoch)
        specs = [
            GroupSpec(
                epoch=self._epoch,
                host="127.0.0.1",
                port=rendezvous.port,
                rank=rank,
                size=len(members) + 1,
                backend="gloo",
            )
            for rank in range(len(members) + 1)
        ]
        for member, spec in zip(members, specs[1:], strict=True):
            await member.order("meet", group=spec.to_wire())
        group = await trio.to_thread.run_sync(lambda: Group(specs[0], seconds=ANSWER_SECONDS))
        for member in members:
            await member.heard("met")
        try:
            yield lambda data: group.broadcast(data, seconds=ANSWER_SECONDS)
        finally:
            group.close()
            rendezvous.close()

    @asynccontextmanager
    async def _raw_zeromq(self, members: list[Member]) -> AsyncIterator[Callable[[np.ndarray], None]]:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(1e3 * ANSWER_SECONDS))
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            peers = []
            for member in members:
                await member.order("meet", address=f"tcp://127.0.0.1:{port}")
                await member.heard("met")
                peers.append((await trio.to_thread.run_sync(socket.recv_multipart))[0])

            def send(data: np.ndarray) -> None:
                for peer in peers:
                    socket.send_multipart([peer, data.data], copy=False)

            yield send


@asynccontextmanager
async def open_fleet(folder: Path, count: int) -> AsyncIterator[Fleet]:
    """`count` member processes that hold the model in `folder`, for the length of the block."""
    async with trio.open_nursery() as nursery:
        members = []
        try:
            for i in range(count):
                command = [sys.executable, "-m", PROGRAM, str(folder), f"member-{i}"]
                process = await trio.lowlevel.open_process(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
                members.append(Member(f"member-{i}", process))
                nursery.start_soon(members[-1].read)
            for member in members:
                await member.heard("started")
            yield Fleet(members)
        finally:
            with trio.CancelScope(shield=True):
                for member in members:
                    await member.kill()
            nursery.cancel_scope.cancel()
