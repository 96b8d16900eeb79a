from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
import zmq

from lachesis_transport.keys import Keys, make_keys
from lachesis_transport.sockets import STREAM_BYTES, Socket, check_loopback, open_socket

SECONDS = 20
PEER = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
number = 0
while True:
    socket.send(number.to_bytes(8, "little") + b"x" * 1000)
    number += 1
"""


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "ipc:///tmp/x", "tcp://example.org:1", "tcp://*:1"]
)
def test_only_loopback_is_served(address):
    with pytest.raises(ValueError, match=r"expected tcp://127\.0\.0\.1:PORT"):
        check_loopback(address)


def test_loopback_addresses_are_fine():
    check_loopback("tcp://127.0.0.1:5710")
    check_loopback("tcp://localhost:5710")


@pytest.mark.trio
async def test_an_address_in_use_is_one_clear_error():
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as first:
        told = f"queue.address: '{first.address}' cannot be bound: Address already in use"
        with pytest.raises(OSError, match=told):
            async with open_socket(zmq.ROUTER, bind=first.address, field="queue.address"):
                pytest.fail("bound twice")


@asynccontextmanager
async def pair(*, high_water: int = 64):
    """A listener and a client that is connected to it."""
    async with (
        open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", high_water=high_water) as server,
        open_socket(zmq.DEALER, connect=server.address, high_water=high_water) as client,
    ):
        yield server, client


@pytest.mark.trio
async def test_many_senders_and_receivers_under_cancellation_lose_and_double_nothing():
    """Receives and sends are cancelled all the time; what was sent arrives exactly once."""
    senders, each = 4, 300
    arrived: list[int] = []
    with trio.fail_after(SECONDS):
        async with pair(high_water=4) as (server, client), trio.open_nursery() as nursery:

            async def send(name: int) -> None:
                number = turn = 0
                while number < each:
                    turn += 1
                    sent = False
                    with trio.move_on_after(0.0002 * (turn % 3)):
                        await client.send([(name * each + number).to_bytes(4, "little"), b"y" * 2000])
                        sent = True
                    number += sent

            async def receive() -> None:
                turn = 0
                while len(arrived) < senders * each:
                    turn += 1
                    with trio.move_on_after(0.0003 * (turn % 4)):
                        frames = await server.receive()
                        arrived.append(int.from_bytes(frames[1].bytes, "little"))
                nursery.cancel_scope.cancel()

            for name in range(senders):
                nursery.start_soon(send, name)
            for _ in range(2):
                nursery.start_soon(receive)
    assert sorted(arrived) == list(range(senders * each))


@pytest.mark.trio
async def test_tasks_that_share_a_socket_all_go_on_whichever_of_them_gives_up():
    """Some tasks wait for messages, others send, those that watch the socket are cancelled: all echoes arrive."""
    each, senders = 200, 3
    arrived: list[int] = []
    with trio.fail_after(SECONDS):
        async with pair(high_water=4) as (server, client), trio.open_nursery() as nursery:

            async def echo() -> None:
                while True:
                    await server.send(await server.receive())

            async def send(name: int) -> None:
                for number in range(each):
                    await client.send([(name * each + number).to_bytes(4, "little")])

            async def receive(patience: float) -> None:
                while len(arrived) < senders * each:
                    with trio.move_on_after(patience):
                        [frame] = await client.receive()
                        arrived.append(int.from_bytes(frame.bytes, "little"))
                nursery.cancel_scope.cancel()

            nursery.start_soon(echo)
            for patience in (0.0005, 0.002, float("inf")):
                nursery.start_soon(receive, patience)
            for name in range(senders):
                nursery.start_soon(send, name)
    assert sorted(arrived) == list(range(senders * each))


@pytest.mark.trio
async def test_a_stream_of_large_messages_arrives_whole_over_receives_that_are_cancelled():
    count, size = 100, STREAM_BYTES
    with trio.fail_after(SECONDS):
        async with pair() as (server, client), trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(count):
                    await client.send([bytes([number]) * size])

            nursery.start_soon(send)
            arrived: list[bytes] = []
            turn = 0
            while len(arrived) < count:
                turn += 1
                with trio.move_on_after(0.0004 * (turn % 4)):
                    arrived.append((await server.receive())[1].bytes[-1:])
    assert arrived == [bytes([number]) for number in range(count)]


@pytest.mark.trio
async def test_a_send_waits_for_a_slow_peer_and_a_full_queue_is_reported():
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", high_water=2) as server:
        async with open_socket(zmq.DEALER, connect=server.address, high_water=2) as client:
            block = b"z" * (1 << 20)
            sent = 0
            with trio.move_on_after(1):
                while True:
                    await client.send([block])
                    sent += 1
            assert 2 <= sent <= 64  # the queues and the kernel's buffers, no more
            for _ in range(sent):
                assert len((await server.receive())[1]) == len(block)
            assert server.receive_nowait() is None
            assert server.send_nowait([b"nobody", b"x"]) is False


@pytest.mark.trio
async def test_a_send_that_waits_is_not_tried_over_and_over(monkeypatch):
    count, tries = 2000, 0
    attempt = Socket._send

    def counted(self, frames) -> bool:
        nonlocal tries
        tries += 1
        return attempt(self, frames)

    monkeypatch.setattr(Socket, "_send", counted)
    with trio.fail_after(SECONDS):
        async with pair(high_water=4) as (server, client), trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(count):
                    await client.send([bytes(16 << 10)])

            nursery.start_soon(send)
            for _ in range(count):
                await server.receive()
    assert count <= tries < 4 * count


@pytest.mark.trio
async def test_idle_sockets_use_no_processor():
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.receive)
        await trio.sleep(0.1)
        before = trio.lowlevel.current_statistics().io_statistics, os.times()
        await trio.sleep(1)
        after = os.times()
        assert after.user + after.system - before[1].user - before[1].system < 0.2
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_killed_peer_harms_nobody():
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as server:
            peers = [subprocess.Popen([sys.executable, "-c", PEER, server.address]) for _ in range(2)]
            try:
                seen: dict[bytes, int] = {}

                async def take(until: int) -> None:
                    while len(seen) < 2 or min(seen.values()) < until:
                        route, frame = await server.receive()
                        number = int.from_bytes(frame.bytes[:8], "little")
                        assert number == seen.get(route.bytes, -1) + 1
                        seen[route.bytes] = number

                await take(200)
                os.kill(peers[0].pid, signal.SIGKILL)
                peers[0].wait()
                last = dict(seen)
                for _ in range(5000):
                    route, frame = await server.receive()
                    seen[route.bytes] = int.from_bytes(frame.bytes[:8], "little")
                living = [route for route in seen if seen[route] > last[route] + 1000]
                assert living
                async with open_socket(zmq.DEALER, connect=server.address) as client:
                    await client.send([b"hello"])
                    while (frames := await server.receive())[1].bytes != b"hello":
                        pass
                    assert server.send_nowait([frames[0].bytes, b"answer"])
                    assert (await client.receive())[0].bytes == b"answer"
            finally:
                for peer in peers:
                    peer.kill()
                    peer.wait()


@pytest.mark.trio
async def test_a_peer_that_comes_back_is_found_again():
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as server:
            address = server.address
            async with open_socket(zmq.DEALER, connect=address) as client:
                await client.send([b"1"])
                assert (await server.receive())[1].bytes == b"1"
                with trio.move_on_after(0.05):
                    await client.receive()
        async with open_socket(zmq.DEALER, connect=address) as client:
            with trio.move_on_after(0.3) as scope:
                await client.send([b"lost"])  # nobody is there: nothing is queued
            assert scope.cancelled_caught
            async with open_socket(zmq.ROUTER, bind=address) as server:
                await client.send([b"2"])
                assert (await server.receive())[1].bytes == b"2"


@pytest.mark.trio
@pytest.mark.parametrize("keyed", [False, True])
async def test_the_address_of_a_closed_listener_is_free_at_once(tmp_path, keyed):
    keys = None
    if keyed:
        make_keys(tmp_path)
        keys = Keys(tmp_path)
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=keys) as server:
            address = server.address
        for _ in range(20):
            async with open_socket(zmq.DEALER, connect=address, keys=keys) as client:
                async with open_socket(zmq.ROUTER, bind=address, keys=keys) as server:
                    await client.send([b"?"])
                    route, _ = await server.receive()
                    await server.send([route.bytes, b"!"])
                    assert (await client.receive())[0].bytes == b"!"


@pytest.mark.trio
async def test_who_still_waits_is_served_when_others_leave():
    """Those that wait are served in the order they came, without those that were cancelled meanwhile."""
    with trio.fail_after(SECONDS):
        async with pair() as (server, client), trio.open_nursery() as nursery:
            await client.send([b"hello"])
            route = (await server.receive())[0].bytes
            arrived: list[tuple[int, bytes]] = []
            scopes = [trio.CancelScope() for _ in range(4)]

            async def receive(name: int) -> None:
                with scopes[name]:
                    arrived.append((name, (await client.receive())[0].bytes))

            for name in range(4):
                nursery.start_soon(receive, name)
                await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()
            scopes[2].cancel()
            await trio.testing.wait_all_tasks_blocked()
            await server.send([route, b"first"])
            await server.send([route, b"second"])
            while len(arrived) < 2:
                await trio.sleep(0.001)
            assert sorted(arrived, key=lambda each: each[1]) == [(1, b"first"), (3, b"second")]


@pytest.mark.trio
async def test_a_send_and_a_receive_wait_for_a_peer_together():
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as server:
            address = server.address
        async with open_socket(zmq.DEALER, connect=address) as client, trio.open_nursery() as nursery:
            answers: list[bytes] = []

            async def receive() -> None:
                answers.append((await client.receive())[0].bytes)

            nursery.start_soon(client.send, [b"?"])
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            async with open_socket(zmq.ROUTER, bind=address) as server:
                route, frame = await server.receive()
                await server.send([route.bytes, frame.bytes + b"!"])
                while not answers:
                    await trio.sleep(0.001)
    assert answers == [b"?!"]


@pytest.mark.slow
@pytest.mark.trio
async def test_a_message_may_take_longer_than_any_heartbeat():
    """A link that stands still for 12 s in the middle of a message: it arrives, over the one connection."""
    connections = 0
    with trio.fail_after(60):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as server, trio.open_nursery() as nursery:

            async def forward(source: trio.SocketStream, sink: trio.SocketStream, stand_still: bool) -> None:
                passed = 0
                async for part in source:
                    if stand_still and passed < 1 << 20 <= passed + len(part):
                        await trio.sleep(12)  # longer than the ten seconds that a heartbeat waits elsewhere
                    passed += len(part)
                    await sink.send_all(part)

            async def relay(client: trio.SocketStream) -> None:
                nonlocal connections
                connections += 1
                port = int(server.address.rpartition(":")[2])
                queue = await trio.open_tcp_stream("127.0.0.1", port)
                async with trio.open_nursery() as both:
                    both.start_soon(forward, client, queue, True)
                    both.start_soon(forward, queue, client, False)

            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, relay, [listener])
            address = f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
            async with open_socket(zmq.DEALER, connect=address) as client:
                await client.send([b"x" * (16 << 20)])
                assert len((await server.receive())[1]) == 16 << 20
            assert connections == 1
            nursery.cancel_scope.cancel()
