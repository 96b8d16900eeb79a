from __future__ import annotations

import importlib.util
import json
import logging
import socket as plain_socket
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio
import zmq

from lachesis_configs.schema import Config
from lachesis_transport.broker import PARKED_A_CLIENT, serve_queue
from lachesis_transport.client import QueueError, QueueRestarted, queue_status
from lachesis_transport.consumer import open_consumer
from lachesis_transport.messages import Scores, pack, unpack
from lachesis_transport.producer import Finished, open_producer
from lachesis_transport.sockets import open_socket
from lachesis_transport.store import StoreError

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)

SECONDS = 20


def config(address: str = "tcp://127.0.0.1:0", **overrides) -> Config:
    tree = {
        "run": {"name": "test", "steps": overrides.pop("steps", 3)},
        "queue": {"address": address, "batch_groups": 2, "heartbeat_seconds": 1.5, **overrides.pop("queue", {})},
        "staleness": {"max": 1, **overrides},
    }
    return Config.model_validate(tree)


@asynccontextmanager
async def queue(folder: Path, configuration: Config):
    async with trio.open_nursery() as nursery:
        with trio.fail_after(SECONDS):
            yield await nursery.start(serve_queue, configuration, folder), nursery
        nursery.cancel_scope.cancel()


def statistics(folder: Path) -> dict:
    return json.loads((folder / "queue.json").read_text())


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


async def act(producer, done: trio.Event) -> None:
    """Rollouts without a model: take tickets and put groups until the run has finished."""
    while True:
        ticket = await producer.ticket(version=producer.state.current or 0, environment="sums")
        if isinstance(ticket, Finished):
            return done.set()
        if ticket.ticket % 5 == 4:
            await producer.void(ticket.ticket, "no_variance", Scores.of([1.0, 1.0]))
            continue
        group = groups.group(ticket.ticket, [ticket.version], actor="actor-0")
        assert (await producer.put(group)).status == "accepted"
        assert (await producer.put(group)).status == "duplicate"
        await trio.sleep(0)


@pytest.mark.trio
async def test_a_run_from_first_ticket_to_finish(tmp_path):
    batches = []
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(serve_queue, config(), tmp_path)
            async with (
                open_consumer(address, "learner", "l1") as consumer,
                open_producer(address, "actor-0", "a1") as producer,
            ):
                assert (producer.welcome.run_name, producer.welcome.batch_groups, producer.welcome.steps) == (
                    "test",
                    2,
                    3,
                )
                version = await consumer.reserve(None)
                assert version == 0
                await consumer.published(version)
                producer.serving(version)
                producer.report("started", gpus=0)
                done = trio.Event()
                nursery.start_soon(act, producer, done)
                for _ in range(3):
                    batches.append(await consumer.lease(version))
                    await consumer.trained(version)
                    version = await consumer.reserve(version)
                    await consumer.published(version)
                    producer.serving(version)
                    await consumer.commit(version, f"checkpoints/{version}")
                await consumer.finish(version)
                await done.wait()
                assert (await queue_status(address))["step"] == 3
    assert [b.version for b in batches] == [0, 1, 2]
    assert all(len(b.groups) == 2 and max(b.distances.values()) <= 1 for b in batches)
    assert len({g.group_id for b in batches for g in b.groups}) == 6
    counts = statistics(tmp_path)
    assert counts["groups_trained"] == counts["groups_committed"] == 6
    assert counts["groups_accepted"] == 6 + counts["groups_left"] == counts["groups_duplicate"]
    assert (counts["bound_violations"], counts["finished"], counts["final"], counts["actors"]) == (0, True, 3, {})
    voided = counts["tickets_voided"].get("no_variance", 0)
    assert sum(b.scores.groups for b in batches) >= 6
    assert voided == len(events(tmp_path, "voided")) - counts["tickets_voided"].get("finished", 0)
    assert [e["groups"] for e in events(tmp_path, "trained")] == [[g.group_id for g in b.groups] for b in batches]
    assert events(tmp_path, "started")[0]["source"] == "actor-0"


