"""The bytes that members fetch: answered at once to those who read, later to those who do not, in bounded memory.

    fetches = Fetches(answer)                       # answer(token, fetch) sends a chunk
    nursery.start_soon(fetches.serve)
    fetches.ask(token, Fetch(number=1, version=7, anchor=True, offset=0, size=1 << 20))

ZeroMQ keeps what a peer has not read, and nothing but the end of a connection frees it. So every chunk is counted until
ZeroMQ has handed it on. A member has at most CREDIT_BYTES on their way, all together BUDGET_BYTES; but one that has
nothing on its way gets its next chunk nevertheless, within LIMIT_BYTES: who reads goes on, however many do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio
import zmq

from lachesis_transport.messages import MessageError

MAX_CHUNK_BYTES = 1 << 20
MAX_MEMBERS = 1024
CREDIT_BYTES = 8 * MAX_CHUNK_BYTES
"""Twice what an actor asks for ahead: ZeroMQ tells a little later than the peer that a chunk has gone."""
BUDGET_BYTES = 256 << 20
LIMIT_BYTES = BUDGET_BYTES + MAX_MEMBERS * MAX_CHUNK_BYTES
MAX_WAITING = 16
"""Questions of one member that wait for it to read; it gives up older ones by asking under another number."""
PAUSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What a member asks for: a part of a step."""

    number: int
    version: int
    anchor: bool
    offset: int
    size: int


class Fetches:
    """Who waits for which bytes, and what ZeroMQ still holds of those that were sent.

    Args:
        answer: sends a chunk to a member, by token, and returns its frame, made with `track`; None where none was sent.
    """

    def __init__(self, answer: Callable[[int, Fetch], zmq.Frame | None]) -> None:
        self._answer = answer
        self._waiting: dict[int, deque[Fetch]] = {}
        self._unread: dict[int, deque[tuple[zmq.MessageTracker, int]]] = {}
        """What has not gone out, by token: also of members that have left."""
        self._some = trio.Event()

    @property
    def nbytes(self) -> int:
        """Bytes that were sent and not read, as far as is known."""
        return sum(size for sent in self._unread.values() for _, size in sent)

    def ask(self, token: int, fetch: Fetch) -> None:
        """Answer now, or once the member has read. Raises MessageError when too much waits already."""
        waiting = self._waiting.setdefault(token, deque())
        if waiting and waiting[0].number != fetch.number:
            waiting.clear()
        if len(waiting) >= MAX_WAITING:
            raise MessageError(f"fetch: {len(waiting)} of this member wait already, expected it to read")
        waiting.append(fetch)
        self._go_on(token)
        if self._waiting:
            self._some.set()

    def forget(self, token: int) -> None:
        """The member has left; what was sent counts until it is gone."""
        self._waiting.pop(token, None)

    async def serve(self) -> None:
        """Answer those that wait once there is room, until cancelled."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            while self._waiting:
                await trio.sleep(PAUSE_SECONDS)  # ZeroMQ does not say when
                for token in tuple(self._waiting):
                    self._go_on(token)

    def _go_on(self, token: int) -> None:
        waiting = self._waiting[token]
        while waiting and self._has_room(token, waiting[0].size):
            fetch = waiting.popleft()
            frame = self._answer(token, fetch)
            if frame is not None and frame.tracker is not None:
                self._unread.setdefault(token, deque()).append((frame.tracker, len(frame)))
        if not waiting:
            del self._waiting[token]

    def _has_room(self, token: int, size: int) -> bool:
        own = self._count(token)
        if own and own + size > CREDIT_BYTES:
            return False
        most = BUDGET_BYTES if own else LIMIT_BYTES
        if self.nbytes + size <= most:
            return True
        return sum(map(self._count, tuple(self._unread))) + size <= most

    def _count(self, token: int) -> int:
        """What the member has not read, looked at anew."""
        sent = self._unread.get(token, deque())
        while sent and sent[0][0].done:
            sent.popleft()
        if not sent:
            self._unread.pop(token, None)
        return sum(size for _, size in sent)
