"""Publication of new policies: what every learner rank encodes, and what rank 0 sends to the actors.

Every rank owns a `ShardEncoder`; rank 0 also owns the `Publisher`, which lives in its trio thread:

    encoder = ShardEncoder(shards, rank=rank, ranks=ranks)          # on every rank
    wire = encoder.encode(anchor=True).to_wire()                    # first publication: everything
    blobs = gather_to_rank_0(wire)                                  # one `bytes` a rank, in rank order

    publisher = Publisher(address=..., layout=encoder.layout, channel="collective", deadline_seconds=30.0)
    async with trio.open_nursery() as nursery:                      # rank 0
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=blobs)
        await publisher.publish(version=1, parent=0, blobs=blobs_of_the_next_encode)
        await publisher.finish()
        nursery.cancel_scope.cancel()

The messages are those of docs/weights.md.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import trio
import zmq

from lachesis_learner.shards import NonFiniteWeights, Shard, ShardBlob, ShardEncoder
from lachesis_transport.keys import Keys
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.sockets import Socket, check_loopback, open_socket
from lachesis_transport.weights.checksum import combine
from lachesis_transport.weights.collective import CollectiveFailed, Group, GroupSpec, open_store
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.membership import Composition, Membership, Round
from lachesis_transport.weights.version_log import Entry, Kept, VersionLog, entry_of

__all__ = ["NonFiniteWeights", "PublishReport", "Publisher", "Shard", "ShardBlob", "ShardEncoder"]

log = logging.getLogger("lachesis.publisher")

MAX_CHUNK_BYTES = 4 << 20
TICK_SECONDS = 1.0
HELLO: dict[str, type] = {"actor": str, "workers": int, "nonce": str, "channel": str}
CHANNELS = ("auto", "stream")
COLLECTIVE_SHARE = 0.5
"""Part of the deadline that a collective may use; the rest is for members to stream what it did not bring them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication cost."""

    version: int
    checksum: str
    """xxh3-128 of the weights at this version, 32 hex digits."""
    bytes: int
    """Bytes that one member receives."""
    full_bytes: int
    """Bytes of the full bf16 weights."""
    changed: int
    """Elements that changed, over all ranks."""
    total: int
    """Elements of the model."""
    seconds: float
    """From the call of `publish` until the last healthy member staged the version or the deadline passed."""
    members: tuple[str, ...]
    """Actors that staged this version."""
    removed: dict[str, str]
    """Actors that were removed during this publication, and why."""
    channel: str
    """`collective` (also when some members asked for the stream), `stream`, `collective+stream` (a collective broke and
    the healthy members streamed) or `none`."""


class Publisher:
    """Rank 0's side of publication: membership, announcements, the channels and the newest weights for joiners.

    Args:
        address: tcp://127.0.0.1:PORT of the control socket (weights.address); port 0 takes a free one.
        layout: of the whole model (ShardEncoder.layout).
        channel: how members get deltas (weights.channel).
        deadline_seconds: what a dead or hanging member costs at most, once (weights.deadline_seconds).
        device: where collective tensors live: cpu (gloo) or cuda (nccl).
        keys: of this node (run.keys), for an address off loopback.
        files: where the versions are kept on disk; None: nowhere.
        kept: what `files` held, to go on from: the first publication may be a delta to its newest version.

    Raises ValueError for an address off loopback without keys.
    """

    def __init__(
        self,
        *,
        address: str,
        layout: Layout,
        channel: Literal["collective", "stream"],
        deadline_seconds: float,
        device: str = "cpu",
        keys: Keys | None = None,
        files: LogFiles | None = None,
        kept: Kept | None = None,
    ) -> None:
        if keys is None:
            check_loopback(address)
        self._keys = keys
        self._address = address
        self._layout = layout
        self._channel = channel
        self._deadline_seconds = deadline_seconds
        self._backend = "gloo" if device == "cpu" else "nccl"
        self._log = VersionLog(layout, lease_seconds=deadline_seconds, kept=kept)
        self._files = files
        self._mirror_in_use = trio.Lock()
        self._membership = Membership(deadline_seconds=deadline_seconds, first=secrets.randbits(60))
        self._peers: dict[int, bytes] = {}
        self._finished = False
        self._changed = trio.Event()
        self._fold_soon = trio.Event()
        self._write_soon = trio.Event()
        self._socket: Socket | None = None
        self._store: Any = None
        self._group: Group | None = None

    @property
    def address(self) -> str:
        """Where the control socket listens, with the real port; known once `serve` has started."""
        return self._socket.address if self._socket is not None else self._address

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the actors that hold the newest version."""
        newest = self._membership.newest
        return tuple(m.actor for m in self._membership.members if newest is not None and m.staged == newest)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve actors until cancelled. Reports started when the socket is bound."""
        async with (
            open_socket(zmq.ROUTER, bind=self._address, keys=self._keys) as socket,
            trio.open_nursery() as nursery,
        ):
            self._socket = socket
            nursery.start_soon(self._fold_when_possible)
            nursery.start_soon(self._watch_silence)
            if self._files is not None:
                nursery.start_soon(self._write_files, self._files)
            task_status.started()
            try:
                while True:
                    frames = await socket.receive()
                    self._handle(frames)
            finally:
                if self._group is not None:
                    self._group.close()
                    self._group = None

    async def publish(self, *, version: int, parent: int | None, blobs: Sequence[bytes | memoryview]) -> PublishReport:
        """Publish one version made of one blob (ShardBlob.to_wire) a rank, in rank order.

        `parent` is the version that the blobs are the difference to, the newest one; of an anchor it says nothing.
        Returns when every healthy member staged it, or when the deadline passed; those that had not are removed and
        heal when they come back. Anchors replace everything. One call at a time; cancelling it leaves the version
        published. Raises ValueError when version, parent or blobs do not fit what was published before.
        """
        began = trio.current_time()
        parts = [ShardBlob.from_wire(blob) for blob in blobs]
        for rank, part in enumerate(parts):
            if (part.rank, part.ranks, part.anchor) != (rank, len(parts), parts[0].anchor):
                raise ValueError(
                    f"blobs[{rank}]: of rank {part.rank} of {part.ranks}, expected rank {rank} of {len(parts)}"
                )
        anchor = parts[0].anchor
        if self._channel == "collective" and self._store is None:
            # Before the version is known: a member that hears of it without an invitation streams it, and the group
            # would wait for that member in vain.
            seconds = COLLECTIVE_SHARE * self._deadline_seconds
            self._store = await trio.to_thread.run_sync(lambda: open_store(seconds=seconds))
        entry = entry_of(
            version=version,
            parent=None if anchor else parent,
            checksum=combine(self._layout, [part.checksums for part in parts]),
            payloads=[part.payload for part in parts],
        )
        self._log.append(entry)
        round_ = self._membership.begin(version, now=began, everyone=anchor)
        self._write_soon.set()
        channel: str = "none" if not round_.waiting else "stream" if anchor else self._channel
        if channel == "collective" and not self._membership.collective:
            channel = "stream"
        try:
            if channel == "collective":
                if not await self._broadcast(entry, round_):
                    channel = "collective+stream"
            else:
                for token in self._peers:
                    self._announce(token, entry)
            self._fold_soon.set()
            while not round_.done:
                with trio.move_on_at(round_.deadline) as scope:
                    await self._changed.wait()
                if scope.cancelled_caught:
                    break
        finally:
            self._membership.end(remove_late=not anchor)
            self._forget_removed()
        for actor, reason in round_.removed.items():
            log.warning("%s was removed: %s", actor, reason)
        return PublishReport(
            version=version,
            checksum=entry.checksum,
            bytes=len(entry.payload),
            full_bytes=self._log.nbytes,
            changed=sum(part.changed for part in parts),
            total=sum(part.total for part in parts),
            seconds=trio.current_time() - began,
            members=tuple(round_.staged),
            removed=dict(round_.removed),
            channel=channel,
        )

    async def finish(self) -> None:
        """Tell the members that no more versions come; returns when they know, or after the deadline."""
        self._finished = True
        for token in tuple(self._peers):
            self._tell(token, {"op": "news", **self._news()})
        with trio.move_on_after(self._deadline_seconds):
            while self._membership.members:
                await self._changed.wait()

    async def _broadcast(self, entry: Entry, round_: Round) -> bool:
        """Send a delta to the current members through a collective, announcing it to the others. False: it broke."""
        composition, new = self._membership.compose()
        seconds = COLLECTIVE_SHARE * self._deadline_seconds
        if new and self._group is not None:
            self._group.close()
            self._group = None
        try:
            with trio.fail_after(seconds):
                for token in tuple(self._peers):
                    self._announce(token, entry, composition=composition)
                began = trio.current_time()
                if self._group is None:
                    spec = self._spec(composition, rank=0)
                    store = self._store
                    self._group = await trio.to_thread.run_sync(
                        lambda: Group(spec, seconds=seconds, store=store), abandon_on_cancel=True
                    )
                group, buffer = self._group, np.frombuffer(bytearray(entry.payload), np.uint8)
                left = max(0.05, began + seconds - trio.current_time())
                await trio.to_thread.run_sync(lambda: group.broadcast(buffer, seconds=left), abandon_on_cancel=True)
        except (CollectiveFailed, trio.TooSlowError) as error:
            cause = str(error) or f"the collective took more than {seconds:g} s"
            log.warning("version %d: %s; its members get it by stream", entry.version, cause)
            self._membership.broke()
            if self._group is not None:
                self._group.close()
                self._group = None
            return False
        return True

    def _spec(self, composition: Composition, *, rank: int) -> GroupSpec:
        return GroupSpec(
            epoch=composition.epoch,
            port=self._store.port,
            prefix=f"weights/{composition.epoch}",
            rank=rank,
            size=composition.size,
            backend=self._backend,
        )

    def _announce(self, token: int, entry: Entry, *, composition: Composition | None = None) -> None:
        message: dict[str, Any] = {"op": "news", **self._news()}
        if composition is not None and token in composition.ranks:
            message["collective"] = {
                "version": entry.version,
                "parent": entry.parent,
                "checksum": entry.checksum,
                "sizes": list(entry.sizes),
                "seconds": COLLECTIVE_SHARE * self._deadline_seconds,
                "group": self._spec(composition, rank=composition.ranks[token]).to_wire(),
            }
        self._tell(token, message)

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

    def _reply(self, peer: bytes, message: dict[str, Any], frame: bytes | memoryview | None = None) -> bool:
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
                self._welcome(peer, message)
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
            log.warning("refused a message: %s", error)
            self._reply(peer, {"op": "refused", "error": str(error)})

    def _welcome(self, peer: bytes, message: dict[str, Any]) -> None:
        actor, workers, nonce, channel = (take(message, key, kind) for key, kind in HELLO.items())
        theirs = Layout.from_wire(message.get("layout"))
        if difference := self._layout.difference(theirs):
            raise MessageError(f"layout: the actor serves another model than the learner trains: {difference}")
        if workers < 1:
            raise MessageError(f"workers: {workers}, expected 1 or more")
        if channel not in CHANNELS:
            raise MessageError(f"channel: {channel!r}, expected {' or '.join(CHANNELS)}")
        if self._membership.newest is None:
            # What another learner published last may be of a branch that this one goes back on.
            self._reply(peer, {"op": "waiting"})
            return
        member = self._membership.join(
            actor, nonce=nonce, workers=workers, collective=channel == "auto", now=trio.current_time()
        )
        self._forget_removed()
        if member.token not in self._peers:
            log.info("%s joined", actor)
        self._peers[member.token] = peer
        self._reply(peer, {"op": "welcome", "token": member.token, "seconds": self._deadline_seconds, **self._news()})

    def _alive(self, token: int, _: dict[str, Any]) -> None:
        self._tell(token, {"op": "news", **self._news()})

    def _staged(self, token: int, message: dict[str, Any]) -> None:
        version, checksum = take(message, "version", int), take(message, "checksum", str)
        newest = self._log.newest
        if newest is not None and version == newest.version and checksum != newest.checksum:
            raise MessageError(f"checksum: {checksum} of version {version}, expected {newest.checksum}")
        self._membership.stage(token, version, now=trio.current_time())
        self._log.release(str(token))
        self._fold_soon.set()
        self._notify()

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
        piece = self._log.read(
            str(token),
            version=version,
            anchor=take(message, "anchor", bool),
            offset=offset,
            size=size,
            now=trio.current_time(),
        )
        answer = {"op": "chunk", "id": number, "offset": offset, "gone": piece is None}
        self._reply(self._peers[token], answer, b"" if piece is None else piece)

    def _bye(self, token: int, _: dict[str, Any]) -> None:
        self._membership.remove(token, "left")
        self._forget_removed()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _forget_removed(self) -> None:
        known = {member.token for member in self._membership.members}
        for token in set(self._peers) - known:
            del self._peers[token]
            self._log.release(str(token))

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            for token in tuple(self._peers) if self._membership.newest is not None else ():
                if self._membership.quiet(token, seconds=2 * TICK_SECONDS, now=trio.current_time()):
                    self._tell(token, {"op": "news", **self._news()})
            for actor, reason in self._membership.silent(now=trio.current_time()).items():
                log.warning("%s is no member any more: %s", actor, reason)
                self._notify()
            self._forget_removed()
            self._fold_soon.set()

    async def _fold_when_possible(self) -> None:
        while True:
            await self._fold_soon.wait()
            self._fold_soon = trio.Event()
            async with self._mirror_in_use:
                if entries := self._log.begin_fold(now=trio.current_time()):
                    await trio.to_thread.run_sync(self._log.fold, entries)
                    self._log.end_fold(entries)
                    self._write_soon.set()

    async def _write_files(self, files: LogFiles) -> None:
        """Bring what is on disk up to what is published, as soon as may be."""
        while True:
            await self._write_soon.wait()
            self._write_soon = trio.Event()
            try:
                while (entry := files.next(self._log)) is not None:
                    if entry.parent is not None:
                        await trio.to_thread.run_sync(files.write, entry, self._log.mirror)
                        continue
                    async with self._mirror_in_use:
                        entry = files.next(self._log)
                        if entry is not None:
                            await trio.to_thread.run_sync(files.write, entry, self._log.mirror)
            except OSError as error:
                # Actors are served from memory: without the files a restart costs an anchor, no more.
                log.warning("version %s is not kept on disk: %s", self._log.newest and self._log.newest.version, error)