@pytest.mark.trio
async def test_garbage_is_answered_and_harms_nobody(tmp_path):
    async with queue(tmp_path, config()) as (address, _):
        async with open_producer(address, "actor-0", "a1") as producer, open_consumer(address, "l", "l1") as consumer:
            with plain_socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            async with open_socket(zmq.DEALER, connect=address) as socket:
                for frames, expected in (
                    ([b"\xff" * 40], "frame: "),
                    ([b"a", b"b"], "message: 2 frames, expected 1"),
                    ([pack({"op": "put"})], "id: missing"),
                    ([pack({"op": "hello", "id": 1, "role": "king", "name": "x", "incarnation": "y"})], "role: 'king'"),
                    (
                        [pack({"op": "hello", "id": 1, "role": "actor", "name": "../x", "incarnation": "y"})],
                        "name: '../x'",
                    ),
                    ([pack({"op": "put", "id": 3, "group": 7})], "the queue does not know this client"),
                ):
                    await socket.send(frames)
                    [answer] = await socket.receive()
                    assert unpack(answer.buffer)["ok"] is False
                    assert unpack(answer.buffer)["error"].startswith(expected)
            version = await consumer.reserve(None)
            with pytest.raises(QueueError, match="version: 0, expected one that the learner has published"):
                await producer.ticket(version=version, environment="sums")
            await consumer.published(version)
            with pytest.raises(QueueError, match=r"version: 9, expected one that .* published \(up to 0\)"):
                await producer.ticket(version=9, environment="sums")
            with pytest.raises(QueueError, match="version: 7"):
                await consumer.published(7)
            ticket = await producer.ticket(version=version, environment="sums")
            wrong = await producer.put(groups.group(ticket.ticket, [5], actor="actor-0"))
            assert (wrong.status, wrong.reason[:11]) == ("invalid", "versions: v")
            assert (await producer.put(groups.group(99, [0], actor="actor-0"))).reason.startswith(
                "ticket: 99 was never"
            )
            assert (await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))).status == "accepted"
            counts = await queue_status(address)
            assert (counts["frames_refused"], counts["groups_invalid"], counts["groups_accepted"]) == (5, 2, 1)


@pytest.mark.trio
async def test_a_second_actor_of_the_same_name_is_refused_while_the_first_lives(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("lachesis_transport.client.HEARTBEAT_SECONDS", 0.1)  # one that comes late is not missed
    async with queue(tmp_path, config()) as (address, _):
        async with open_producer(address, "actor-0", "a1"):
            with pytest.raises(QueueError, match="name: actor 'actor-0' is taken by a live actor"):
                async with open_producer(address, "actor-0", "a2"):
                    pytest.fail("two actors of one name")
            assert "actor-0: waiting for another actor to end (name: actor 'actor-0' is taken" in caplog.text


@pytest.mark.trio
async def test_a_cancelled_ticket_is_given_back(tmp_path):
    async with queue(tmp_path, config()) as (address, _):
        async with open_producer(address, "actor-0", "a1") as producer, open_consumer(address, "l", "l1") as consumer:
            await consumer.published(await consumer.reserve(None))
            held = [await producer.ticket(version=0, environment="sums") for _ in range(4)]
            for seconds in (0, 0.001, 0.05):
                with trio.move_on_after(seconds) as scope:
                    await producer.ticket(version=0, environment="sums")
                assert scope.cancelled_caught
            await producer.void(held[0].ticket, "failed")
            with trio.move_on_after(0):
                await producer.ticket(version=0, environment="sums")  # granted or not: nobody holds it
            again = await producer.ticket(version=0, environment="sums")
            await producer.void(again.ticket, "failed")
            counts = await queue_status(address)
            assert counts["live_tickets"] == 3
            assert counts["tickets_voided"]["failed"] == 2


@pytest.mark.trio
async def test_a_waiting_ticket_follows_the_version_that_the_actor_serves(tmp_path):
    async with queue(tmp_path, config(max=0)) as (address, nursery):
        async with open_producer(address, "actor-0", "a1") as producer, open_consumer(address, "l", "l1") as consumer:
            await consumer.published(await consumer.reserve(None))
            for _ in range(2):
                ticket = await producer.ticket(version=0, environment="sums")
                await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))
            granted = []

            async def ask() -> None:
                granted.append(await producer.ticket(version=0, environment="sums"))

            nursery.start_soon(ask)
            await consumer.lease(0)
            await consumer.trained(0)
            await consumer.published(await consumer.reserve(0))
            assert granted == []
            start = trio.current_time()
            producer.serving(1)
            while not granted:
                await trio.sleep(0.01)
            assert granted[0].version == 1
            assert trio.current_time() - start < 1.0  # not only when the request is repeated anyway


