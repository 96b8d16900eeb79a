"""The queue's process: sockets around `replay` and a store.

Requests are decided by the state machine, their changes saved, and only then answered. Deciding goes on while the disk
works: what was decided meanwhile is the next commit. A request that has to wait is parked: it is tried again after
every change, and answered when it can be; until then each repetition by its client is answered with what it waits for.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
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
from lachesis_transport.queue_files import DATABASE, EVENTS, STATISTICS
from lachesis_transport.records import Lease
from lachesis_transport.replay import Replay
from lachesis_transport.requests import Peer, Reply, Requests
from lachesis_transport.sockets import Socket, open_socket, plain_errors
from lachesis_transport.sqlite_store import SqliteStore
from lachesis_transport.store import QUARANTINED_BYTES, Refused, Store, StoreError

log = logging.getLogger("lachesis.queue")

TICK_SECONDS = 0.25
STALL_SECONDS = 1.0
PARKED_SECONDS = 10.0
PARKED_A_CLIENT = 4096
"""Requests of one client that wait at once; further ones are told to ask again."""
MAX_UNSAVED = 256
"""Answers that may wait for the disk before no more requests are read."""
WRITE_SECONDS = 2.0
DRAINED_AT_ONCE = 64
REPLIES_HELD = 4096
"""Answers that wait for one client to read them; further ones are lost, and it asks again."""


@dataclass(slots=True)
class _Parked:
    route: bytes
    number: int
    peer: Peer
    message: dict[str, Any]
    since: float
    """When it came first."""
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
        self._parked: dict[bytes, dict[int, _Parked]] = {}
        self._outbox: list[tuple[bytes, Reply]] = []
        self._unsaved = trio.Event()
        self._saved = trio.Event()
        self._stalled = 0.0
        self._sent: tuple[bytes, int] | None = None
        """Connection and number of the request that was last answered with a batch: a repetition of it gets no copy."""
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
        self.failed = True
        self._store.check()
        if writing:
            await self._store.save(writing)
        self.failed = False
        for event in writing.events:
            if event.is_logged:
                log.info("%s", event)
        for route, reply in outbox:
            lease = reply.pop("lease", None)
            if lease is not None:
                if self._sent == (route, reply["id"]):
                    continue  # on its way; a connection loses nothing, and the next one has another name
                batch = await self._batch(lease)
                if batch is None:
                    continue  # the client asks again
                reply["batch"] = batch
            if not self._socket.send_nowait([route, pack(reply)]):
                self.replay.count("replies_lost")  # the client asks again
            elif lease is not None:
                self._sent = route, reply["id"]

    async def _batch(self, lease: Lease) -> dict[str, Any] | None:
        """The batch for the wire; None when it was taken back meanwhile."""
        try:
            contents = await self._store.read(lease.names)
        except KeyError:
            return None
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
        asks: dict[tuple[str, str, int], list[_Parked]] = {}
        for route, waiting in list(self._parked.items()):
            for parked in list(waiting.values()):
                if self._now - parked.heard > PARKED_SECONDS or not self._is_live(parked.peer):
                    self._forget(route, parked.number)
                elif parked.message["op"] == "ticket":
                    kind = parked.peer.name, parked.message["environment"], parked.message["version"]
                    asks.setdefault(kind, []).append(parked)
                else:
                    self._try(parked)
        self._grant_tickets(asks)
        self._unsaved.set()

    def _grant_tickets(self, asks: dict[tuple[str, str, int], list[_Parked]]) -> None:
        """Try the requests for tickets (actor, environment, version -> oldest first), whose turn it is first."""
        self._requests.begin_round(Counter(parked.peer.name for waiting in asks.values() for parked in waiting))
        turns = [(self.replay.turn(*kind[:2]), asks[kind][0].since, kind) for kind in asks]
        heapify(turns)
        refused: dict[int, str] = {}
        while turns:
            turn, _, kind = turns[0]
            now = self.replay.turn(*kind[:2])
            if now > turn:  # a grant since then moved it back
                heapreplace(turns, (now, asks[kind][0].since, kind))
                continue
            waiting, version = asks[kind], kind[2]
            if version not in refused:
                why = self._try(waiting[0])
                if why is None:
                    waiting.pop(0)
                else:
                    refused[version] = why
            if version in refused:  # what one ticket of this version waits for, all of them wait for
                for parked in waiting:
                    self._tell(parked, refused[version])
                waiting.clear()
            if not waiting:
                heappop(turns)

    def _try(self, parked: _Parked) -> str | None:
        """Answer a parked request if it can go on; else what it waits for."""
        try:
            reply = self._requests.decide(parked.peer, parked.message, self._now)
        except MessageError as error:
            reply = {"ok": False, "code": "malformed", "error": str(error)}
        if "wait" in reply:
            self._tell(parked, reply["wait"])
            return str(reply["wait"])
        self._forget(parked.route, parked.number)
        self._outbox.append((parked.route, {"id": parked.number, **reply}))
        return None

    def _tell(self, parked: _Parked, why: str) -> None:
        if not parked.told:
            parked.told = True
            self._outbox.append((parked.route, {"id": parked.number, "ok": True, "wait": why}))

    def _forget(self, route: bytes, number: int) -> None:
        waiting = self._parked.get(route, {})
        waiting.pop(number, None)
        if not waiting:
            self._parked.pop(route, None)

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
            self._forget(route, number or 0)
            self._outbox.append((route, {"id": number, **reply}))

    def _quarantine(self, route: bytes, reason: str, frame: bytes) -> None:
        peer = self._peers.get(route)
        sender = f"{peer.role} {peer.name}" if peer is not None else "a client that did not say hello"
        self.replay.quarantine(Refused(sender, reason, frame, time.time()))

    def _answer(self, route: bytes, op: str, message: dict[str, Any]) -> Reply | None:
        """None when the request is parked, or needs no answer."""
        if op == "status":
            return {"ok": True, "statistics": self.replay.statistics()}
        if op == "inspect":
            return {
                "ok": True,
                "run_name": self._config.run.name,
                "queue": self._store.queue_id,
                "inspection": inspect(self.replay, self._store.quarantine(), now=self._now),
            }
        if op == "alive":
            self._requests.alive(message, self._now)
            return None
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
        parked = self._requests.parked(peer, message)
        if parked is not None:
            number, waiting = parked["id"], self._parked.get(route, {})
            if number not in waiting and len(waiting) >= PARKED_A_CLIENT:
                # It asks again, when some of them may have been answered.
                return {"ok": True, "wait": f"{PARKED_A_CLIENT} requests of {peer.role} {peer.name} wait already"}
            since = waiting[number].since if number in waiting else self._now
            self._parked.setdefault(route, {})[number] = _Parked(route, number, peer, parked, since, self._now)
            return None
        reply = self._requests.decide(peer, message, self._now)
        if op == "void" and message["ticket"] is None and reply["ok"]:
            self._forget(route, message["ask"])
        if op == "goodbye" and reply["ok"]:
            del self._peers[route]
            self._parked.pop(route, None)
        return reply

    def write_statistics(self) -> None:
        """Replace queue.json in the run folder; raises StoreError when it cannot be written."""
        path = self._folder / STATISTICS
        try:
            new = path.with_name(f"{STATISTICS}.new")
            new.write_text(json.dumps(self.replay.statistics(), indent=1) + "\n")
            new.replace(path)
        except OSError as error:
            raise StoreError(f"{path}: writing failed: {error}") from error


async def serve_queue(
    config: Config,
    folder: Path,
    *,
    opened: Callable[[], object] = lambda: None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the replay queue at `config.queue.address` until the run has finished and every client left, or cancelled.

    Its state is `folder`/queue.db; a queue that is started there again continues. `opened` is called once no other
    queue can have it open. `task_status.started` gets the address, with the real port where the configured one is 0.
    Writes events.jsonl (one line an event: number, time, source, kind and fields) and queue.json (statistics) into
    `folder`.
    Raises OSError when the address is taken, StoreError when the database is in use, damaged or full, and ConfigError
    when a file of run.keys is missing or malformed or queue.metrics_address is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with plain_errors():
        async with open_socket(
            zmq.ROUTER,
            bind=config.queue.address,
            send_high_water=REPLIES_HELD,
            keys=load_keys(config),
            field="queue.address",
        ) as socket:
            store = SqliteStore(folder / DATABASE, EventLog(folder / EVENTS))
            try:
                opened()
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
                    if not broker.failed:
                        with trio.CancelScope(shield=True):
                            await broker.flush()
                        broker.write_statistics()
            finally:
                with trio.CancelScope(shield=True):
                    await store.close()
