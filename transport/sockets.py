"""ZeroMQ sockets under trio.

    async with open_socket(zmq.DEALER, connect="tcp://127.0.0.1:5710") as socket:
        await socket.send([frame])
        [answer] = await socket.receive()

Guarantees: a message is received once or, when the receive is cancelled, not at all; a cancelled send sent nothing.
Any number of tasks may send and receive; a call that need not wait lets other tasks run every 16th time. Queues are
bounded by the high-water marks, so a send waits for a slow peer; nothing polls.

ZeroMQ signals *changes* through a file descriptor: after an edge it stays silent, and every operation on the socket may
swallow one. So each operation ends with a look at the socket's state that wakes whoever can go on. Of the tasks that
wait one watches the descriptor, and goes on by itself after an edge: a lone receiver costs one pass through trio a
message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count

import trio
import zmq

from lachesis_configs.addresses import on_loopback
from lachesis_transport.keys import Keys
from lachesis_transport.messages import MAX_MESSAGE_BYTES
from lachesis_transport.rare_log import RareLog

log = logging.getLogger("lachesis.transport")

KEEPALIVE_SECONDS = 2
UNACKNOWLEDGED_MS = 30_000
"""A peer whose kernel answers nothing for so long is gone. The kernels ask each other: ZeroMQ's own heartbeats wait
behind a message that is being sent, so they would cut every connection on which one takes longer than their timeout."""
LINGER_MS = 1_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000
CLOSING_MS = 1_000
HANDSHAKE_MS = 10_000
CURVE_BYTES = 33
"""What CURVE adds to a frame."""
ZAP = "inproc://zeromq.zap.01"
TURNS = 16
STREAM_BYTES, STREAM_SECONDS = 512 << 10, 0.001
"""After a message so large the next look is so much later: a pass through trio in between costs as much as half of its
way, and what follows at once is received together."""
_CLOSINGS = count()
"""Names of their own for the sockets that tell of a closed listener: ZeroMQ frees one some time after its use."""


def check_loopback(address: str, *, field: str = "address") -> None:
    """Raise ValueError, naming `field`, unless `address` is tcp://HOST:PORT with a loopback host."""
    if not (address.startswith("tcp://") and on_loopback(address)):
        raise ValueError(f"{field}: {address!r}, expected tcp://127.0.0.1:PORT: only loopback is served without keys")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn an exception group of one, which a nursery makes of its body's error, back into that error."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        error = group.exceptions[0]
        raise error from error.__cause__


