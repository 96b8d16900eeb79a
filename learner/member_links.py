"""The publisher's links to its members: what actors say and are told, and the bytes that they fetch (docs/weights.md).

links = MemberLinks(layout=layout, log=log, membership=membership, deadline_seconds=30.0, on_change=..., ...)
async with open_socket(zmq.ROUTER, bind=address) as socket:
    await links.serve(socket)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import trio
import zmq

from lachesis_learner.fetches import MAX_CHUNK_BYTES, MAX_MEMBERS, Fetch, Fetches
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.rare_log import RareLog
from lachesis_transport.sockets import Socket
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.membership import Membership
from lachesis_transport.weights.version_log import VersionLog

logger = logging.getLogger("lachesis.publisher")

MAX_WORKERS = 128
"""Of one actor: each is a rank that a group makes room for."""
MAX_COMINGS = 64
"""Members that are named in the log when they come, or go, in a minute."""
TICK_SECONDS = 1.0
HELLO: dict[str, type] = {"actor": str, "workers": int, "nonce": str, "channel": str}
CHANNELS = ("auto", "stream")


class MemberLinks:
    """Every member's link, over one ROUTER socket.

    Args:
        layout: of the model; an actor with another one is refused.
        log: what is published.
        membership: who takes part; changed by what actors say.
        deadline_seconds: told to members as the silence that they may expect (weights.deadline_seconds).
        on_change: called when somebody staged a version, left or was removed.
        on_release: called when somebody may have stopped reading the log.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        log: VersionLog,
        membership: Membership,
        deadline_seconds: float,
        on_change: Callable[[], None],
        on_release: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._log = log
        self._membership = membership
        self._deadline_seconds = deadline_seconds
        self._on_change = on_change
        self._on_release = on_release
        self._socket: Socket | None = None
        self._peers: dict[int, bytes] = {}
        self._hosts: dict[int, str] = {}
        self._finished = False
        self._fetches = Fetches(self._send_chunk)
        self._refusals = RareLog(logger)
        self._comings, self._goings = (RareLog(logger, lines=MAX_COMINGS) for _ in range(2))

    @property
    def refused(self) -> int:
        """Messages that were refused so far."""
        return self._refusals.count

    async def serve(self, socket: Socket) -> None:
        """Answer until cancelled."""
        self._socket = socket
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence)
            nursery.start_soon(self._fetches.serve)
            while True:
                self._handle(await socket.receive())

    def announce(self, invitations: Mapping[int, dict[str, Any]]) -> None:
        """Tell everybody of the newest version, and some, by token, of the collective that brings it."""
        for token in tuple(self._peers):
            message: dict[str, Any] = {"op": "news", **self._news()}
            if token in invitations:
                message["collective"] = invitations[token]
            self._tell(token, message)

    def finish(self) -> None:
        """Tell everybody, now and whenever they ask, that no more versions come."""
        self._finished = True
        self.announce({})

    def hosts(self, tokens: Collection[int]) -> list[str]:
        """The addresses that these members connect from."""
        return [host for token, host in self._hosts.items() if token in tokens]

    def forget_removed(self) -> None:
        """Drop what belonged to memberships that ended."""
        known = {member.token for member in self._membership.members}
        for token in set(self._peers) - known:
            del self._peers[token]
            self._hosts.pop(token, None)
            self._fetches.forget(token)
            self._log.release(str(token))

    def _news(self) -> dict[str, Any]:
        newest = self._log.newest
        assert newest is not None
        return {
            "version": newest.version,
            "checksum": newest.checksum,
            "shards": newest.shards,
            "finished": self._finished,
        }

    def _tell(self, token: int, message: dict[str, Any]) -> None:
        reached = self._reply(self._peers[token], message)
        self._membership.reach(token, reached=reached, now=trio.current_time())

    def _reply(self, peer: bytes, message: dict[str, Any], frame: zmq.Frame | None = None) -> bool:
        """Hand a message to a peer's bounded queue. One that is gone or does not read hears of it again: it asks."""
        assert self._socket is not None
        frames: list[Any] = [peer, pack(message)]
        if frame is not None:
            frames.append(frame)
        return self._socket.send_nowait(frames)

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            if len(frames) != 2:
                raise MessageError(f"frames: {len(frames) - 1}, expected 1")
            message = unpack(frames[1].buffer)
            op = take(message, "op", str)
            if op == "hello":
                self._welcome(peer, message, host=str(frames[1].get("Peer-Address")))
                return
            token = take(message, "token", int)
            if not self._membership.hear(token, now=trio.current_time()):
                self._reply(peer, {"op": "fenced"})
                return
            self._peers[token] = peer
            answers = {
                "alive": self._alive,
                "staged": self._staged,
                "plan": self._plan,
                "fetch": self._fetch,
                "bye": self._bye,
            }
            if op not in answers:
                raise MessageError(f"op: {op!r}, expected hello, {', '.join(answers)}")
            answers[op](token, message)
        except MessageError as error:
            self._refusals.warning("refused a message: %s", error)
            self._reply(peer, {"op": "refused", "error": str(error)})

    def _welcome(self, peer: bytes, message: dict[str, Any], *, host: str) -> None:
        actor, workers, nonce, channel = (take(message, key, kind) for key, kind in HELLO.items())
        theirs = Layout.from_wire(message.get("layout"))
        if difference := self._layout.difference(theirs):
            raise MessageError(f"layout: the actor serves another model than the learner trains: {difference}")
        if not 1 <= workers <= MAX_WORKERS:
            raise MessageError(f"workers: {workers}, expected 1 to {MAX_WORKERS}")
        if channel not in CHANNELS:
            raise MessageError(f"channel: {channel!r}, expected {' or '.join(CHANNELS)}")
        if self._membership.newest is None:
            # What another learner published last may be of a branch that this one goes back on.
            self._reply(peer, {"op": "waiting"})
            return
        others = [member for member in self._membership.members if member.actor != actor]
        if len(others) >= MAX_MEMBERS:
            raise MessageError(f"members: {len(others)} already, expected at most {MAX_MEMBERS}")
        member = self._membership.join(
            actor, nonce=nonce, workers=workers, collective=channel == "auto", now=trio.current_time()
        )
        self.forget_removed()
        self._on_change()  # a publication may have waited for its older membership
        if member.token not in self._peers:
            self._comings.info("%s joined", actor)
        self._peers[member.token], self._hosts[member.token] = peer, host
        self._reply(peer, {"op": "welcome", "token": member.token, "seconds": self._deadline_seconds, **self._news()})

    def _alive(self, token: int, _: dict[str, Any]) -> None:
        self._tell(token, {"op": "news", **self._news()})

    def _staged(self, token: int, message: dict[str, Any]) -> None:
        version, checksum = take(message, "version", int), take(message, "checksum", str)
        newest = self._log.newest
        if newest is None or version > newest.version:
            raise MessageError(f"version: {version}, expected at most {newest and newest.version}, the newest")
        if version == newest.version and checksum != newest.checksum:
            raise MessageError(f"checksum: {checksum} of version {version}, expected {newest.checksum}")
        self._membership.stage(token, version, now=trio.current_time())
        self._log.release(str(token))
        self._on_release()
        self._on_change()

    def _plan(self, token: int, message: dict[str, Any]) -> None:
        number, checksum = take(message, "id", int), take(message, "checksum", str)
        plan = self._log.plan(str(token), checksum=checksum, now=trio.current_time())
        steps = None if plan is None else [step.to_wire() for step in plan.steps]
        self._tell(token, {"op": "plan", "id": number, "held": plan and plan.held, "steps": steps})

    def _fetch(self, token: int, message: dict[str, Any]) -> None:
        number, version = take(message, "id", int), take(message, "version", int)
        offset, size = take(message, "offset", int), take(message, "size", int)
        if offset < 0 or not 0 < size <= MAX_CHUNK_BYTES:
            raise MessageError(f"size: {size} at {offset}, expected 1 to {MAX_CHUNK_BYTES}")
        anchor = take(message, "anchor", bool)
        self._fetches.ask(token, Fetch(number=number, version=version, anchor=anchor, offset=offset, size=size))

    def _send_chunk(self, token: int, fetch: Fetch) -> zmq.Frame | None:
        piece = self._log.read(
            str(token),
            version=fetch.version,
            anchor=fetch.anchor,
            offset=fetch.offset,
            size=fetch.size,
            now=trio.current_time(),
        )
        frame = zmq.Frame(b"" if piece is None else piece, track=True, copy=False)
        answer = {"op": "chunk", "id": fetch.number, "offset": fetch.offset, "gone": piece is None}
        return frame if self._reply(self._peers[token], answer, frame) else None

    def _bye(self, token: int, _: dict[str, Any]) -> None:
        self._membership.remove(token, "left")
        self.forget_removed()
        self._on_change()

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            for token in tuple(self._peers) if self._membership.newest is not None else ():
                if self._membership.quiet(token, seconds=2 * TICK_SECONDS, now=trio.current_time()):
                    self._tell(token, {"op": "news", **self._news()})
            for actor, reason in self._membership.silent(now=trio.current_time()).items():
                self._goings.warning("%s is no member any more: %s", actor, reason)
                self._on_change()
            self.forget_removed()
            self._on_release()
