"""The real publisher with real weight clients and receiver threads, without vLLM, over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

sys.path.insert(0, str(Path(__file__).parent))

from member_process import CopyingEngine, member_config
from model import Learner, write_model

from lachesis_actors.weight_client import follow_weights
from lachesis_learner.publisher import Publisher
from lachesis_transport.weights.mirror import Mirror

PROCESS = Path(__file__).with_name("member_process.py")


@asynccontextmanager
async def serving(learner: Learner, *, channel: str = "collective", deadline: float = 10.0) -> AsyncIterator[Publisher]:
    publisher = Publisher(
        address="tcp://127.0.0.1:0",
        layout=learner.layout,
        channel=channel,  # type: ignore[arg-type]
        deadline_seconds=deadline,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.serve)
        yield publisher
        nursery.cancel_scope.cancel()


class Member:
    """A weight client in this process."""

    def __init__(self, publisher: Publisher, folder: Path, *, name: str, workers: int, deadline: float) -> None:
        self.engine = CopyingEngine(folder, workers=workers)
        self.events: list[dict[str, Any]] = []
        self.active: list[int] = []
        self.follow = partial(
            follow_weights,
            config=member_config(publisher.address, workers=workers, deadline=deadline),
            actor=name,
            engine=self.engine,
            report=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            on_active=self.active.append,
        )

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def assert_serves(self, learner: Learner) -> None:
        for bits in self.engine.served:
            mirror = Mirror(learner.layout)
            mirror.bits[:] = bits
            for name, tensor in mirror.tensors():
                assert torch.equal(tensor.view(torch.int16), learner.tensors[name].view(-1).view(torch.int16)), name


@asynccontextmanager
async def joined(
    publisher: Publisher, folder: Path, *, name: str = "actor-0", workers: int = 1, deadline: float = 10.0
) -> AsyncIterator[Member]:
    member = Member(publisher, folder, name=name, workers=workers, deadline=deadline)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(member.follow)
            await until(lambda: name in publisher.members)
            yield member
            nursery.cancel_scope.cancel()
    finally:
        member.engine.stop()


async def until(condition: Callable[[], bool], *, seconds: float = 15.0) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


@pytest.mark.trio
@pytest.mark.parametrize("channel", ["collective", "stream"])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (3, 2)])
async def test_members_serve_each_version_bit_for_bit(tmp_path: Path, channel: str, ranks: int, workers: int) -> None:
    learner = Learner(write_model(tmp_path), ranks=ranks)
    async with serving(learner, channel=channel) as publisher:
        first = await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        assert (first.members, first.channel) == ((), "none")
        async with (
            joined(publisher, tmp_path, workers=workers) as member,
            joined(publisher, tmp_path, name="b") as other,
        ):
            assert member.active == [0]
            assert member.engine.calls == ["label 0"]
            for version in range(1, 5):
                learner.step()
                report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                assert report.channel == channel
                assert sorted(report.members) == ["actor-0", "b"]
                assert report.removed == {}
                assert report.bytes < report.full_bytes / 8
                assert report.seconds < 5
                for each in (member, other):
                    await until(lambda each=each, version=version: each.active[-1] == version)
                    each.assert_serves(learner)
                    assert each.events[-1]["checksum"] == report.checksum
            assert member.active == [0, 1, 2, 3, 4]
            assert member.engine.calls[1:4] == ["pause True", "update 1", "resume"]
            assert "healed" not in member.kinds()
            assert member.engine.served_label == "4"


@pytest.mark.trio
async def test_a_late_joiner_gets_an_anchor_and_then_deltas(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path, scale=200), ranks=2)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        for version in range(1, 25):
            learner.step(share=0.5 if version == 1 else 0.001)
            await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
        async with joined(publisher, tmp_path) as late:
            assert late.active == [24]
            late.assert_serves(learner)
            learner.step()
            report = await publisher.publish(version=25, parent=24, blobs=learner.blobs())
            assert report.members == ("actor-0",)
            await until(lambda: late.active[-1] == 25)
            late.assert_serves(learner)


@pytest.mark.trio
async def test_a_joiner_waits_for_the_first_version(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, trio.open_nursery() as nursery:
        member = Member(publisher, tmp_path, name="early", workers=1, deadline=10.0)
        nursery.start_soon(member.follow)
        await trio.sleep(0.3)
        assert member.active == []
        learner.step()
        await publisher.publish(version=3, parent=None, blobs=learner.blobs(anchor=True))
        await until(lambda: member.active == [3])
        member.assert_serves(learner)
        nursery.cancel_scope.cancel()
        member.engine.stop()


@pytest.mark.trio
async def test_an_anchor_after_a_resume_replaces_what_members_hold(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=2)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with joined(publisher, tmp_path) as member:
            learner.step()
            await publisher.publish(version=1, parent=0, blobs=learner.blobs())
            learner.step(share=0.9)
            report = await publisher.publish(version=4, parent=0, blobs=learner.blobs(anchor=True))
            assert report.members == ("actor-0",)
            await until(lambda: member.active[-1] == 4)
            member.assert_serves(learner)


@pytest.mark.trio
async def test_a_publisher_that_comes_back_finds_its_members_again(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with trio.open_nursery() as nursery:
        async with serving(learner) as publisher:
            address = publisher.address
            await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
            member = Member(publisher, tmp_path, name="a", workers=1, deadline=10.0)
            await nursery.start(member.follow)
        resumed = Learner(learner.tensors, ranks=2)
        resumed.step()
        await until(lambda: free(address))
        publisher = Publisher(address=address, layout=resumed.layout, channel="collective", deadline_seconds=10.0)
        await nursery.start(publisher.serve)
        await publisher.publish(version=7, parent=None, blobs=resumed.blobs(anchor=True))
        await until(lambda: member.active[-1] == 7 and publisher.members == ("a",))
        member.assert_serves(resumed)
        resumed.step()
        report = await publisher.publish(version=8, parent=7, blobs=resumed.blobs())
        assert report.members == ("a",)
        assert report.channel == "collective"
        nursery.cancel_scope.cancel()
        member.engine.stop()


def free(address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            return False
        return True


@pytest.mark.trio
async def test_a_corrupt_mirror_is_noticed_and_healed_from_an_anchor(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with joined(publisher, tmp_path) as member:
            member.engine.receivers[0].mirror.bits[11] ^= 4
            learner.step()
            await publisher.publish(version=1, parent=0, blobs=learner.blobs())
            await until(lambda: member.active[-1] == 1)
            member.assert_serves(learner)
            assert member.kinds().count("checksum_mismatch") == 1
            assert member.kinds().count("healed") == 1


@pytest.mark.trio
async def test_finish_lets_members_return_with_the_last_version(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher, trio.open_nursery() as nursery:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        member = Member(publisher, tmp_path, name="a", workers=1, deadline=10.0)
        await nursery.start(member.follow)
        learner.step()
        await publisher.publish(version=1, parent=0, blobs=learner.blobs())
        with trio.fail_after(5):
            await publisher.finish()
        assert publisher.members == ()
        assert member.active == [0, 1]
        member.engine.stop()
        await nursery.start(Member(publisher, tmp_path, name="after", workers=1, deadline=10.0).follow)


@pytest.mark.trio
async def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path / "learner"), ranks=1)
    write_model(tmp_path / "actor", scale=2)
    async with serving(learner) as publisher:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with joined(publisher, tmp_path / "actor"):
                pass
        assert "embed.weight: 16000 elements here, 32000 there" in str(caught.value.exceptions[0])


@pytest.mark.trio
async def test_what_does_not_follow_is_refused(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=2)
    async with serving(learner) as publisher:
        blobs = learner.blobs(anchor=True)
        with pytest.raises(ValueError, match=r"blobs\[0\]: of rank 1 of 2, expected rank 0 of 2"):
            await publisher.publish(version=0, parent=None, blobs=blobs[::-1])
        await publisher.publish(version=0, parent=None, blobs=blobs)
        with pytest.raises(ValueError, match="parent: 5, expected the newest version 0"):
            await publisher.publish(version=6, parent=5, blobs=learner.blobs())


class Process:
    """An actor without vLLM in a process of its own."""

    def __init__(self, publisher: Publisher, folder: Path, *, name: str, deadline: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.popen = subprocess.Popen(
            [sys.executable, str(PROCESS), publisher.address, name, str(folder), "1", str(deadline)],
            stdout=subprocess.PIPE,
        )

    async def read(self) -> None:
        assert self.popen.stdout is not None
        stream = trio.lowlevel.FdStream(os.dup(self.popen.stdout.fileno()))
        buffer = b""
        async for piece in stream:
            buffer += piece
            *lines, buffer = buffer.split(b"\n")
            self.events.extend(json.loads(line) for line in lines)

    def active(self) -> list[int]:
        return [event["version"] for event in self.events if event["kind"] == "active"]


@pytest.mark.trio
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_member_that_dies_or_freezes_costs_one_deadline_once(
    tmp_path: Path, fault: signal.Signals, when: str
) -> None:
    deadline = 2.5
    learner = Learner(write_model(tmp_path, scale=1000), ranks=1)
    async with serving(learner, deadline=deadline) as publisher, trio.open_nursery() as nursery:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        victim = Process(publisher, tmp_path, name="victim", deadline=deadline)
        try:
            nursery.start_soon(victim.read)
            async with joined(publisher, tmp_path, deadline=deadline) as healthy:
                await until(lambda: set(publisher.members) == {"actor-0", "victim"}, seconds=60)
                learner.step(share=0.9)
                both = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
                assert sorted(both.members) == ["actor-0", "victim"]
                await until(lambda: victim.active()[-1] == 1)

                learner.step(share=0.9)  # 15 MB of payload: enough for a fault in the middle of it
                blobs = learner.blobs()
                if when == "before":
                    victim.popen.send_signal(fault)
                else:
                    nursery.start_soon(strike, victim, fault)
                report = await publisher.publish(version=2, parent=1, blobs=blobs)
                assert report.members == ("actor-0",)
                assert list(report.removed) == ["victim"]
                assert deadline - 0.5 < report.seconds < deadline + 0.5
                await until(lambda: healthy.active[-1] == 2)
                healthy.assert_serves(learner)

                learner.step()
                after = await publisher.publish(version=3, parent=2, blobs=learner.blobs())
                assert after.members == ("actor-0",)
                assert after.channel == "collective"
                assert after.seconds < deadline / 2

                if fault == signal.SIGSTOP:
                    victim.popen.send_signal(signal.SIGCONT)
                    await until(lambda: victim.active()[-1] == 3 and len(publisher.members) == 2, seconds=30)
                    learner.step()
                    again = await publisher.publish(version=4, parent=3, blobs=learner.blobs())
                    assert sorted(again.members) == ["actor-0", "victim"]
                    assert again.channel == "collective"
                    await until(lambda: victim.active()[-1] == 4)
                    activations = [e for e in victim.events if e["kind"] == "activation"]
                    assert activations[-1]["checksum"] == again.checksum
        finally:
            victim.popen.kill()
            victim.popen.wait()
            nursery.cancel_scope.cancel()


async def strike(victim: Process, fault: signal.Signals) -> None:
    await trio.sleep(0.008)
    victim.popen.send_signal(fault)


def test_non_finite_weights_are_refused_by_name(tmp_path: Path) -> None:
    tensors = write_model(tmp_path)
    learner = Learner(tensors, ranks=2)
    learner.blobs(anchor=True)
    tensors["a.weight"].view(-1)[2_000] = float("inf")
    tensors["embed.weight"].view(-1)[5] += 1
    learner.encoders[0].encode()
    with pytest.raises(ValueError, match=r"a\.weight\[2000\]: inf, expected a finite weight"):
        learner.encoders[1].encode()
    tensors["a.weight"].view(-1)[2_000] = 1.0
    blob = learner.encoders[1].encode()
    assert (blob.changed, blob.total) == (1, sum(t.numel() for t in tensors.values()) - learner_total(learner))


def learner_total(learner: Learner) -> int:
    return learner.encoders[0].encode().total


def test_encoders_want_bf16_parts_where_they_belong() -> None:
    from lachesis_learner.shards import Shard, ShardEncoder

    flat = torch.zeros(5, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"w: torch.bfloat16\[5\] from 0, expected torch.bfloat16\[5\] from 5 on rank 1"
    ):
        ShardEncoder([Shard(name="w", flat=flat, start=0, numel=10)], rank=1, ranks=2)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        ShardEncoder([Shard(name="w", flat=flat.float(), start=0, numel=5)], rank=0, ranks=1)
    encoder = ShardEncoder([Shard(name="w", flat=flat, start=0, numel=5)], rank=0, ranks=1)
    with pytest.raises(ValueError, match="anchor: false on the first encode"):
        encoder.encode()
    np.testing.assert_equal(encoder.encode(anchor=True).changed, 5)
