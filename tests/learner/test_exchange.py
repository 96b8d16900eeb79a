from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import trio
import zmq

from lachesis_configs.schema import Weights
from lachesis_learner.exchange import Exchange, ExchangeEnded, refusal
from lachesis_transport.client import QueueError, QueueRestarted
from lachesis_transport.messages import pack, unpack
from lachesis_transport.sockets import open_socket
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import FOLDER, LogFiles

STATE = {"current": 0, "step": 0, "finished": False, "final": None}
WELCOME = {"run_name": "toy", "batch_groups": 2, "staleness_max": 1, "steps": 4, "state": STATE, "queue": "q"}
FENCED = {"ok": False, "code": "fenced", "error": "learner 'learner' was superseded by a newer one"}
STRANGER = {"ok": False, "code": "hello", "error": "expected a hello"}

pytestmark = pytest.mark.trio


async def answer(socket, *, fence_after: int):
    """A queue that welcomes a learner `fence_after` times, does not know it, and then has a newer one."""
    hellos = 0
    while True:
        route, frame = await socket.receive()
        message = unpack(frame.buffer)
        hello = message["op"] == "hello"
        hellos += hello
        reply = STRANGER
        if hello:
            reply = FENCED if hellos > fence_after else {"ok": True, **WELCOME}
        await socket.send([route.bytes, pack({"id": message["id"], **reply})])


async def test_a_fenced_learner_is_told_so_at_its_hello():
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as socket, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: answer(socket, fence_after=0))
        exchange = Exchange(socket.address)
        with pytest.raises(QueueError, match="hello: learner 'learner' was superseded by a newer one"):
            await trio.to_thread.run_sync(exchange.connect().result, 10)
        exchange.close()
        nursery.cancel_scope.cancel()


async def test_a_learner_that_is_fenced_later_ends_with_the_queues_reason():
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as socket, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: answer(socket, fence_after=1))
        exchange = Exchange(socket.address)
        await trio.to_thread.run_sync(exchange.connect().result, 10)
        assert exchange.consumer.queue_id == "q"
        # Its heartbeat finds out by itself.
        with pytest.raises(ExchangeEnded) as ended:
            await trio.to_thread.run_sync(exchange.submit(trio.sleep_forever).result, 10)
        assert str(refusal(ended.value)) == "hello: learner 'learner' was superseded by a newer one"
        exchange.close()
        nursery.cancel_scope.cancel()


async def serve(socket, *, queue, silent=()):
    """A queue that welcomes whoever comes and does not know them before."""
    welcomed = set()
    while True:
        route, frame = await socket.receive()
        message = unpack(frame.buffer)
        if message["op"] == "hello":
            welcomed.add(route.bytes)
            reply = {"ok": True, **WELCOME, "queue": queue}
        elif message["op"] in silent:
            continue
        else:
            known = route.bytes in welcomed and message["queue"] == queue
            reply = {"ok": True, "version": 7, "state": STATE} if known else STRANGER
        await socket.send([route.bytes, pack({"id": message["id"], **reply})])


@pytest.mark.parametrize("after", ["q", "r"])
async def test_a_request_outlives_the_queues_process_but_not_its_state(after):
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as socket, trio.open_nursery() as nursery:
        address = socket.address
        nursery.start_soon(partial(serve, socket, queue="q", silent=("reserve",)))
        exchange = Exchange(address)
        await trio.to_thread.run_sync(exchange.connect().result, 10)
        waiting = exchange.submit(exchange.consumer.reserve, 3)
        nursery.cancel_scope.cancel()
    async with open_socket(zmq.ROUTER, bind=address) as socket, trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve, socket, queue=after))
        if after == "q":
            assert await trio.to_thread.run_sync(waiting.result, 20) == 7
        else:
            with pytest.raises(QueueRestarted, match="restarted without its state: reserve is void"):
                await trio.to_thread.run_sync(waiting.result, 20)
        exchange.close()
        nursery.cancel_scope.cancel()


async def test_the_queue_knows_a_version_before_any_member_has_it():
    calls = []

    class Recorder:
        async def published(self, version):
            calls.append(("queue", version))

        async def publish(self, *, version, parent, blobs):
            calls.append(("members", version, parent, blobs))
            return SimpleNamespace(
                removed={},
                unkept=0,
                messages_refused=0,
                bytes=1,
                full_bytes=2,
                seconds=0.5,
                members=("a",),
                channel="stream",
                checksum="c",
            )

        def report(self, kind, **fields):
            calls.append((kind, fields["version"], fields["members"]))

    exchange = Exchange("tcp://127.0.0.1:1")
    exchange.consumer = exchange.publisher = Recorder()
    exchange.publish(version=4, parent=3, blobs=[b"x"]).result(10)
    exchange.close()
    assert calls == [("queue", 4), ("members", 4, 3, [b"x"]), ("publication", 4, ["a"])]


async def test_what_the_files_of_weights_held_is_an_event(tmp_path):
    layout = Layout(names=("w",), numels=(8,))
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "00000003.anchor").write_bytes(b"torn")
    files = LogFiles(folder, layout)
    assert files.restore(shards=1) is None
    reports = []
    exchange = Exchange("tcp://127.0.0.1:1")
    exchange.consumer = SimpleNamespace(report=lambda kind, **fields: reports.append((kind, fields)))
    weights = Weights(address="tcp://127.0.0.1:0")
    opened = exchange.open_publisher(weights, layout, device="cpu", files=files, kept=None)
    await trio.to_thread.run_sync(opened.result, 10)
    exchange.close()
    assert reports == [("weights_restored", {"version": None, "damaged": 1})]
