from __future__ import annotations

import pytest
import trio
import zmq

from lachesis_transport.client import open_client
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
    assert [op for op in asked if op != "heartbeat"] == ["hello", "void", "void", "goodbye"]


async def test_a_client_that_waits_for_its_queue_can_be_cancelled():
    with trio.fail_after(20), trio.move_on_after(0.2) as scope:
        async with open_client("tcp://127.0.0.1:1", role="actor", name="a", incarnation="1"):
            raise AssertionError("nobody welcomed it")
    assert scope.cancelled_caught
