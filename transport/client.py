"""Requests to the replay queue: what its two kinds of client share.

Each request has an id and is sent again until its answer comes: every operation has the same effect when repeated. But
one connection loses and reorders nothing, so a request that has no answer yet may still be on its way, and a second
copy of a large one would only delay it. It is repeated once something that was sent after it has been answered, or
after the next hello. The client says hello first, again whenever the queue does not know it (the connection broke, or
the queue had given the client up), and then sends a heartbeat each second with what was reported in between: these two
are small, and repeated anyway. A second connection tells the queue each second that this client is alive: what it sends
over the first one may take long.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import trio
import zmq

from lachesis_transport.keys import Keys
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.sockets import Socket, open_socket, plain_errors

log = logging.getLogger("lachesis.queue")

RESEND_SECONDS = 2.0
"""A request is not repeated sooner, unless there is a reason to ask again at once."""
REPEATED_ANYWAY = {"hello", "heartbeat", "goodbye"}
HEARTBEAT_SECONDS = 1.0
LOG_AFTER_SECONDS = 1.0
LOG_EVERY_SECONDS = 30.0
GOODBYE_SECONDS = 2.0
MAX_REPORTS = 4096
REPORTS_A_BEAT = 256


class QueueError(RuntimeError):
    """The queue refused a request. The text is the queue's own."""


