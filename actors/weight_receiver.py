"""The receiver thread inside each vLLM worker.

The thread keeps a checkpoint-format mirror of the weights on the host and brings it to each new version while
generation goes on. It speaks only with its own actor process, over loopback ZeroMQ, and obeys these commands, one at a
time; each answer carries the command's id:

- state {shards, again}: answers version and checksum; hashes the mirror for it, if again is true or what it last hashed
  isn't what it holds any more.
- know {version}: believes the actor that the mirror, whose checksum it has seen, is that version.
- receive {version, parent, sizes, checksum, group, seconds}: takes a delta from the collective channel and applies it.
- begin {version, parent, sizes, checksum, shards}, chunk {offset} + frame, ..., commit: the same in pieces.
- prepare {version}: loads that version from the mirror beside the generation, so that activating it takes no time.

`receive` and `commit` answer the checksum of the result. `begin` without a parent announces an anchor: its chunks are
the mirror's own bytes and are written straight into it.
After anything that leaves the mirror's content in doubt its version is null until the next anchor.

The engine's update (`LachesisWeightTransfer`) only copies from the mirror, so nothing in its step loop waits for a
network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.sockets import check_loopback
from lachesis_transport.weights.codec import CodecError
from lachesis_transport.weights.collective import CollectiveFailed, Group, GroupSpec
from lachesis_transport.weights.mirror import Mirror

logger = logging.getLogger("lachesis.weights")

CHUNK_BYTES = 1 << 20
PAYLOAD_SHARE = 2.0
"""A payload longer than this many times the weights (and a little) is refused."""


class ReceiverRefused(RuntimeError):
    """A command does not fit the mirror's state; nothing changed."""


@dataclass(slots=True)
class _Transfer:
    version: int
    parent: int | None
    sizes: list[int]
    checksum: str
    shards: int
    buffer: np.ndarray
    received: int = 0


