"""The actor's link to the receiver threads in its engine's workers: commands out, answers in, over loopback ZeroMQ."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, Protocol

import trio
import zmq

from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.rare_log import RareLog
from lachesis_transport.sockets import Socket, open_socket
from lachesis_transport.weights.layout import Layout

log = logging.getLogger("lachesis.weights")
refusals = RareLog(log)

HELLO_SECONDS = 60.0
MAX_FRAME_BYTES = 64 << 20
"""What a receiver says in one message: its hello carries the layout, about 50 bytes a tensor."""


class WorkersFailed(RuntimeError):
    """The engine's workers did not come, or do not hold the same model."""


class InitializesWeights(Protocol):
    """The part of Engine that starts the receivers."""

    async def initialize_weights(self, info: dict[str, Any]) -> None:
        """Hand `info` to every worker."""


class Workers:
    """The receivers of one engine; `open_workers` makes it. One command at a time."""

    layout: Layout
    """What every receiver's mirror holds."""

    def __init__(self, socket: Socket, *, count: int, token: str) -> None:
        self._socket = socket
        self._count = count
        self._token = token
        self._peers: dict[int, bytes] = {}
        self._next = 1
        self._lock = trio.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers' ranks in their engine, ascending."""
        return tuple(sorted(self._peers))

    async def command(
        self,
        op: str,
        *,
        only: Collection[int] | None = None,
        each: dict[int, dict[str, Any]] | None = None,
        frame: bytes | memoryview | None = None,
        **fields: Any,
    ) -> dict[int, dict[str, Any]]:
        """Send one command to all workers (or `only` some) and wait for all answers, by worker.

        `each` holds further fields that differ between workers. An answer with ok false is not an exception here.
        There is no deadline: a receiver answers within those of its command, and its death is the engine's.
        """
        async with self._lock:
            number = self._next
            self._next += 1
            expected = set(self.ranks if only is None else only)
            for rank in sorted(expected):
                message = {"op": op, "id": number, **fields, **(each[rank] if each else {})}
                frames: list[Any] = [self._peers[rank], pack(message)]
                if frame is not None:
                    frames.append(frame)
                await self._socket.send(frames)
            answers: dict[int, dict[str, Any]] = {}
            while expected:
                rank, answer = await self._receive()
                if answer.get("id") == number and rank in expected:
                    expected.discard(rank)
                    answers[rank] = answer
            return answers

    async def _greet(self) -> None:
        while len(self._peers) < self._count:
            frames = await self._socket.receive()
            try:
                hello = unpack(frames[1].buffer)
                if not hmac.compare_digest(take(hello, "token", str), self._token):
                    raise MessageError("token: not the one that this actor gave its workers")
                worker = take(hello, "worker", int)
                layout = Layout.from_wire(hello.get("layout"))
            except MessageError as error:
                refusals.warning("refused a receiver: %s", error)
                continue
            if self._peers and (difference := self.layout.difference(layout)):
                raise WorkersFailed(f"worker {worker} holds another model: {difference}")
            self.layout = layout
            self._peers[worker] = frames[0].bytes

    async def _receive(self) -> tuple[int, dict[str, Any]]:
        while True:
            frames = await self._socket.receive()
            peer = frames[0].bytes
            for rank, known in self._peers.items():
                if known == peer:
                    return rank, unpack(frames[1].buffer)
            refusals.warning("refused a message of an unknown receiver")


@asynccontextmanager
async def open_workers(engine: InitializesWeights, *, count: int) -> AsyncIterator[Workers]:
    """Start the receivers in the engine's workers and wait for all `count` of them. Raises WorkersFailed."""
    token = secrets.token_hex(16)
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", max_frame_bytes=MAX_FRAME_BYTES) as socket:
        workers = Workers(socket, count=count, token=token)
        await engine.initialize_weights({"address": socket.address, "token": token})
        with trio.move_on_after(HELLO_SECONDS) as scope:
            await workers._greet()
        if scope.cancelled_caught:
            raise WorkersFailed(f"{len(workers.ranks)} of {count} receivers came within {HELLO_SECONDS:g} s")
        yield workers