class Restartable:
    """A queue at one address that is stopped and started again while its clients live."""

    def __init__(self, nursery: trio.Nursery) -> None:
        with plain_socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self._nursery = nursery

    async def start(self, folder: Path) -> None:
        self._stop, self._gone = trio.Event(), trio.Event()
        await self._nursery.start(self._live, folder)

    async def _live(self, folder: Path, *, task_status) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_queue, config(self.address), folder)
            task_status.started()
            await self._stop.wait()
            nursery.cancel_scope.cancel()
        self._gone.set()

    async def stop(self) -> None:
        self._stop.set()
        await self._gone.wait()


@pytest.mark.trio
async def test_clients_wait_for_the_queue_and_survive_its_restart(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lachesis.queue")
    entered, leave = trio.Event(), trio.Event()

    async def wait_early(address: str) -> None:
        async with open_producer(address, "early", "e1"):
            entered.set()
            await leave.wait()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            queue = Restartable(nursery)
            nursery.start_soon(wait_early, queue.address)
            await trio.sleep(2.2)
            assert "waiting for the replay queue" in caplog.text
            await queue.start(tmp_path)
            await entered.wait()
            async with (
                open_producer(queue.address, "actor-0", "a1") as producer,
                open_consumer(queue.address, "l", "l1") as consumer,
            ):
                await consumer.published(await consumer.reserve(None))
                first, second, third = [await producer.ticket(version=0, environment="sums") for _ in range(3)]
                assert [t.item for t in (first, second, third)] == [0, 1, 2]
                assert (await producer.put(groups.group(first.ticket, [0], actor="actor-0"))).status == "accepted"
                await queue.stop()
                await queue.start(tmp_path)
                assert (await producer.put(groups.group(first.ticket, [0], actor="actor-0"))).status == "duplicate"
                assert (await producer.put(groups.group(second.ticket, [0], actor="actor-0"))).status == "accepted"
                batch = await consumer.lease(0)
                await queue.stop()
                await queue.start(tmp_path)
                assert await consumer.lease(0) == batch
                await consumer.trained(0)
                assert await consumer.reserve(0) == 1
                await producer.void(third.ticket, "failed")
                assert (await producer.ticket(version=0, environment="sums")).item == 2  # given back, so it comes next
                assert not events(tmp_path, "voided")[1:]
                leave.set()
            await queue.stop()
    numbers = [json.loads(line)["number"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.trio
async def test_a_queue_that_lost_its_database_is_another_queue(tmp_path):
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            queue = Restartable(nursery)
            await queue.start(tmp_path / "one")
            async with (
                open_producer(queue.address, "actor-0", "a1") as producer,
                open_consumer(queue.address, "l", "l1") as consumer,
            ):
                await consumer.published(await consumer.reserve(None))
                ticket = await producer.ticket(version=0, environment="sums")
                await queue.stop()
                await queue.start(tmp_path / "two")
                with pytest.raises(QueueRestarted, match="restarted without its state: lease is void"):
                    await consumer.lease(0)
                reply = await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))
                assert reply.status == "stale"
                assert "restarted" in reply.reason
                with pytest.raises(QueueError, match="version: 0, expected one"):
                    await producer.ticket(version=0, environment="sums")
                await producer.void(ticket.ticket, "failed")
            await queue.stop()


@pytest.mark.trio
async def test_a_learner_that_was_replaced_has_no_say_any_more(tmp_path):
    async with queue(tmp_path, config(queue={"heartbeat_seconds": 1.1})) as (address, _):
        async with open_socket(zmq.DEALER, connect=address) as frozen:

            async def ask(op: str, **fields):
                await frozen.send([pack({"op": op, "id": 1, **fields})])
                [answer] = await frozen.receive()
                return unpack(answer.buffer)

            me = {"role": "learner", "name": "learner", "incarnation": "l1"}
            name = (await ask("hello", **me))["queue"]
            assert (await ask("reserve", queue=name, parent=None))["version"] == 0
            async with open_consumer(address, "learner", "l2") as consumer:  # waits until the first one is given up
                assert await consumer.reserve(0) == 1
                assert (await ask("reserve", queue=name, parent=0))["code"] == "hello"
            for _ in range(2):
                answer = await ask("hello", **me)
                assert answer["code"] == "fenced"
                assert "was replaced by a later one" in answer["error"]


@pytest.mark.trio
async def test_many_requests_at_once_are_each_answered_without_being_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr("lachesis_transport.client.RESEND_SECONDS", 10 * SECONDS)
    many = 300
    statuses = []

    async def one(producer) -> None:
        ticket = await producer.ticket(version=0, environment="sums")
        statuses.append((await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))).status)

    async with queue(tmp_path, config(queue={"batch_groups": many})) as (address, _):
        async with (
            open_consumer(address, "learner", "l1") as consumer,
            open_producer(address, "actor-0", "a1") as producer,
        ):
            await consumer.published(await consumer.reserve(None))
            async with trio.open_nursery() as nursery:
                for _ in range(many):
                    nursery.start_soon(one, producer)
            assert statuses == ["accepted"] * many
            assert (await queue_status(address))["replies_lost"] == 0