class QueueRestarted(QueueError):
    """The queue came back without its state: what this client knows of versions and tickets is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What the queue says to a new client."""

    run_name: str
    batch_groups: int
    """B: groups a batch."""
    staleness_max: int
    """S: the hard bound, in versions."""
    steps: int
    """Batches of the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """Where the run stands, as of the last heartbeat."""

    current: int | None = None
    """Newest published version."""
    step: int = 0
    """Batches trained."""
    finished: bool = False
    final: int | None = None
    """The last version, once the run has finished."""


class _Call:
    def __init__(self) -> None:
        self.first = self.sent = 0
        """Where its first and its last copy come among all that was sent; 0 before."""
        self.reply: dict[str, Any] | None = None
        self.waits_for = ""
        self.depends_on_version = False
        self.wake = trio.Event()
        """Set when there is a reply, or a reason to ask again at once."""


class QueueClient:
    """A connection to the queue under one name; `open_client` makes it."""

    def __init__(self, socket: Socket, *, address: str, role: str, name: str, incarnation: str) -> None:
        self.address, self.role, self.name, self.incarnation = address, role, name, incarnation
        self.welcome: Welcome
        """From the last hello."""
        self.state = QueueState()
        self.queue_id = ""
        """Names the state of the queue that this client speaks with."""
        self.version: int | None = None
        """What heartbeats say that this client serves; `serve` sets it."""
        self._socket = socket
        self._numbers = count(1)
        self._calls: dict[int, _Call] = {}
        self._sent = 0
        """Messages sent."""
        self._arrived = 0
        """What was sent before this one has arrived, and so have the answers that were sent meanwhile."""
        self._known = False
        self._greeting = trio.Lock()
        self._reports: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTS)
        self._reports_lost = 0
        self._report_number = 0
        self._unanswered: list[dict[str, Any]] = []

    def serve(self, version: int) -> None:
        """Serve `version` from now on; what waits for a newer one is asked again at once."""
        self.version = version
        for call in self._calls.values():
            if call.depends_on_version:
                call.wake.set()

    def report(self, kind: str, **fields: Any) -> None:
        """Add an event to the run's log. It travels with the next heartbeat.

        Beyond 4096 waiting, the oldest is lost and counted by an event of kind `reports_lost`. Raises MessageError for
        fields that have no msgpack form.
        """
        pack(fields)
        self._reports_lost += len(self._reports) == self._reports.maxlen
        self._reports.append({"kind": kind, **fields})

    async def request(
        self,
        op: str,
        *,
        waits_for: str,
        queue_id: str | None = None,
        number: int | None = None,
        fresh: Callable[[], dict[str, Any]] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The queue's answer, however long it takes; `waits_for` says in the log what for.

        `fresh` gives fields that are looked up anew at every repetition. With `queue_id` the request makes sense to
        that queue only: raises QueueRestarted when another one answers. Raises QueueError when the queue refuses.
        """
        number = self.number() if number is None else number
        call = self._calls[number] = _Call()
        waiting = Waiting(f"waiting for {waits_for}", self.address)
        try:
            while True:
                if not self._known:
                    await self._greet(waiting)
                if queue_id not in (None, self.queue_id):
                    raise QueueRestarted(
                        f"the replay queue at {self.address} restarted without its state: {op} is void ({waits_for})"
                    )
                message = {"op": op, "id": number, "queue": self.queue_id, **fields}
                reply = await self._exchange(call, message, waiting, fresh)
                if reply.get("ok") is True:
                    return reply
                if reply.get("code") != "hello":
                    raise QueueError(f"{op}: {reply.get('error', 'no reason given')}")
                self._known = False
                call = self._calls[number] = _Call()
        finally:
            self._calls.pop(number, None)

    def number(self) -> int:
        """A number that no request of this client has yet."""
        return next(self._numbers)

    async def _exchange(
        self,
        call: _Call,
        message: dict[str, Any],
        waiting: Waiting,
        fresh: Callable[[], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        frame = pack(message)
        call.depends_on_version = fresh is not None
        while call.reply is None:
            call.wake = trio.Event()
            if fresh is not None:
                frame = pack({**message, **fresh()})
            with trio.move_on_after(RESEND_SECONDS):
                await self._send(call, frame)
                await call.wake.wait()
            while not call.wake.is_set():
                waiting.note(call.waits_for)
                call.waits_for = ""
                if message["op"] in REPEATED_ANYWAY or not call.sent or call.sent < self._arrived:
                    break
                with trio.move_on_after(RESEND_SECONDS):
                    await call.wake.wait()
        return call.reply

    async def _send(self, call: _Call, frame: bytes) -> None:
        await self._socket.send([frame])
        self._sent += 1
        call.sent = self._sent
        call.first = call.first or self._sent

    async def _greet(self, waiting: Waiting) -> None:
        async with self._greeting:
            asked, deadline = "", 0.0
            while not self._known:
                number = self.number()
                call = self._calls[number] = _Call()
                message = {"op": "hello", "id": number, "role": self.role, "name": self.name}
                message["incarnation"] = self.incarnation
                try:
                    reply = await self._exchange(call, message, waiting)
                finally:
                    del self._calls[number]
                if reply.get("ok") is True:
                    self._welcome(reply)
                    for other in self._calls.values():
                        if other.sent < call.first:  # sent over a connection that broke: it may not have arrived
                            other.wake.set()
                    return
                if reply.get("code") != "name_taken":
                    raise QueueError(f"hello: {reply.get('error', 'no reason given')}")
                process = take(reply, "process", str)
                if process != asked:
                    # The one before us may be dead and not yet given up; a queue that restarts meanwhile gives it as
                    # long again.
                    asked = process
                    deadline = trio.current_time() + 4.0 * take(reply, "heartbeat_seconds", float)
                elif trio.current_time() > deadline:
                    raise QueueError(f"hello: {reply['error']}")
                waiting.note(str(reply["error"]), what=f"{self.name}: waiting for another {self.role} to end")
                await trio.sleep(min(1.0, RESEND_SECONDS))

    def _welcome(self, reply: dict[str, Any]) -> None:
        self.welcome = Welcome(
            run_name=take(reply, "run_name", str),
            batch_groups=take(reply, "batch_groups", int),
            staleness_max=take(reply, "staleness_max", int),
            steps=take(reply, "steps", int),
        )
        self.state = QueueState(**take(reply, "state", dict))
        self.queue_id = take(reply, "queue", str)
        self._known = True

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.receive()
            try:
                reply = unpack(frames[-1].buffer)
                number = take(reply, "id", (int, type(None)))
            except MessageError as error:
                log.warning("%s: unreadable answer from %s: %s", self.name, self.address, error)
                continue
            call = self._calls.get(number) if number is not None else None
            if call is None:
                continue  # the answer to a repetition of a request that is answered already
            self._arrived = max(self._arrived, call.first)
            if "wait" in reply:
                call.waits_for = str(reply["wait"])
                continue
            call.reply = reply
            call.wake.set()

    async def _beat(self) -> None:
        while True:
            await self._send_reports("heartbeat")
            await trio.sleep(HEARTBEAT_SECONDS)

    async def _live(self, socket: Socket) -> None:
        who = {"op": "alive", "id": 0, "role": self.role, "name": self.name, "incarnation": self.incarnation}
        while True:
            await socket.send([pack({**who, "queue": self.queue_id})])
            await trio.sleep(HEARTBEAT_SECONDS)

    async def _send_reports(self, op: str) -> None:
        if not self._unanswered:
            self._report_number += 1
            self._unanswered = [self._reports.popleft() for _ in range(min(len(self._reports), REPORTS_A_BEAT))]
            if self._reports_lost:
                self._unanswered.append({"kind": "reports_lost", "count": self._reports_lost})
                self._reports_lost = 0
        reply = await self.request(
            op,
            waits_for=f"an answer to its {op}",
            version=self.version,
            report=self._unanswered,
            report_number=self._report_number,
        )
        self._unanswered = []
        if "state" in reply:
            self.state = QueueState(**take(reply, "state", dict))

    async def _leave(self) -> None:
        # A queue that does not know this client any more needs no goodbye.
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + GOODBYE_SECONDS),
            suppress(QueueError),
        ):
            while self._reports:
                await self._send_reports("heartbeat")
            await self._send_reports("goodbye")


