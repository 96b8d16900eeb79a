"""The actor's link to the publisher: membership, news, and bytes to fetch, over one DEALER socket.

async with open_link(address, actor="actor-0", workers=1, layout=layout) as link:
    await link.join()                       # waits for the publisher, however long that takes
    news = await link.next_news(after=None)
    plan = await link.plan(checksum)
    await link.fetch(step, sink)
    await link.staged(version, checksum)
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio
import zmq

from lachesis_transport.keys import Keys
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.rare_log import RareLog
from lachesis_transport.sockets import Socket, open_socket, plain_errors
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.version_log import Step

log = logging.getLogger("lachesis.weights")
refusals = RareLog(log)

ALIVE_SECONDS = 1.0
RESEND_SECONDS = 0.5
LOG_EVERY_SECONDS = 30.0
UNANSWERED = 10
"""Signs of life in a row, after which the log says that the learner is silent. Not seconds: those pass here, too, while
this process is frozen."""
CHUNK_BYTES = 1 << 20
WINDOW = 4
"""Chunks that are under way at once: the credit of this joiner."""


class Fenced(Exception):
    """The publisher does not count this actor as a member any more: join again."""


class Refused(RuntimeError):
    """The publisher refused this actor for good; the text is its reason."""


class StreamBroken(Exception):
    """What was being fetched is gone, or the publisher fell silent: plan again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The newest published version, as the publisher last said."""

    version: int
    checksum: str
    shards: int
    finished: bool
    """No more versions come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """To receive one version by collective: the fields of the receivers' command."""

    version: int
    parent: int
    checksum: str
    sizes: list[int]
    seconds: float
    group: dict[str, Any]
    """GroupSpec of the actor's first worker; the others take the ranks after it, and all the host that this actor
    knows."""