class Receiver:
    """The mirror and the commands on it; `run` is the thread.

    Args:
        mirror: the weights that the engine loaded.
        address: of the actor's socket, tcp://127.0.0.1:PORT.
        token: the actor's secret: proves that this is its own worker.
        worker: rank of this worker in its engine.
        device: of this worker, as torch names it; a thread's own current one is the first GPU, whatever the worker's.
        prepare: called as prepare(version, mirror), in the thread, to make the activation of a version quick; None
            where that isn't possible.
    """

    def __init__(
        self,
        mirror: Mirror,
        *,
        address: str,
        token: str,
        worker: int,
        device: str = "cpu",
        prepare: Callable[[int, Mirror], None] | None = None,
    ) -> None:
        check_loopback(address)
        self._to_prepare = prepare
        self.mirror = mirror
        self.version: int | None = None
        self.lock = threading.Lock()
        """Held while the mirror changes and while the engine copies from it."""
        self._address = address
        self._token = token
        self._worker = worker
        self._device = device
        self._group: Group | None = None
        self._hashed: tuple[int, str] | None = None
        """Shards and checksum of what the mirror holds; None when that isn't known."""
        self._transfer: _Transfer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, name="lachesis-weights", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for the command in progress, at most a moment."""
        self._stop.set()
        self._thread.join(2.0)

    def run(self) -> None:
        """Obey commands until stopped."""
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 16)
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.connect(self._address)
        try:
            hello = {
                "op": "hello",
                "token": self._token,
                "worker": self._worker,
                "layout": self.mirror.layout.to_wire(),
            }
            socket.send(pack(hello))
            while not self._stop.is_set():
                if socket.poll(200):
                    frames = socket.recv_multipart(copy=False)
                    socket.send(pack(self._answer(frames)))
        finally:
            self._leave()
            socket.close()
            context.term()

    def _answer(self, frames: list[zmq.Frame]) -> dict[str, Any]:
        number: int | None = None
        try:
            message = unpack(frames[0].buffer)
            number = take(message, "id", int)
            reply = self.obey(message, frames[1].buffer if len(frames) > 1 else None)
            return {"id": number, "ok": True, "worker": self._worker, **reply}
        except (MessageError, CodecError, CollectiveFailed, ReceiverRefused) as error:
            logger.warning("weights: %s", error)
            return {"id": number, "ok": False, "worker": self._worker, "version": self.version, "error": str(error)}
        except Exception as error:  # an actor would wait for a dead thread without end
            logger.exception("weights: a command failed")
            self.version = self._hashed = self._transfer = None
            text = f"{type(error).__name__}: {error}"
            return {"id": number, "ok": False, "worker": self._worker, "version": None, "error": text}

    def obey(self, message: dict[str, Any], frame: memoryview | None = None) -> dict[str, Any]:
        """Carry out one command. Raises MessageError, CodecError, CollectiveFailed or ReceiverRefused."""
        op = take(message, "op", str)
        commands: dict[str, Callable[[dict[str, Any], memoryview | None], dict[str, Any]]] = {
            "state": self._state,
            "know": self._know,
            "receive": self._receive,
            "begin": self._begin,
            "chunk": self._chunk,
            "commit": self._commit,
            "prepare": self._prepare,
        }
        if op not in commands:
            raise MessageError(f"op: {op!r}, expected one of {', '.join(commands)}")
        return commands[op](message, frame)

    def _state(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        shards = _shards(message)
        if message.get("again", True) or self._hashed is None or self._hashed[0] != shards:
            self._hashed = shards, self.mirror.checksum(shards=shards)
        return {"version": self.version, "checksum": self._hashed[1]}

    def _know(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        self.version = take(message, "version", int)
        return {"version": self.version}

    def _receive(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        began = time.monotonic()
        seconds = take(message, "seconds", float)
        transfer = self._open(message)
        spec = GroupSpec.from_wire(message.get("group"))
        if self._group is not None and self._group.spec.epoch != spec.epoch:
            self._leave()
        try:
            if self._group is None:
                self._group = Group(spec, seconds=seconds, device=self._device)
            left = max(0.05, began + seconds - time.monotonic())
            self._group.broadcast(transfer.buffer, seconds=left)
        except CollectiveFailed:
            self._leave()
            raise
        return self._stage(transfer)

    def _begin(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        self._transfer = self._open(message)
        if self._transfer.parent is None:
            self.version = self._hashed = None
        return {"bytes": len(self._transfer.buffer)}

    def _chunk(self, message: dict[str, Any], frame: memoryview | None) -> dict[str, Any]:
        transfer = self._transfer
        offset = take(message, "offset", int)
        if transfer is None or frame is None or offset != transfer.received:
            expected = None if transfer is None else transfer.received
            raise ReceiverRefused(f"offset: {offset}, expected {expected} and a frame")
        if offset + len(frame) > len(transfer.buffer):
            raise ReceiverRefused(f"chunk: ends at {offset + len(frame)}, expected at most {len(transfer.buffer)}")
        piece = np.frombuffer(frame, np.uint8)
        if transfer.parent is None:
            self._hashed = None
            with self.lock:
                transfer.buffer[offset : offset + len(piece)] = piece
        else:
            transfer.buffer[offset : offset + len(piece)] = piece
        transfer.received += len(piece)
        return {"received": transfer.received}

    def _commit(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        transfer, self._transfer = self._transfer, None
        if transfer is None or transfer.received != len(transfer.buffer):
            raise ReceiverRefused("commit: the transfer is not complete")
        return self._stage(transfer)

    def _prepare(self, message: dict[str, Any], _: memoryview | None) -> dict[str, Any]:
        version = take(message, "version", int)
        if version != self.version:
            raise ReceiverRefused(f"version: {version}, but this mirror holds {self.version}")
        if self._to_prepare is not None:
            with self.lock:
                try:
                    self._to_prepare(version, self.mirror)
                except Exception as error:
                    logger.exception("version %d can't be prepared", version)
                    raise ReceiverRefused(f"prepare: {type(error).__name__}: {error}") from error
        return {"version": version}

    def _open(self, message: dict[str, Any]) -> _Transfer:
        version, parent = take(message, "version", int), take(message, "parent", (int, type(None)))
        sizes, checksum = take(message, "sizes", list), take(message, "checksum", str)
        if not sizes or not all(type(s) is int and s >= 0 for s in sizes):
            raise MessageError(f"sizes: {sizes}, expected a list of bytes a shard")
        limit = int(PAYLOAD_SHARE * self.mirror.nbytes) + (1 << 20) * len(sizes)
        if sum(sizes) > limit:
            raise MessageError(f"sizes: {sum(sizes)} bytes, expected at most {limit}")
        if parent is None:
            if sum(sizes) != self.mirror.nbytes:
                raise MessageError(f"sizes: anchor of {sum(sizes)} bytes, expected {self.mirror.nbytes}")
            return _Transfer(version, None, sizes, checksum, _shards(message), self.mirror.bits.view(np.uint8))
        if parent != self.version:
            raise ReceiverRefused(f"parent: delta to version {parent}, but this mirror holds {self.version}")
        return _Transfer(version, parent, sizes, checksum, len(sizes), np.empty(sum(sizes), np.uint8))

    def _stage(self, transfer: _Transfer) -> dict[str, Any]:
        with self.lock:
            hashed, self._hashed = self._hashed, None
            self.version = None
            if transfer.parent is not None:
                try:
                    self.mirror.apply(transfer.buffer.data, sizes=transfer.sizes)
                except CodecError:
                    self.version, self._hashed = transfer.parent, hashed  # nothing was written
                    raise
            checksum = self.mirror.checksum(shards=transfer.shards)
            self._hashed = transfer.shards, checksum
            if checksum == transfer.checksum:
                self.version = transfer.version
        return {"version": self.version, "checksum": checksum}

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _shards(message: dict[str, Any]) -> int:
    shards = take(message, "shards", int)
    if not 1 <= shards <= 1 << 16:
        raise MessageError(f"shards: {shards}, expected 1 to {1 << 16}")
    return int(shards)


def open_receiver(
    folder: Path,
    *,
    address: str,
    token: str,
    worker: int,
    device: str = "cpu",
    prepare: Callable[[int, Mirror], None] | None = None,
) -> Receiver:
    """A running receiver for the model in `folder`. Raises ValueError for a folder without weights."""
    receiver = Receiver(
        Mirror.load(folder), address=address, token=token, worker=worker, device=device, prepare=prepare
    )
    receiver.start()
    return receiver
