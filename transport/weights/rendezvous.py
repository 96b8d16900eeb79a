"""Where the ranks of a group find each other: keys and values that live at rank 0 while the group does.

    rendezvous = Rendezvous("127.0.0.1", epoch=epoch)               # rank 0
    store = RendezvousStore("127.0.0.1", rendezvous.port, seconds=10.0)     # every rank; a torch.distributed.Store
    keys = dist.PrefixStore(str(epoch), store)                      # only keys below the group's epoch exist

torch's TCPStore does the same, but asks a name server for the name of each address that it connects to, loopback
included, and waits for the answer: one packet that is lost costs 5 s, a name server that is away costs more.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import zmq

from lachesis_transport.frames import brief
from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.rare_log import RareLog

log = logging.getLogger("lachesis.weights")
refusals = RareLog(log)

MAX_BYTES = 64 << 20
"""All values of a rendezvous together: what a thousand ranks need several times."""
MAX_MESSAGE_BYTES = 1 << 20
"""A message either way."""
MAX_KEYS, MAX_KEY_LENGTH = 1024, 128
"""Of one question."""
QUEUED = 64
"""Messages of one client that wait to be read, and answers that wait for it. ZeroMQ drops an answer that is one too
many, silently, and counts one until it hears, a little later, that it went out: so not as few as a client can have on
their way."""
RESEND_SECONDS = 0.25
"""After so long without an answer a question is sent again."""
MAX_WAITING = 1024
"""Questions that wait for an answer; the oldest are forgotten."""


class Rendezvous:
    """Serves the keys and values of one group until closed, in a thread.

    Args:
        host: IPv4 address to listen on, at a free port.
        epoch: of the group. Keys begin with it and a slash; others are refused. It is random: no stranger knows it.

    Raises OSError when it cannot listen there.
    """

    def __init__(self, host: str, *, epoch: int) -> None:
        self._prefix = f"{epoch}/"
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._waiting: dict[bytes, tuple[int, list[str]]] = {}
        """What each client waits for: one question at a time."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = QUEUED
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise OSError(error.errno, f"rendezvous: no port at {host}: {error.strerror}") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        threading.Thread(target=self._serve, name="lachesis-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Forget everything; who still asks hears nothing."""
        self._context.term()

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                number = None
                try:
                    message = unpack(frames[-1] if frames else b"")
                    number = take(message, "id", int)
                    self._answer(peer, number, message)
                except MessageError as error:
                    refusals.warning("rendezvous: refused a message: %s", error)
                    self._say(peer, {"id": number, "error": str(error)})
        except zmq.ContextTerminated:
            self._socket.close()

    def _answer(self, peer: bytes, number: int, message: dict[str, Any]) -> None:
        if "value" not in message:
            keys = take(message, "keys", list)
            if len(keys) > MAX_KEYS or not all(map(self._is_ours, keys)):
                raise MessageError(f"keys: expected at most {MAX_KEYS} keys of the group")
            self._waiting[peer] = number, keys
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
        else:
            key, value = take(message, "key", str), take(message, "value", bytes)
            if not self._is_ours(key):
                raise MessageError(f"key: {brief(key)}, expected one of the group")
            before = len(key) + len(self._values[key]) if key in self._values else 0
            nbytes = self._nbytes - before + len(key) + len(value)
            if nbytes > MAX_BYTES:
                raise MessageError(f"value: {nbytes} bytes in all, expected at most {MAX_BYTES}")
            self._values[key], self._nbytes = value, nbytes
            self._say(peer, {"id": number, "values": []})
        for waiting, (asked, keys) in tuple(self._waiting.items()):
            if all(key in self._values for key in keys):
                del self._waiting[waiting]
                values = [self._values[key] for key in keys]
                if sum(map(len, values)) <= MAX_MESSAGE_BYTES:
                    self._say(waiting, {"id": asked, "values": values})

    def _is_ours(self, key: object) -> bool:
        return isinstance(key, str) and len(key) <= MAX_KEY_LENGTH and key.startswith(self._prefix)

    def _say(self, peer: bytes, message: dict[str, Any]) -> None:
        self._socket.send_multipart([peer, pack(message)], zmq.NOBLOCK)  # dropped for a peer that does not read


class RendezvousStore(dist.Store):
    """One rank's view of a rendezvous, with what building a group needs: set, get and wait.

    Args:
        host: IPv4 address or name of where the rendezvous listens.
        port: of it.
        seconds: that each call waits at most, unless it says otherwise.

    Calls raise DistStoreError (a RuntimeError) when they are refused or the time is up. Keep the object as long as its
    group.
    """

    def __init__(self, host: str, port: int, *, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._number = 0
        self._closed = False
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"tcp://{host}:{port}")

    def set(self, key: str, value: str | bytes) -> None:
        """Let everybody know a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask({"key": key, "value": content}, self._seconds)

    def get(self, key: str) -> bytes:
        """The value of a key, once somebody sets it."""
        return self._ask({"keys": [key]}, self._seconds)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all these keys are set."""
        self._ask({"keys": list(keys)}, self._seconds if timeout is None else timeout.total_seconds())

    def close(self) -> None:
        """Disconnect; a call in another thread ends, within RESEND_SECONDS."""
        self._closed = True
        with self._lock:
            self._context.destroy(linger=0)

    def _ask(self, message: dict[str, Any], seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        what = message.get("key") or ", ".join(message["keys"])
        with self._lock:
            self._number += 1
            question = pack({"id": self._number, **message})
            if not self._closed:
                self._socket.send(question)
            while not self._closed and (left := deadline - time.monotonic()) > 0:
                if not self._socket.poll(1 + int(1000 * min(left, RESEND_SECONDS))):
                    self._send_again(question)
                    continue
                answer = unpack(self._socket.recv())
                if answer.get("id") != self._number:
                    continue
                if "error" in answer:
                    raise dist.DistStoreError(f"rendezvous: {what}: refused: {answer['error']}")
                return take(answer, "values", list)
        raise dist.DistStoreError(
            f"rendezvous: {what}: {'closed' if self._closed else f'no answer within {seconds:g} s'}"
        )

    def _send_again(self, question: bytes) -> None:
        try:
            self._socket.send(question, zmq.NOBLOCK)
        except zmq.Again:
            pass  # enough of them wait for a connection