class Link:
    """One actor's connection; `open_link` makes it."""

    def __init__(self, socket: Socket, *, actor: str, workers: int, layout: Layout, channel: str) -> None:
        self._socket = socket
        self._hello = {
            "op": "hello",
            "actor": actor,
            "workers": workers,
            "layout": layout.to_wire(),
            "channel": channel,
        }
        self._token: int | None = None
        self._unanswered = 0
        self.away = False
        """Whether the learner fell silent, and no membership began since."""
        self._seconds = 30.0
        self._refused: str | None = None
        self._fenced = False
        self._number = 0
        self._answers: deque[tuple[dict[str, Any], memoryview]] = deque()
        self._changed = trio.Event()
        self.news: News | None = None
        """None until the publisher published something."""
        self._invitation: Invitation | None = None

    async def join(self) -> None:
        """Become a member (again). Waits for a publisher that has something published, logging it now and then.

        Raises Refused when the publisher trains another model.
        """
        self._token, self._fenced, self._invitation, self.news = None, False, None, None
        self._hello["nonce"] = secrets.token_hex(8)
        speak = trio.current_time() + RESEND_SECONDS
        while self._token is None:
            if trio.current_time() >= speak:
                log.info("waiting for the learner's first version")
                speak = trio.current_time() + LOG_EVERY_SECONDS
            with trio.move_on_after(RESEND_SECONDS):
                await self._socket.send([pack(self._hello)])
                while self._token is None and self._refused is None:
                    await self._changed.wait()
            if self._refused is not None:
                raise Refused(self._refused)

    async def next_news(self, *, after: int | None, finished: bool = False) -> News:
        """The newest version once it differs from `after`, or once `finished` turned true. Raises Fenced."""
        while True:
            self._check()
            if self.news is not None and (self.news.version != after or self.news.finished != finished):
                return self.news
            await self._changed.wait()

    def take_invitation(self) -> Invitation | None:
        """The collective that waits for this actor, if any; it is handed out once."""
        invitation, self._invitation = self._invitation, None
        return invitation

    async def plan(self, checksum: str) -> tuple[int | None, list[Step]]:
        """How to get from weights with this checksum to the newest: (the version they are, what to fetch).

        Raises Fenced or StreamBroken.
        """
        while True:
            number = self._request()
            await self._say({"op": "plan", "id": number, "checksum": checksum})
            message, _ = await self._answer(number)
            if message.get("steps") is not None:
                held = take(message, "held", (int, type(None)))
                return held, [Step.from_wire(step) for step in take(message, "steps", list)]
            await trio.sleep(0.05)

    async def fetch(self, step: Step, sink: Callable[[int, memoryview], Awaitable[None]]) -> None:
        """Fetch a step, a few chunks ahead of `sink(offset, bytes)`. Raises Fenced or StreamBroken."""
        number = self._request()
        asked = 0

        async def ask() -> None:
            nonlocal asked
            size = min(CHUNK_BYTES, step.bytes - asked)
            if size > 0:
                fields = {"version": step.version, "anchor": step.parent is None, "offset": asked, "size": size}
                await self._say({"op": "fetch", "id": number, **fields})
                asked += size

        for _ in range(WINDOW):
            await ask()
        received = 0
        while received < step.bytes:
            message, piece = await self._answer(number)
            offset = take(message, "offset", int)
            if take(message, "gone", bool) or offset != received or not len(piece):
                raise StreamBroken(f"version {step.version} is not there any more")
            received += len(piece)
            await sink(offset, piece)
            await ask()

    async def staged(self, version: int, checksum: str) -> None:
        """Tell that all workers hold this version."""
        await self._say({"op": "staged", "version": version, "checksum": checksum})

    async def bye(self) -> None:
        """End the membership."""
        await self._say({"op": "bye"})

    def _request(self) -> int:
        self._number += 1
        self._answers.clear()
        return self._number

    async def _say(self, message: dict[str, Any]) -> None:
        self._check()
        with trio.move_on_after(self._seconds) as scope:
            await self._socket.send([pack({"token": self._token, **message})])
        if scope.cancelled_caught:
            raise StreamBroken("the publisher does not read")

    def _check(self) -> None:
        if self._fenced:
            raise Fenced("the learner came back" if self.away else "the learner removed this actor")

    async def _answer(self, number: int) -> tuple[dict[str, Any], memoryview]:
        with trio.move_on_after(self._seconds):
            while True:
                self._check()
                while self._answers:
                    message, piece = self._answers.popleft()
                    if message.get("id") == number:
                        return message, piece
                await self._changed.wait()
        raise StreamBroken(f"the publisher was silent for {self._seconds:g} s")

    async def _read(self) -> None:
        while True:
            frames = await self._socket.receive()
            self._unanswered = 0
            try:
                self._handle(unpack(frames[0].buffer), frames[1:])
            except MessageError as error:
                refusals.warning("ignored a message of the publisher: %s", error)
            self._changed.set()
            self._changed = trio.Event()

    def _handle(self, message: dict[str, Any], frames: Sequence[zmq.Frame]) -> None:
        op = take(message, "op", str)
        if op == "welcome" and self._token is None:
            self._seconds = take(message, "seconds", float)
            self.news = _news(message)
            self._token = take(message, "token", int)
            self._greet()
        elif op == "news" and self._token is not None:
            self.news = _news(message)
            if self.away:
                self._greet()
            if "collective" in message:
                self._invitation = _invitation(take(message, "collective", dict))
        elif op == "fenced":
            self._fenced = self._token is not None
        elif op in ("plan", "chunk"):
            if len(self._answers) <= 2 * WINDOW:
                self._answers.append((message, frames[0].buffer if frames else memoryview(b"")))
        elif op == "refused":
            reason = take(message, "error", str)
            if self._token is None:
                self._refused = reason
            refusals.warning("the publisher refused a message: %s", reason)

    def _greet(self) -> None:
        assert self.news is not None
        if self.away:
            log.info("the learner is back: it goes on with version %d", self.news.version)
        else:
            log.info("joined the learner at version %d", self.news.version)
        self.away = False

    async def _stay_alive(self) -> None:
        while True:
            await trio.sleep(ALIVE_SECONDS)
            if self._token is None or self._fenced:
                continue
            self._socket.send_nowait([pack({"op": "alive", "token": self._token})])
            self._unanswered += 1
            if self._unanswered == UNANSWERED + 1 and self.news is not None:
                self.away = True
                log.warning("the learner has been silent for %d s, after version %d", UNANSWERED, self.news.version)


def _news(message: dict[str, Any]) -> News:
    return News(
        version=take(message, "version", int),
        checksum=take(message, "checksum", str),
        shards=take(message, "shards", int),
        finished=take(message, "finished", bool),
    )


def _invitation(wire: dict[str, Any]) -> Invitation:
    return Invitation(
        version=take(wire, "version", int),
        parent=take(wire, "parent", int),
        checksum=take(wire, "checksum", str),
        sizes=take(wire, "sizes", list),
        seconds=take(wire, "seconds", float),
        group=take(wire, "group", dict),
    )


@asynccontextmanager
async def open_link(
    address: str, *, actor: str, workers: int, layout: Layout, channel: str = "auto", keys: Keys | None = None
) -> AsyncIterator[Link]:
    """A link for the length of the block; the publisher need not be there yet.

    `channel` is `auto` (the publisher's) or `stream`. Raises ValueError off loopback without keys.
    """
    with plain_errors():
        async with (
            open_socket(zmq.DEALER, connect=address, keys=keys, field="weights.address") as socket,
            trio.open_nursery() as nursery,
        ):
            link = Link(socket, actor=actor, workers=workers, layout=layout, channel=channel)
            nursery.start_soon(link._read)
            nursery.start_soon(link._stay_alive)
            try:
                yield link
            finally:
                nursery.cancel_scope.cancel()
