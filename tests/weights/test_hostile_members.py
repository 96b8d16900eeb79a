"""Members that lie, over a socket of their own: the publisher refuses them, and publications go on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import zmq

sys.path.insert(0, str(Path(__file__).parent))

from fleet import joined, serving, until
from model import Learner, write_model

from lachesis_learner import fetches, member_links
from lachesis_learner.publisher import Publisher
from lachesis_transport.messages import pack, unpack
from lachesis_transport.sockets import Socket, open_socket


@asynccontextmanager
async def liar(publisher: Publisher) -> AsyncIterator[Socket]:
    async with open_socket(zmq.DEALER, connect=publisher.address) as socket:
        yield socket


async def ask(socket: Socket, **message: Any) -> dict[str, Any]:
    """What is answered, beside news."""
    await socket.send([pack(message)])
    with trio.fail_after(15):
        while (answer := unpack((await socket.receive())[0].buffer))["op"] == "news":
            pass
    return answer


async def hello(socket: Socket, learner: Learner, **lies: Any) -> dict[str, Any]:
    fields = {"actor": "liar", "workers": 1, "nonce": "n", "channel": "auto", "layout": learner.layout.to_wire()}
    return await ask(socket, op="hello", **(fields | lies))


@pytest.mark.trio
@pytest.mark.parametrize("workers", [0, -1, 129, 2**31 - 1, 2**63 - 1])
async def test_a_number_of_workers_that_no_actor_has_is_refused(tmp_path: Path, workers: int) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, liar(publisher) as socket:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        answer = await hello(socket, learner, workers=workers)
        assert (answer["op"], answer["error"]) == ("refused", f"workers: {workers}, expected 1 to 128")
        learner.step()
        report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
        assert (report.channel, report.members, report.removed) == ("none", (), {})


@pytest.mark.trio
async def test_members_without_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_links, "MAX_MEMBERS", 2)
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, liar(publisher) as socket:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        for actor, op in (("a", "welcome"), ("b", "welcome"), ("c", "refused"), ("b", "welcome")):
            answer = await hello(socket, learner, actor=actor)
            assert answer["op"] == op
        await socket.send([pack({"op": "bye", "token": answer["token"]})])
        assert (await hello(socket, learner, actor="c"))["op"] == "welcome"


@pytest.mark.trio
@pytest.mark.parametrize("numel", [-1, 2**63, 2**64 - 1])
async def test_a_layout_that_no_model_has_is_refused(tmp_path: Path, numel: int) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, liar(publisher) as socket:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        lie = {"names": list(learner.layout.names), "numels": [numel, *learner.layout.numels[1:]]}
        answer = await hello(socket, learner, layout=lie)
        assert answer["op"] == "refused"
        assert answer["error"].startswith("layout.numels: ")


@pytest.mark.trio
async def test_members_that_do_not_read_hold_bounded_memory_and_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, liars = 1 << 20, 6
    monkeypatch.setattr(fetches, "BUDGET_BYTES", 12 * chunk)
    monkeypatch.setattr(fetches, "LIMIT_BYTES", (12 + liars + 1) * chunk)
    learner = Learner(write_model(tmp_path, scale=200), ranks=1)
    async with serving(learner) as publisher, AsyncExitStack() as stack:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        await wait_until_folded(publisher)
        held = publisher._links._fetches
        largest = 0
        for i in range(liars):
            context = stack.enter_context(zmq.Context())
            socket = stack.enter_context(context.socket(zmq.DEALER))
            for option in (zmq.RCVHWM, zmq.RCVBUF):
                socket.setsockopt(option, 1)
            socket.linger = 0
            socket.connect(publisher.address)
            token = await greet(socket, learner, f"liar-{i}")
            for number in range(40):
                offset = chunk * (number % 6)
                fields = {"version": 0, "anchor": True, "offset": offset, "size": chunk, "id": number // 8}
                socket.send(pack({"op": "fetch", "token": token, **fields}))
                await trio.sleep(0.005)
                largest = max(largest, held.nbytes)
        assert 12 * chunk < largest <= fetches.LIMIT_BYTES
        async with joined(publisher, tmp_path) as member:
            member.assert_serves(learner)
            learner.step()
            report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
            assert "actor-0" in report.members
        assert held.nbytes <= fetches.LIMIT_BYTES


async def wait_until_folded(publisher: Publisher) -> None:
    await until(lambda: publisher._log.base is not None)


async def greet(socket: zmq.Socket[bytes], learner: Learner, actor: str) -> int:
    """Join and ask for an anchor, over a socket that is read only here; the token."""
    fields = {"workers": 1, "nonce": "n", "channel": "stream", "layout": learner.layout.to_wire()}
    socket.send(pack({"op": "hello", "actor": actor, **fields}))
    token: int = unpack(await trio.to_thread.run_sync(socket.recv))["token"]
    socket.send(pack({"op": "plan", "token": token, "id": 0, "checksum": ""}))
    while unpack(await trio.to_thread.run_sync(socket.recv))["op"] != "plan":
        pass
    return token


@pytest.mark.trio
async def test_a_flood_of_garbage_leaves_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, liar(publisher) as socket:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        for _ in range(300):
            assert (await ask(socket, op="alive"))["error"] == "token: missing"
        assert [r.getMessage() for r in caplog.records if "refused" in r.getMessage()] == [
            "refused a message: token: missing"
        ]
        learner.step()
        assert (await publisher.publish(version=1, parent=0, blobs=learner.blobs())).messages_refused == 300


@pytest.mark.trio
@pytest.mark.parametrize("tensors", [5, 20_000])
async def test_who_sends_more_than_a_member_has_to_say_is_disconnected(tensors: int) -> None:
    parameters = {f"model.layers.{i:05}.weight": torch.zeros(1, dtype=torch.bfloat16) for i in range(tensors)}
    learner = Learner(parameters, ranks=1)
    layout = len(pack(learner.layout.to_wire()))
    most = max(1 << 20, 2 * (layout + len(pack({"layout": None}))))
    async with serving(learner) as publisher, liar(publisher) as socket:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        assert (await hello(socket, learner))["op"] == "welcome"
        assert (await ask(socket, op="?", filling=bytes(most - 1000)))["op"] == "refused"
        async with liar(publisher) as boaster:
            await boaster.send([bytes(most + 1000)])
            with trio.move_on_after(1):
                await boaster.receive()
                pytest.fail("answered")
        assert (await hello(socket, learner))["op"] == "welcome"


@pytest.mark.trio
async def test_who_claims_a_version_to_come_or_other_weights_is_refused_and_not_expected(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, liar(publisher) as socket:
        first = await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        token = (await hello(socket, learner))["token"]
        answer = await ask(socket, op="staged", token=token, version=1, checksum=first.checksum)
        assert answer["error"] == "version: 1, expected at most 0, the newest"
        answer = await ask(socket, op="staged", token=token, version=0, checksum="of others")
        assert answer["error"] == f"checksum: of others of version 0, expected {first.checksum}"
        async with joined(publisher, tmp_path):
            for version in (1, 2):
                learner.step()
                report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                assert (report.members, report.removed, report.channel) == (("actor-0",), {}, "collective")


@pytest.mark.trio
async def test_a_publication_ends_when_who_it_waits_for_joins_again(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner, channel="stream", deadline=60.0) as publisher, liar(publisher) as socket:
        first = await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        token = (await hello(socket, learner))["token"]
        await socket.send([pack({"op": "staged", "token": token, "version": 0, "checksum": first.checksum})])
        assert (await ask(socket, op="plan", token=token, id=1, checksum=first.checksum))["held"] == 0

        async def join_again() -> None:
            while publisher.members:
                await trio.sleep(0.01)
            await hello(socket, learner, nonce="another")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join_again)
            learner.step()
            with trio.fail_after(30):
                report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
        assert (report.members, report.removed) == ((), {"liar": "joined again"})