@pytest.mark.trio
async def test_one_client_ends_shuts_out_or_bloats_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lachesis.queue")
    async with queue(tmp_path, config()) as (address, _):
        async with open_socket(zmq.DEALER, connect=address) as hostile, open_consumer(address, "l", "l1") as consumer:
            numbers = count(1)

            async def ask(op: str, **fields):
                number = next(numbers)
                await hostile.send([pack({"op": op, "id": number, **fields})])
                while True:
                    [answer] = await hostile.receive()
                    reply = unpack(answer.buffer)
                    if reply["id"] == number:
                        return reply

            hello = {"role": "actor", "incarnation": "h1"}
            for name in ("queue", "learner"):
                assert "expected one that is no other role's" in (await ask("hello", name=name, **hello))["error"]
            name = (await ask("hello", name="hostile", **hello))["queue"]
            nested: list = []
            for _ in range(300):
                nested = [nested]
            reports = [{"kind": "joined", "x": nested}, {"kind": "finished", "x": "a\nb"}]
            assert (await ask("heartbeat", queue=name, version=0, report=reports, report_number=1))["ok"]
            assert "a\nb" not in caplog.text
            await consumer.published(await consumer.reserve(None))
            ticket = (await ask("ticket", queue=name, version=0, environment="sums"))["ticket"]
            absurd = {"groups": 1, "sequences": 2**62 - 1, "total": 0.0, "squares": 0.0}
            for fields, expected in (
                ({"reason": "r", "scores": absurd}, "scores.sequences: 4611686018427387903, expected at most 4096"),
                ({"reason": "r" * 129, "scores": None}, "reason: 129 characters, expected at most 128"),
            ):
                assert (await ask("void", queue=name, ticket=ticket, **fields))["error"] == expected
            long = await ask("ticket", queue=name, version=0, environment="e" * 129)
            assert long["error"] == "environment: 129 characters, expected at most 128"
            for _ in range(PARKED_A_CLIENT + 10):
                await hostile.send(
                    [pack({"op": "ticket", "id": next(numbers), "queue": name, "version": 0, "environment": "sums"})]
                )
            with trio.move_on_after(0.5):
                while True:
                    await hostile.receive()
            last = await ask("ticket", queue=name, version=0, environment="sums")
            assert last["wait"] == f"{PARKED_A_CLIENT} requests of actor hostile wait already"
            with trio.move_on_after(1.0) as scope:
                await consumer.lease(0)  # the learner waits for groups, and is not turned away
            assert scope.cancelled_caught


@pytest.mark.trio
async def test_only_a_queue_that_got_the_folder_for_itself_has_opened_it(tmp_path):
    opened = []
    async with trio.open_nursery() as nursery:
        with trio.fail_after(SECONDS):
            await nursery.start(partial(serve_queue, config(), tmp_path, opened=lambda: opened.append("first")))
            with pytest.raises(StoreError, match=r"queue\.db: another process has this queue open"):
                await serve_queue(config(), tmp_path, opened=lambda: opened.append("second"))
        nursery.cancel_scope.cancel()
    assert opened == ["first"]


