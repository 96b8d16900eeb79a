from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import zmq

from lachesis_transport.client import QueueError, open_client
from lachesis_transport.messages import pack, unpack
from lachesis_transport.sockets import open_socket

STATE = {"current": 0, "step": 0, "finished": False, "final": None}
WELCOME = {"run_name": "toy", "batch_groups": 2, "staleness_max": 1, "steps": 4, "queue": "q"}

pytestmark = pytest.mark.trio


async def answer_all(socket, asked):
    """A queue that says yes to everything."""
    while True:
        route, frame = await socket.receive()
        message = unpack(frame.buffer)
        asked.append(message["op"])
        if message["op"] == "alive":
            continue
        await socket.send([route.bytes, pack({"id": message["id"], "ok": True, "state": STATE, **WELCOME})])


async def test_a_cancelled_client_hands_back_what_it_holds_and_says_goodbye():
    asked: list[str] = []
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as socket, trio.open_nursery() as nursery:
        nursery.start_soon(answer_all, socket, asked)
        with trio.fail_after(20), trio.CancelScope() as stop:
            async with open_client(socket.address, role="actor", name="a", incarnation="1") as client:
                try:
                    stop.cancel()
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        for ticket in (1, 2):
                            await client.request("void", waits_for="the end of a ticket", ticket=ticket)
                        before = asked.count("heartbeat")
                        while asked.count("heartbeat") == before:  # it is not given up for dead meanwhile
                            await trio.sleep(0.05)
                        client.report("stopped")
        nursery.cancel_scope.cancel()
    assert [op for op in asked if op not in ("alive", "heartbeat")] == ["hello", "void", "void", "goodbye"]


async def test_a_client_that_waits_for_its_queue_can_be_cancelled():
    with trio.fail_after(20), trio.move_on_after(0.2) as scope:
        async with open_client("tcp://127.0.0.1:1", role="actor", name="a", incarnation="1"):
            raise AssertionError("nobody welcomed it")
    assert scope.cancelled_caught


@asynccontextmanager
async def client_of(answer):
    """A client of a queue that answers what `answer(op)` says; "lost" is not answered. Also what was asked."""
    asked: list[str] = []
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as socket, trio.open_nursery() as nursery:

        async def serve() -> None:
            while True:
                route, frame = await socket.receive()
                message = unpack(frame.buffer)
                asked.append(message["op"])
                reply = answer(message["op"], asked)
                if reply != "lost" and message["op"] != "alive":
                    await socket.send([route.bytes, pack({"id": message["id"], **reply})])

        nursery.start_soon(serve)
        with trio.fail_after(20):
            async with open_client(socket.address, role="actor", name="a", incarnation="1") as client:
                yield client, asked
        nursery.cancel_scope.cancel()


YES = {"ok": True, "state": STATE, **WELCOME}


@pytest.mark.parametrize("answered", ["heartbeat", "void"])
async def test_a_request_is_repeated_once_something_sent_later_was_answered(monkeypatch, answered):
    monkeypatch.setattr("lachesis_transport.client.RESEND_SECONDS", 0.05)
    monkeypatch.setattr("lachesis_transport.client.HEARTBEAT_SECONDS", 0.01)
    silent = True

    def answer(op, asked):
        if op == "put" and asked.count("put") == 1:
            return "lost"
        return "lost" if op == "heartbeat" and silent else YES

    async with client_of(answer) as (client, asked), trio.open_nursery() as nursery:

        async def put() -> None:
            await client.request("put", waits_for="room")
            done.set()

        done = trio.Event()
        nursery.start_soon(put)
        while asked.count("heartbeat") < 6:  # each but the first of them a repetition
            await trio.sleep(0.01)
        assert asked.count("put") == 1
        if answered == "void":
            await client.request("void", waits_for="the end of a ticket")
        silent = answered == "void"
        await done.wait()
        silent = False
        assert asked.count("put") == 2


async def test_a_client_that_is_welcomed_again_asks_again_at_once(monkeypatch):
    monkeypatch.setattr("lachesis_transport.client.RESEND_SECONDS", 1000.0)
    monkeypatch.setattr("lachesis_transport.client.HEARTBEAT_SECONDS", 0.01)

    def answer(op, asked):
        if op == "put" and asked.count("hello") == 1:
            return "lost"
        if op == "heartbeat" and asked.count("put") == 1 and asked.count("hello") == 1:
            return {"ok": False, "code": "hello", "error": "the queue does not know this client"}
        return YES

    async with client_of(answer) as (client, asked):
        assert (await client.request("put", waits_for="room"))["ok"] is True
        assert asked.count("put") == asked.count("hello") == 2


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_queue_that_restarts_gives_the_client_before_as_long_again(monkeypatch, restarts):
    monkeypatch.setattr("lachesis_transport.client.RESEND_SECONDS", 0.05)

    def answer(op, asked):
        if op != "hello" or asked.count("hello") > 6:
            return YES
        process = str(asked.count("hello")) if restarts else "1"
        return {"ok": False, "code": "name_taken", "error": "taken", "heartbeat_seconds": 0.01, "process": process}

    if restarts:
        async with client_of(answer) as (_, asked):
            assert asked.count("hello") == 7
    else:
        with pytest.raises(BaseExceptionGroup) as refused:
            async with client_of(answer):
                pytest.fail("welcomed")
        assert refused.group_contains(QueueError, match="hello: taken")
