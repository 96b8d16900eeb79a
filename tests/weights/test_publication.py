"""The real publisher with real weight clients and receiver threads, without vLLM, over loopback."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Member, free, joined, serving, until
from model import Learner, write_model

from lachesis_actors import weight_link
from lachesis_learner.publisher import Publisher
from lachesis_transport.weights.codec import CodecError


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
async def test_an_actor_with_a_slow_link_streams_while_others_use_the_collective(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=2)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with joined(publisher, tmp_path, name="slow", channel="stream") as slow:
            learner.step()
            report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
            assert (report.members, report.channel) == (("slow",), "stream")
            async with joined(publisher, tmp_path, name="fast", workers=2) as fast:
                received = trace_collectives(slow, fast)
                for version in (2, 3):
                    learner.step()
                    report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                    assert (sorted(report.members), report.channel) == (["fast", "slow"], "collective")
                    for member in (slow, fast):
                        await until(lambda member=member, version=version: member.active[-1] == version)
                        member.assert_serves(learner)
                assert received == [0, 2 * 2]


def trace_collectives(*members: Member) -> list[int]:
    """Deltas that each member's receivers take from collectives from now on."""
    counts = [0] * len(members)
    for i, member in enumerate(members):
        for receiver in member.engine.receivers:
            obey = receiver.obey

            def count(message: dict[str, Any], frame: Any = None, *, i: int = i, obey: Any = obey) -> dict[str, Any]:
                counts[i] += message["op"] == "receive"
                return obey(message, frame)

            receiver.obey = count  # type: ignore[method-assign]
    return counts


@pytest.mark.trio
async def test_what_is_said_to_another_publisher_is_fenced(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    tokens = []
    for _ in range(2):
        async with serving(learner) as publisher:
            await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
            async with joined(publisher, tmp_path):
                tokens += [member.token for member in publisher._membership.members]
    assert abs(tokens[0] - tokens[1]) > 1_000_000


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
async def test_a_publisher_that_comes_back_finds_its_members_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_link, "UNANSWERED", 1)
    caplog.set_level(logging.INFO, "lachesis.weights")
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
        await until(lambda: "the learner has been silent" in caplog.text)
        publisher = Publisher(address=address, layout=resumed.layout, channel="collective", deadline_seconds=10.0)
        await nursery.start(publisher.serve)
        await publisher.publish(version=7, parent=None, blobs=resumed.blobs(anchor=True))
        await until(lambda: member.active[-1] == 7 and publisher.members == ("a",))
        member.assert_serves(resumed)
        resumed.step()
        report = await publisher.publish(version=8, parent=7, blobs=resumed.blobs())
        assert report.members == ("a",)
        assert report.channel == "collective"
        said = [record.getMessage() for record in caplog.records if "the learner" in record.getMessage()]
        assert said[0] == "joined the learner at version 0"
        assert said[1:] == [
            "the learner has been silent for 1 s, after version 0",
            "the learner is back: it goes on with version 7",
        ]
        nursery.cancel_scope.cancel()
        member.engine.stop()


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
@pytest.mark.parametrize("error", [CodecError("format: version 9"), TypeError("nobody expects this")])
async def test_a_delta_that_a_member_cannot_apply_costs_it_an_anchor(tmp_path: Path, error: Exception) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        async with joined(publisher, tmp_path) as member:

            def refuse(*arguments: Any, **fields: Any) -> int:
                raise error

            member.engine.receivers[0].mirror.apply = refuse  # type: ignore[method-assign]
            for version in (1, 2):
                learner.step()
                report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                assert (report.members, report.removed) == (("actor-0",), {})
                await until(lambda version=version: member.active[-1] == version)
                member.assert_serves(learner)
            assert member.kinds().count("healed") == 2


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


@pytest.mark.trio
async def test_an_address_in_use_is_one_error_that_names_the_setting(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path), ranks=1)
    async with serving(learner) as publisher:
        taken = f"weights.address: '{publisher.address}' cannot be bound: Address already in use"
        with pytest.RaisesGroup(pytest.RaisesExc(OSError, match=taken), flatten_subgroups=True):
            async with serving(learner, address=publisher.address):
                pytest.fail("bound twice")


def test_non_finite_weights_are_refused_by_name(tmp_path: Path) -> None:
    tensors = write_model(tmp_path)
    learner = Learner(tensors, ranks=2)
    learner.blobs(anchor=True)
    tensors["a.weight"].view(-1)[2_000] = float("inf")
    learner.encoders[0].encode()
    with pytest.raises(ValueError, match=r"a\.weight\[2000\]: inf, expected a finite weight"):
        learner.encoders[1].encode()


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
    with pytest.raises(ValueError, match="anchor: false, expected true"):
        encoder.encode()
    np.testing.assert_equal(encoder.encode(anchor=True).changed, 5)