@pytest.mark.trio
async def test_a_queue_whose_folder_is_removed_ends_with_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr("lachesis_transport.sqlite_store.CHECK_SECONDS", 0.0)
    folder = tmp_path / "run"
    remove = partial(folder.rename, tmp_path / "away")
    with trio.fail_after(SECONDS), pytest.raises(StoreError, match=r"queue\.db: was removed or replaced"):
        await serve_queue(config(), folder, opened=remove)


@pytest.mark.trio
async def test_a_repeated_lease_gets_its_batch_once_a_connection(tmp_path):
    async with queue(tmp_path, config()) as (address, _):
        async with open_producer(address, "actor-0", "a1") as producer:
            batches = []
            for incarnation in range(2):
                async with open_socket(zmq.DEALER, connect=address) as socket:

                    async def ask(op: str, number: int, **fields) -> None:
                        await socket.send([pack({"op": op, "id": number, **fields})])

                    async def hear() -> dict:
                        return unpack((await socket.receive())[-1].buffer)

                    await ask("hello", 1, role="learner", name="learner", incarnation="l1")
                    name = (await hear())["queue"]
                    if not incarnation:
                        await ask("reserve", 2, queue=name, parent=None)
                        await hear()
                        await ask("published", 3, queue=name, version=0)
                        await hear()
                        for _ in range(2):
                            ticket = await producer.ticket(version=0, environment="sums")
                            await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))
                    for _ in range(3):
                        await ask("lease", 4, queue=name, version=0)
                    await ask("heartbeat", 5, queue=name, version=None, report=[], report_number=1)
                    await ask("lease", 6, queue=name, version=0)
                    while (reply := await hear())["id"] != 6 or "batch" not in reply:
                        batches += [(incarnation, reply["id"])] if "batch" in reply else []
                    batches.append((incarnation, 6))
            assert batches == [(0, 4), (0, 6), (1, 4), (1, 6)]


@asynccontextmanager
async def slow_link(address: str, *, stands_still_after: int, seconds: float):
    """An address whose connections to `address` stand still for so long after so many bytes from the client."""

    async def forward(source: trio.SocketStream, sink: trio.SocketStream, limit: float) -> None:
        passed = 0
        async for part in source:
            if passed < limit <= passed + len(part):
                await trio.sleep(seconds)
            passed += len(part)
            await sink.send_all(part)

    async def relay(client: trio.SocketStream) -> None:
        queue = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
        async with trio.open_nursery() as both:
            both.start_soon(forward, client, queue, stands_still_after)
            both.start_soon(forward, queue, client, float("inf"))

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, relay, [listener])
        yield f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_put_may_take_longer_than_a_silent_actor_lives(tmp_path):
    async with (
        queue(tmp_path, config(queue={"heartbeat_seconds": 1.5})) as (address, _),
        slow_link(address, stands_still_after=1 << 20, seconds=4.0) as link,
        open_consumer(address, "l", "l1") as consumer,
    ):
        await consumer.published(await consumer.reserve(None))
        async with open_producer(link, "actor-0", "a1") as producer:
            ticket = await producer.ticket(version=0, environment="sums")
            large = groups.group(ticket.ticket, [0] * 200_000, actor="actor-0")
            assert (await producer.put(large)).status == "accepted"
        assert not events(tmp_path, "voided")


@pytest.mark.trio
async def test_among_equals_the_actor_that_waited_longest_gets_the_ticket(tmp_path):
    async with (
        queue(tmp_path, config()) as (address, nursery),
        open_consumer(address, "l", "l1") as consumer,
        open_producer(address, "holder", "1") as holder,
        open_producer(address, "late", "1") as late,
        open_producer(address, "soon", "1") as soon,
    ):
        await consumer.published(await consumer.reserve(None))
        held = [await holder.ticket(version=0, environment="sums") for _ in range(4)]
        got: list[str] = []

        async def ask(producer, name: str) -> None:
            await producer.ticket(version=0, environment="sums")
            got.append(name)

        for producer, name in ((soon, "soon"), (late, "late")):
            nursery.start_soon(ask, producer, name)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            with pytest.raises(QueueError, match="never issued"):  # what was sent before this has arrived
                await producer.void(1000, "cancelled")
        for number, ticket in enumerate(held[:2], 1):
            await holder.void(ticket.ticket, "cancelled")
            while len(got) < number:
                await trio.sleep(0.001)
        assert got == ["soon", "late"]
