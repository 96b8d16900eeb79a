"""The queue's process: sockets around `replay` and a store.

Requests are decided by the state machine, their changes saved, and only then answered. Deciding goes on while the disk
works: what was decided meanwhile is the next commit. A request that has to wait is parked: it is tried again after
every change, and answered when it can be; until then each repetition by its client is answered with what it waits for.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
import zmq

from lachesis_configs.schema import Config
from lachesis_transport.decisions import NotJoined, Rules
from lachesis_transport.event_log import EventLog
from lachesis_transport.inspection import inspect
from lachesis_transport.keys import load_keys
from lachesis_transport.messages import Group, MessageError, batch_wire, pack, take, unpack
from lachesis_transport.metrics import QueueMetrics, serve_metrics
from lachesis_transport.records import Lease
from lachesis_transport.replay import Replay
from lachesis_transport.requests import Peer, Reply, Requests
from lachesis_transport.sockets import Socket, open_socket, plain_errors
from lachesis_transport.sqlite_store import SqliteStore
from lachesis_transport.store import QUARANTINED_BYTES, Refused, Store

log = logging.getLogger("lachesis.queue")

DATABASE = "queue.db"
EVENTS = "events.jsonl"
STATISTICS = "queue.json"

TICK_SECONDS = 0.25
STALL_SECONDS = 1.0
PARKED_SECONDS = 10.0
MAX_PARKED = 1 << 14
MAX_UNSAVED = 256
"""Answers that may wait for the disk before no more requests are read."""
WRITE_SECONDS = 2.0
DRAINED_AT_ONCE = 64
REPLIES_HELD = 4096
"""Answers that wait for one client to read them; further ones are lost, and it asks again."""
BATCH_SECONDS = 1.0
"""A batch is not sent again sooner: copies of it would pile up before a learner that does not read."""
LOGGED = {
    "joined",
    "parted",
    "dropped",
    "voided",
    "left",
    "returned",
    "finished",
    "trained",
    "committed",
    "skipped",
    "reopened",
}


@dataclass(slots=True)
class _Parked:
    peer: Peer
    message: dict[str, Any]
    heard: float
    told: bool = False
    """Whether this repetition of it was answered with what it waits for."""


def rules(config: Config) -> Rules:
    """The rules that a configuration gives the queue."""
    return Rules(
        batch_groups=config.queue.batch_groups,
        staleness_max=config.staleness.max,
        steps=config.run.steps,
        late=config.staleness.late,
        late_seconds=config.staleness.late_seconds,
        reuse=config.staleness.reuse,
        order=config.staleness.order,
        max_bytes=config.queue.max_bytes,
        max_uncommitted_bytes=config.queue.max_uncommitted_bytes,
        heartbeat_seconds=config.queue.heartbeat_seconds,
        seed=config.run.seed,
        weights={environment.name: environment.weight for environment in config.environments},
    )


class Broker:
    """Decides and answers requests; `serve_queue` runs it."""

    def __init__(self, config: Config, folder: Path, *, store: Store, socket: Socket) -> None:
        self.replay = Replay.restore(rules(config), store.load(), now=trio.current_time())
        self._config, self._folder, self._store, self._socket = config, folder, store, socket
        self._peers: dict[bytes, Peer] = {}
        self._parked: dict[tuple[bytes, int], _Parked] = {}
        self._outbox: list[tuple[bytes, Reply]] = []
        self._unsaved = trio.Event()
        self._saved = trio.Event()
        self._stalled = 0.0
        self._sent = (-1, 0.0)
        self.failed = False
        """Whether the last save was not finished."""
        self.metrics = QueueMetrics.of(config, store.queue_id)
        self._requests = Requests(self.replay, config, queue_id=store.queue_id)

    @property
    def _now(self) -> float:
        return trio.current_time() - self._stalled

    # ------------------------------------------------------------------ the three loops

    async def receive(self) -> None:
        """Decide requests until cancelled; those that arrived together are saved together."""
        while True:
            self._handle(await self._socket.receive())
            for _ in range(DRAINED_AT_ONCE):
                frames = self._socket.receive_nowait()
                if frames is None:
                    break
                self._handle(frames)
            self._go_on()
            while len(self._outbox) > MAX_UNSAVED:
                self._saved = trio.Event()
                await self._saved.wait()

    async def save(self) -> None:
        """Save what was decided and then send the answers, until cancelled."""
        while True:
            await self._unsaved.wait()
            self._unsaved = trio.Event()
            await self.flush()
            self._saved.set()

    async def flush(self) -> None:
        """Save what was decided, then send the answers. One task at a time."""
        outbox, self._outbox = self._outbox, []
        writing = self.replay.drain()
        if writing:
            self.failed = True
            await self._store.save(writing)
            self.failed = False
        for event in writing.events:
            if event.kind in LOGGED:
                log.info("%s %s", event.kind, " ".join(f"{key}={value}" for key, value in event.fields.items()))
        for route, reply in outbox:
            if "lease" in reply:
                batch = await self._batch(reply.pop("lease"))
                if batch is None:
                    continue  # the client asks again
                reply["batch"] = batch
            if not self._socket.send_nowait([route, pack(reply)]):
                self.replay.count("replies_lost")  # the client asks again

    async def _batch(self, lease: Lease) -> dict[str, Any] | None:
        """The batch for the wire; None when it was sent just before, or taken back meanwhile."""
        version, sent = self._sent
        if version == lease.version and trio.current_time() - sent < BATCH_SECONDS:
            return None
        try:
            contents = await self._store.read(lease.names)
        except KeyError:
            return None
        self._sent = lease.version, trio.current_time()
        if lease.masked:
            for i, content in enumerate(contents):
                group = Group.unpack(content).without(lease.masked)
                assert group is not None  # a group with nothing to train is never leased
                contents[i] = group.pack()
        return batch_wire(
            version=lease.version,
            groups=contents,
            distances=lease.distances,
            scores=lease.scores,
            dropped=lease.dropped,
        )

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
            self._go_on()
            if self.metrics is not None:
                self.metrics.observe(self.replay, now=self._now)
            if now - written >= WRITE_SECONDS:
                written = now
                self.write_statistics()
            if self.replay.final is not None and not self.replay.actors and self.replay.learner is None:
                return

    def _go_on(self) -> None:
        """Answer parked requests that can go on, and have everything saved."""
        for key, parked in list(self._parked.items()):
            if self._now - parked.heard > PARKED_SECONDS or not self._is_live(parked.peer):
                del self._parked[key]
            elif parked.message["op"] != "ticket":
                self._try(key, parked)
        self._grant_tickets()
        self._unsaved.set()

    def _grant_tickets(self) -> None:
        """Try the parked requests for tickets, whose turn it is first."""
        asks: dict[tuple[str, str, Any], list[tuple[bytes, int]]] = {}
        for key, parked in self._parked.items():
            if parked.message["op"] == "ticket":
                message = parked.message
                asks.setdefault((parked.peer.name, message["environment"], message["version"]), []).append(key)
        refused: dict[Any, str] = {}
        self._requests.begin_round(parked.peer.name for parked in self._parked.values())
        for keys in asks.values():
            keys.reverse()
        while asks:
            kind = min(asks, key=lambda kind: self.replay.turn(kind[0], kind[1]))
            keys, version = asks[kind], kind[2]
            if version in refused:  # what one ticket of this version waits for, all of them wait for
                for key in reversed(keys):
                    self._tell(key, self._parked[key], refused[version])
                del asks[kind]
                continue
            key = keys.pop()
            why = self._try(key, self._parked[key])
            if why is not None:
                refused[version] = why
            if not keys:
                del asks[kind]

    def _try(self, key: tuple[bytes, int], parked: _Parked) -> str | None:
        """Answer a parked request if it can go on; else what it waits for."""
        try:
            reply = self._requests.decide(parked.peer, parked.message, self._now)
        except MessageError as error:
            reply = {"ok": False, "code": "malformed", "error": str(error)}
        if "wait" in reply:
            self._tell(key, parked, reply["wait"])
            return str(reply["wait"])
        del self._parked[key]
        self._outbox.append((key[0], {"id": key[1], **reply}))
        return None

    def _tell(self, key: tuple[bytes, int], parked: _Parked, why: str) -> None:
        if not parked.told:
            parked.told = True
            self._outbox.append((key[0], {"id": key[1], "ok": True, "wait": why}))

    def _is_live(self, peer: Peer) -> bool:
        return self.replay.is_live(peer.role, peer.name, peer.incarnation)

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
            self.replay.count("frames_refused")
            self._quarantine(route, str(error), bytes(frames[-1].buffer[:QUARANTINED_BYTES]))
            reply = {"ok": False, "code": "malformed", "error": str(error)}
        if reply is not None:
            self._parked.pop((route, number or 0), None)
            self._outbox.append((route, {"id": number, **reply}))

    def _quarantine(self, route: bytes, reason: str, frame: bytes) -> None:
        peer = self._peers.get(route)
        sender = f"{peer.role} {peer.name}" if peer is not None else "a client that did not say hello"
        self.replay.quarantine(Refused(sender, reason, frame, time.time()))

    def _answer(self, route: bytes, op: str, message: dict[str, Any]) -> Reply | None:
        """None when the request is parked."""
        if op == "status":
            return {"ok": True, "statistics": self.replay.statistics()}
        if op == "inspect":
            return {
                "ok": True,
                "run_name": self._config.run.name,
                "queue": self._store.queue_id,
                "inspection": inspect(self.replay, self._store.quarantine(), now=self._now),
            }
        if op == "hello":
            peer, reply = self._requests.hello(message, self._now)
            if peer is not None:
                for old in [r for r, p in self._peers.items() if (p.role, p.name) == (peer.role, peer.name)]:
                    del self._peers[old]
                self._peers[route] = peer
            return reply
        peer = self._peers.get(route)
        if peer is None or message.get("queue") != self._store.queue_id:
            return {"ok": False, "code": "hello", "error": "the queue does not know this client; expected a hello"}
        try:
            self.replay.heard(role=peer.role, name=peer.name, incarnation=peer.incarnation, now=self._now)
        except NotJoined as error:
            return {"ok": False, "code": "hello", "error": str(error)}
        if self._requests.may_wait(peer, message):
            if len(self._parked) >= MAX_PARKED and (route, message["id"]) not in self._parked:
                raise MessageError(f"op: {op!r}, but {MAX_PARKED} requests wait already")
            self._parked[route, message["id"]] = _Parked(peer, message, self._now)
            return None
        reply = self._requests.decide(peer, message, self._now)
        if op == "void" and message["ticket"] is None and reply["ok"]:
            self._parked.pop((route, message["ask"]), None)
        if op == "goodbye" and reply["ok"]:
            del self._peers[route]
            self._parked = {key: parked for key, parked in self._parked.items() if key[0] != route}
        return reply

    def write_statistics(self) -> None:
        """Replace queue.json in the run folder."""
        new = self._folder / f"{STATISTICS}.new"
        new.write_text(json.dumps(self.replay.statistics(), indent=1) + "\n")
        new.replace(self._folder / STATISTICS)


async def serve_queue(
    config: Config, folder: Path, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the replay queue at `config.queue.address` until the run has finished and every client left, or cancelled.

    Its state is `folder`/queue.db; a queue that is started there again continues. `task_status.started` gets the
    address, with the real port where the configured one is 0. Writes events.jsonl (one line an event: number, time,
    source, kind and fields) and queue.json (statistics) into `folder`.
    Raises OSError when the address is taken, StoreError when the database is in use, damaged or full, and ConfigError
    when a file of run.keys is missing or malformed or queue.metrics_address is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with plain_errors():
        async with open_socket(
            zmq.ROUTER, bind=config.queue.address, send_high_water=REPLIES_HELD, keys=load_keys(config)
        ) as socket:
            store = SqliteStore(folder / DATABASE, EventLog(folder / EVENTS))
            try:
                broker = Broker(config, folder, store=store, socket=socket)
                log.info("the replay queue serves at %s", socket.address)
                try:
                    with serve_metrics(broker.metrics):
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(broker.receive)
                            nursery.start_soon(broker.save)
                            task_status.started(socket.address)
                            await broker.tick()
                            nursery.cancel_scope.cancel()
                finally:
                    broker.write_statistics()
                    if not broker.failed:
                        with trio.CancelScope(shield=True):
                            await broker.flush()
            finally:
                with trio.CancelScope(shield=True):
                    await store.close()