class Waiting:
    """Says what is waited for: soon once, then now and then."""

    def __init__(self, what: str, address: str) -> None:
        self._what, self._address = what, address
        self._since = trio.current_time()
        self._next = self._since + LOG_AFTER_SECONDS

    def note(self, why: str, *, what: str | None = None) -> None:
        """Still waiting, for the reason `why`; for `what` at the moment, if not for what it was at first."""
        now = trio.current_time()
        if now >= self._next:
            self._next = now + LOG_EVERY_SECONDS
            why = why or f"the replay queue at {self._address} does not answer"
            log.info("%s (%s; for %.0f s)", what or self._what, why, now - self._since)


@asynccontextmanager
async def open_client(
    address: str, *, role: str, name: str, incarnation: str, keys: Keys | None = None
) -> AsyncIterator[QueueClient]:
    """A client that the queue has welcomed, waiting for the queue for ever; says goodbye on exit.

    A cancellation from outside ends the block, but not the connection: the queue hears of a client, and answers it,
    until the block has handed back what it holds.

    Raises QueueError when the queue refuses: another live client keeps the name, say.
    """
    with plain_errors():
        async with (
            open_socket(zmq.DEALER, connect=address, keys=keys, field="queue.address") as socket,
            open_socket(zmq.DEALER, connect=address, keys=keys, field="queue.address") as beside,
            trio.open_nursery() as nursery,
        ):
            client = QueueClient(socket, address=address, role=role, name=name, incarnation=incarnation)
            receiving, beating, living = (trio.CancelScope(shield=True) for _ in range(3))

            async def run(scope: trio.CancelScope, function: Callable[[], Awaitable[None]]) -> None:
                with scope:
                    await function()

            nursery.start_soon(run, receiving, client._receive)
            try:
                await client._greet(Waiting(f"{name}: waiting for the replay queue", address))
                nursery.start_soon(run, beating, client._beat)
                nursery.start_soon(run, living, partial(client._live, beside))
                try:
                    yield client
                finally:
                    beating.cancel()
                    await client._leave()
            finally:
                living.cancel()
                receiving.cancel()


async def queue_status(address: str, *, seconds: float = 5.0, keys: Keys | None = None) -> dict[str, Any]:
    """The statistics of the queue at `address`. Raises QueueError when it does not answer within `seconds`."""
    with trio.move_on_after(seconds), plain_errors():
        async with open_socket(zmq.DEALER, connect=address, keys=keys, field="queue.address") as socket:
            await socket.send([pack({"op": "status", "id": 1})])
            [frame] = await socket.receive()
            return take(unpack(frame.buffer), "statistics", dict)
    raise QueueError(f"the replay queue at {address} did not answer within {seconds:g} s")
