"""The queue's process: sockets around `replay` and a store.

Requests are decided by the state machine, their changes saved, and only then answered. A request that has to wait is
parked: it is tried again after every change, and answered when it can be; until then each repetition by its client is
answered with what it waits for.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import trio
import zmq

from lachesis_configs.schema import Config
from lachesis_transport.decisions import Finished, NameTaken, NotJoined, ReplayError, Rules, Wait
from lachesis_transport.keys import load_keys
from lachesis_transport.messages import Group, MessageError, Scores, pack, take, unpack
from lachesis_transport.presence import Role
from lachesis_transport.replay import Replay
from lachesis_transport.sockets import Socket, open_socket, plain_errors
from lachesis_transport.store import MemoryStore, Store

log = logging.getLogger("lachesis.queue")

TICK_SECONDS = 0.25
STALL_SECONDS = 1.0
PARKED_SECONDS = 10.0
MAX_PARKED = 1 << 14
WRITE_SECONDS = 2.0
DRAINED_AT_ONCE = 64
MAX_REPORTS = 512
MAX_EVENT_CHARACTERS = 1 << 18
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LOGGED = {"joined", "parted", "dropped", "voided", "left", "forgotten", "returned", "finished", "trained"}

Reply = dict[str, Any]


@dataclass(slots=True)
class _Peer:
    role: Role
    name: str
    incarnation: str
    report_number: int = 0


@dataclass(slots=True)
class _Parked:
    peer: _Peer
    message: dict[str, Any]
    heard: float


class Broker:
    """Decides and answers requests; `serve_queue` runs it."""

    def __init__(self, config: Config, folder: Path, *, store: Store, socket: Socket, events: IO[str]) -> None:
        self.replay = Replay(
            Rules(
                batch_groups=config.queue.batch_groups,
                staleness_max=config.staleness.max,
                steps=config.run.steps,
                late=config.staleness.late,
                late_seconds=config.staleness.late_seconds,
                max_bytes=config.queue.max_bytes,
                heartbeat_seconds=config.queue.heartbeat_seconds,
            )
        )
        self._config, self._folder, self._store, self._socket, self._events = config, folder, store, socket, events
        self._peers: dict[bytes, _Peer] = {}
        self._parked: dict[tuple[bytes, int], _Parked] = {}
        self._outbox: list[tuple[bytes, Reply]] = []
        self._saving = trio.Lock()
        self._counts = {"frames_refused": 0, "reports_refused": 0, "replies_lost": 0}
        self._stalled = 0.0
        self._operations: dict[tuple[str, str], Callable[[_Peer, dict[str, Any], float], Reply]] = {
            ("actor", "ticket"): self._ticket,
            ("actor", "void"): self._void,
            ("actor", "put"): self._put,
            ("learner", "reserve"): self._reserve,
            ("learner", "published"): self._published,
            ("learner", "lease"): self._lease,
            ("learner", "trained"): self._trained,
            ("learner", "commit"): self._commit,
            ("learner", "finish"): self._finish,
        }

    @property
    def _now(self) -> float:
        return trio.current_time() - self._stalled

    # ------------------------------------------------------------------ the two loops

    async def receive(self) -> None:
        """Answer requests until cancelled; those that arrived together are saved together."""
        while True:
            frames: list[zmq.Frame] | None = await self._socket.receive()
            for _ in range(DRAINED_AT_ONCE):
                if frames is None:
                    break
                self._handle(frames)
                frames = self._socket.receive_nowait()
            await self._settle()

    async def tick(self) -> None:
        """Let time pass: expiry, late groups, statistics. Returns when the run has finished and every client left."""
        written = before = trio.current_time()
        while True:
            await trio.sleep(TICK_SECONDS)
            now = trio.current_time()
            if now - before > TICK_SECONDS + STALL_SECONDS:
                self._stalled += now - before  # this process stood still, its clients did not fall silent
            before = now
            self.replay.expire(self._now)
            self._peers = {route: peer for route, peer in self._peers.items() if self._is_live(peer)}
            await self._settle()
            if now - written >= WRITE_SECONDS:
                written = now
                self.write_statistics()
            if self.replay.final is not None and not self.replay.actors and self.replay.learner is None:
                return

    async def _settle(self) -> None:
        """Answer parked requests that can go on; save what changed; then send the answers."""
        self._retry()
        async with self._saving:
            outbox, self._outbox = self._outbox, []
            events = self.replay.drain()
            if events:
                await self._store.save(events)
            for event in events:
                self._write({"kind": event.kind, **event.fields}, "queue")
                if event.kind in LOGGED:
                    log.info("%s %s", event.kind, event.fields)
            self._events.flush()
            for route, reply in outbox:
                if not self._socket.send_nowait([route, pack(reply)]):
                    self._counts["replies_lost"] += 1  # the client asks again

    def _retry(self) -> None:
        refused: set[tuple[str, int]] = set()
        for key, parked in list(self._parked.items()):
            kind = (parked.message["op"], parked.message["version"])
            if self._now - parked.heard > PARKED_SECONDS or not self._is_live(parked.peer):
                del self._parked[key]
            elif kind not in refused:
                reply = self._decide(parked.peer, parked.message)
                if "wait" in reply:
                    refused.add(kind)  # what one ticket of this version waits for, all of them wait for
                else:
                    del self._parked[key]
                    self._outbox.append((key[0], {"id": key[1], **reply}))

    def _is_live(self, peer: _Peer) -> bool:
        known = self.replay.learner if peer.role == "learner" else self.replay.actors.get(peer.name)
        return known is not None and (known.name, known.incarnation) == (peer.name, peer.incarnation)

    # ------------------------------------------------------------------ requests

    def _handle(self, frames: list[zmq.Frame]) -> None:
        route, number = frames[0].bytes, None
        try:
            if len(frames) != 2:
                raise MessageError(f"message: {len(frames) - 1} frames, expected 1")
            message = unpack(frames[1].buffer)
            number = take(message, "id", int)
            reply = self._answer(route, take(message, "op", str), message)
        except MessageError as error:
            self._counts["frames_refused"] += 1
            reply = {"ok": False, "code": "malformed", "error": str(error)}
        if "wait" not in reply:
            self._parked.pop((route, number or 0), None)
        self._outbox.append((route, {"id": number, **reply}))

    def _answer(self, route: bytes, op: str, message: dict[str, Any]) -> Reply:
        if op == "status":
            return {"ok": True, "statistics": self.statistics()}
        if op == "hello":
            return self._hello(route, message)
        peer = self._peers.get(route)
        if peer is None or message.get("queue") != self._store.queue_id:
            return {"ok": False, "code": "hello", "error": "the queue does not know this client; expected a hello"}
        try:
            self.replay.heard(role=peer.role, name=peer.name, incarnation=peer.incarnation, now=self._now)
        except NotJoined as error:
            return {"ok": False, "code": "hello", "error": str(error)}
        reply = self._decide(peer, message)
        if "wait" in reply:
            if len(self._parked) >= MAX_PARKED:
                raise MessageError(f"op: {op!r}, but {MAX_PARKED} requests wait already")
            self._parked[route, message["id"]] = _Parked(peer, message, self._now)
        elif op == "goodbye" and reply["ok"]:
            del self._peers[route]
            self._parked = {key: parked for key, parked in self._parked.items() if key[0] != route}
        return reply

    def _decide(self, peer: _Peer, message: dict[str, Any]) -> Reply:
        op, now = message["op"], self._now
        try:
            if op in ("heartbeat", "goodbye"):
                return self._heartbeat(peer, message, now)
            operation = self._operations.get((peer.role, op))
            if operation is None:
                raise MessageError(f"op: {op!r}, expected one for role {peer.role!r}")
            return {"ok": True, **operation(peer, message, now)}
        except NotJoined as error:
            return {"ok": False, "code": "hello", "error": str(error)}
        except ReplayError as error:
            return {"ok": False, "code": "refused", "error": str(error)}

    def _hello(self, route: bytes, message: dict[str, Any]) -> Reply:
        role, name = take(message, "role", str), take(message, "name", str)
        if role != "actor" and role != "learner":
            raise MessageError(f"role: {role!r}, expected actor or learner")
        incarnation = take(message, "incarnation", str)
        for key, value in (("name", name), ("incarnation", incarnation)):
            if not NAME.fullmatch(value):
                raise MessageError(f"{key}: {value!r}, expected 1 to 64 letters, digits, '_', '.', '-'")
        try:
            self.replay.join(role=role, name=name, incarnation=incarnation, now=self._now)
        except NameTaken as error:
            seconds = self._config.queue.heartbeat_seconds
            return {"ok": False, "code": "name_taken", "error": str(error), "heartbeat_seconds": seconds}
        peer = _Peer(role, name, incarnation)
        for old in [r for r, p in self._peers.items() if (p.role, p.name) == (role, name)]:
            known = self._peers.pop(old)
            if known.incarnation == incarnation:
                peer.report_number = known.report_number
        self._peers[route] = peer
        return {
            "ok": True,
            "queue": self._store.queue_id,
            "run_name": self._config.run.name,
            "batch_groups": self._config.queue.batch_groups,
            "staleness_max": self._config.staleness.max,
            "steps": self._config.run.steps,
            "state": self.replay.state(),
        }

    def _heartbeat(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        version = take(message, "version", (int, type(None)))
        reports, number = take(message, "report", list), take(message, "report_number", int)
        self.replay.heard(role=peer.role, name=peer.name, incarnation=peer.incarnation, now=now, version=version)
        if number > peer.report_number:
            peer.report_number = number
            for report in reports[:MAX_REPORTS]:
                self._write(report, peer.name)
            self._counts["reports_refused"] += max(0, len(reports) - MAX_REPORTS)
        if message["op"] == "goodbye":
            self.replay.leave(role=peer.role, name=peer.name)
        return {"ok": True, "state": self.replay.state()}

    def _ticket(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        answer = self.replay.ticket(
            actor=peer.name,
            ask=take(message, "id", int),
            version=take(message, "version", int),
            environment=take(message, "environment", str),
            now=now,
        )
        if isinstance(answer, Wait):
            return {"wait": answer.why}
        if isinstance(answer, Finished):
            return {"finished": True}
        return {"ticket": answer.ticket, "deadline": answer.deadline, "version": answer.version}

    def _void(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        ticket, reason = take(message, "ticket", (int, type(None))), take(message, "reason", str)
        if ticket is None:
            self.replay.cancel(actor=peer.name, ask=take(message, "ask", int), now=now)
            self._parked = {
                key: parked
                for key, parked in self._parked.items()
                if parked.peer is not peer or parked.message["id"] != message["ask"]
            }
            return {}
        scores = take(message, "scores", (dict, type(None)))
        self.replay.void(
            actor=peer.name,
            ticket=ticket,
            reason=reason,
            scores=None if scores is None else Scores.from_wire(scores),
            now=now,
        )
        return {}

    def _put(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        try:
            group = Group.unpack(take(message, "group", bytes))
            final = take(message, "final", bool)
        except MessageError as error:
            self._counts["frames_refused"] += 1
            return {"status": "invalid", "reason": str(error)}
        result = self.replay.put(group, actor=peer.name, final=final, now=now)
        return {"status": result.status, "reason": result.reason, "retry_after": result.retry_after}

    def _reserve(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        parent = take(message, "parent", (int, type(None)))
        return {"version": self.replay.reserve(parent=parent, key=f"{peer.incarnation}:{take(message, 'id', int)}")}

    def _published(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        self.replay.published(take(message, "version", int))
        return {}

    def _lease(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        batch = self.replay.lease(version=take(message, "version", int), now=now)
        if isinstance(batch, Wait):
            return {"wait": batch.why}
        return {"batch": batch.to_wire(), "checkpoint_wanted": self.replay.checkpoint_wanted}

    def _trained(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        self.replay.trained(version=take(message, "version", int))
        return {}

    def _commit(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        self.replay.commit(version=take(message, "version", int), checkpoint=take(message, "checkpoint", str))
        return {}

    def _finish(self, peer: _Peer, message: dict[str, Any], now: float) -> Reply:
        self.replay.finish(version=take(message, "version", int))
        return {}

    # ------------------------------------------------------------------ files

    def statistics(self) -> dict[str, Any]:
        """The state machine's counts with those of the sockets."""
        return {**self.replay.statistics(), **self._counts}

    def write_statistics(self) -> None:
        """Replace queue.json in the run folder."""
        new = self._folder / "queue.json.new"
        new.write_text(json.dumps(self.statistics(), indent=1) + "\n")
        new.replace(self._folder / "queue.json")

    def _write(self, event: Any, source: str) -> None:
        try:
            if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
                raise ValueError("an event is a map with a kind")
            line = json.dumps({**event, "time": time.time(), "source": source}, allow_nan=False)
            if len(line) > MAX_EVENT_CHARACTERS:
                raise ValueError(f"{len(line)} characters, expected at most {MAX_EVENT_CHARACTERS}")
        except (TypeError, ValueError, RecursionError) as error:
            self._counts["reports_refused"] += 1
            log.warning("a report of %s is refused: %s", source, error)
            return
        self._events.write(line + "\n")


async def serve_queue(
    config: Config, folder: Path, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the replay queue at `config.queue.address` until the run has finished and every client left, or cancelled.

    `task_status.started` gets the address, with the real port where the configured one is 0. Writes events.jsonl (one
    line an event: time, source, kind and fields) and queue.json (statistics) into `folder`.
    Raises OSError when the address is taken and ConfigError when a file of run.keys is missing or malformed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = MemoryStore()
    with plain_errors(), ExitStack() as files:
        events = files.enter_context(open(folder / "events.jsonl", "a", encoding="utf-8"))
        async with open_socket(zmq.ROUTER, bind=config.queue.address, keys=load_keys(config)) as socket:
            broker = Broker(config, folder, store=store, socket=socket, events=events)
            log.info("the replay queue serves at %s", socket.address)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(broker.receive)
                    task_status.started(socket.address)
                    await broker.tick()
                    nursery.cancel_scope.cancel()
            finally:
                broker.write_statistics()
                with trio.CancelScope(shield=True):
                    await store.close()