class Socket:
    """One ZeroMQ socket; `open_socket` makes it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._receivers = trio.lowlevel.ParkingLot()
        self._senders = trio.lowlevel.ParkingLot()
        self._watched_for = 0
        """What the task that watches the descriptor waits for, 0 for none; while tasks wait, one of them watches."""
        self._streaming = False
        """Whether the last message that a task received was a large one."""
        self._turns = 0

    @property
    def address(self) -> str:
        """Where it is bound, with the port that a bind to port 0 got."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def receive(self) -> list[zmq.Frame]:
        """The next message, waiting for one. Frames are buffers over ZeroMQ's own memory."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while (message := self.receive_nowait()) is None:
            if self._streaming:
                self._streaming = False
                await trio.sleep(STREAM_SECONDS)
            else:
                await self._wait(zmq.POLLIN, self._receivers)
        self._streaming = len(message[-1]) >= STREAM_BYTES
        await self._yield_sometimes()
        return message

    def receive_nowait(self) -> list[zmq.Frame] | None:
        """The next message, or None when there is none."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
            while frames[-1].more:  # the rest of a message came with its first frame
                frames.append(self._socket.recv(copy=False))
            return frames
        except zmq.Again:
            return None
        finally:
            self._wake()

    async def send(self, frames: Sequence[bytes | bytearray | memoryview | zmq.Frame]) -> None:
        """Hand a message to ZeroMQ, waiting while its queue is full or no peer is connected."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._send(frames):
            if not self._events() & zmq.POLLOUT:  # a send that fails may not have looked at what has changed
                await self._wait(zmq.POLLOUT, self._senders)
        await self._yield_sometimes()

    def send_nowait(self, frames: Sequence[bytes | bytearray | memoryview | zmq.Frame]) -> bool:
        """Hand a message to ZeroMQ; False when the peer is gone or its queue is full. Then nothing was sent."""
        try:
            return self._send(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False

    def _send(self, frames: Sequence[bytes | bytearray | memoryview | zmq.Frame]) -> bool:
        more = len(frames) - 1
        try:
            for frame in frames:  # only the first one may find no room
                flags = zmq.NOBLOCK | zmq.SNDMORE if more else zmq.NOBLOCK
                self._socket.send(frame, flags, copy=False)
                more -= 1
        except zmq.Again:
            return False
        finally:
            self._wake()
        return True

    async def _yield_sometimes(self) -> None:
        # A pass through trio's scheduler costs as much as a small message: share it between a few.
        self._turns += 1
        if self._turns % TURNS == 0:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    async def _wait(self, events: int, waiting: trio.lowlevel.ParkingLot) -> None:
        """After an operation that could not go on: until it may."""
        if self._watched_for:
            await waiting.park()
            return
        self._watched_for = events
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
        except trio.ClosedResourceError:
            pass  # another task saw that it can go on
        finally:
            self._watched_for = 0
            self._wake()

    def _wake(self) -> None:
        """Wake whoever can go on. Each operation ends so, as it may have taken in the change that others wait for."""
        if not self._watched_for and not self._receivers and not self._senders:
            return  # whoever comes next tries before it waits
        events = self._events()
        woken = [*self._receivers.unpark(count=bool(events & zmq.POLLIN))]
        woken += self._senders.unpark(count=bool(events & zmq.POLLOUT))
        if self._watched_for:
            if events & self._watched_for:
                trio.lowlevel.notify_closing(self._descriptor)  # nothing is closed: it wakes who waits for it
        elif not woken:
            (self._receivers or self._senders).unpark()  # it watches from now on


@asynccontextmanager
async def open_socket(
    kind: int,
    *,
    bind: str | None = None,
    connect: str | None = None,
    high_water: int = 64,
    send_high_water: int | None = None,
    max_frame_bytes: int | None = None,
    keys: Keys | None = None,
    field: str = "address",
) -> AsyncIterator[Socket]:
    """A socket for the length of the block; on exit, what was sent still goes out for up to a second, without waiting.
    A listener's address is free at once.

    `high_water` bounds the messages that wait in each direction, a peer; `send_high_water` those to be sent. Who sends
    a longer frame than `max_frame_bytes` (None: MAX_MESSAGE_BYTES) is disconnected, before memory is taken for it. A
    socket that connects sends only while it is connected: nothing piles up for a peer that is away. With `keys` every
    byte is encrypted, a listener answers only the clients that it admits, and a client talks only to the server it
    knows; without, only loopback is served. `field` is what errors call the address.
    Raises ValueError for an address off loopback without keys, ConfigError for keys that are missing or malformed,
    OSError when the address is taken.
    """
    address = bind or connect
    assert address is not None
    if keys is None:
        check_loopback(address, field=field)
    with ExitStack() as stack:
        # A listener with keys has a context of its own: ZeroMQ asks one handler a context whom to admit.
        own = bind is not None and keys is not None
        context = stack.enter_context(_own_context()) if own else zmq.Context.instance()
        socket: zmq.Socket[bytes] = stack.enter_context(context.socket(kind))
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, send_high_water or high_water),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, (max_frame_bytes or MAX_MESSAGE_BYTES) + (CURVE_BYTES if keys else 0)),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS),
            (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS),
            (zmq.TCP_KEEPALIVE_CNT, UNACKNOWLEDGED_MS // 1000 // KEEPALIVE_SECONDS),
            (zmq.TCP_MAXRT, UNACKNOWLEDGED_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        ):
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        wrapped = Socket(socket)
        with plain_errors():
            async with trio.open_nursery() as nursery:
                if bind is not None:
                    if keys is not None:
                        admitted = keys.secure_listener(socket)
                        door = stack.enter_context(context.socket(zmq.REP))
                        door.bind(ZAP)
                        nursery.start_soon(_admit, Socket(door), admitted, bind)
                    stack.enter_context(_bound(socket, bind, field))
                else:
                    if keys is not None:
                        keys.secure_client(socket)
                    socket.setsockopt(zmq.IMMEDIATE, 1)
                    socket.connect(address)
                try:
                    yield wrapped
                finally:
                    nursery.cancel_scope.cancel()


@contextmanager
def _bound(socket: zmq.Socket[bytes], address: str, field: str) -> Iterator[None]:
    """Listens at `address`, which is free again afterwards: ZeroMQ closes a listener some time after its socket."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{field}: {address!r} cannot be bound: {error.strerror}") from None
    closing = f"inproc://closing-{next(_CLOSINGS)}"
    socket.monitor(closing, zmq.EVENT_CLOSED)
    with socket.context.socket(zmq.PAIR) as monitor:
        monitor.linger = 0
        monitor.connect(closing)
        try:
            yield
        finally:
            socket.close()
            monitor.poll(CLOSING_MS)


@contextmanager
def _own_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context that ends, once what was sent has gone out or lingered, in a thread beside."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        threading.Thread(target=context.term, name="zmq-term").start()


async def _admit(door: Socket, admitted: frozenset[bytes], address: str) -> None:
    """Answer ZeroMQ's questions whether a client may connect (ZAP, RFC 27): by its public key, which it has proved."""
    refusals = RareLog(log)
    while True:
        version, request, _, peer, _, mechanism, *credentials = [frame.bytes for frame in await door.receive()]
        welcome = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in admitted
        status = [b"200", b"OK"] if welcome else [b"400", b"key not admitted"]
        await door.send([version, request, *status, b"", b""])
        if not welcome:
            refusals.warning("%s: the key of a client at %s is not admitted", address, peer.decode())
