"""Members in processes of their own that die or freeze in the middle of a transfer, and come back."""

from __future__ import annotations

import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Process, actor, joined, joined_after_first, serving, until
from model import Learner, write_model

TRIES = 5
"""Publications until a fault has hit the middle of one."""


class Missed(Exception):
    """The victim was held up before its signal until the transfer was complete: there was no fault in the middle."""


def scrambled(learner: Learner) -> list[bytes]:
    """15 MB of payload: something to be in the middle of."""
    learner.scramble()
    return learner.blobs()


def activated(process: Process) -> dict[int, str]:
    """Checksum of each version that it has activated."""
    return {event["version"]: event["checksum"] for event in process.of("activation")}


@pytest.mark.trio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("channel", ["collective", "stream"])
async def test_a_fault_in_the_middle_costs_one_deadline_once(tmp_path: Path, fault: str, channel: str) -> None:
    for attempt in range(TRIES):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        hit = True
        try:
            await strike_one(folder, fault, channel)
        except* Missed:
            hit = False
        if hit:
            return
    pytest.fail("the fault never hit the middle of a transfer")


async def strike_one(tmp_path: Path, fault: str, channel: str) -> None:
    deadline = 6.0
    learner = Learner(write_model(tmp_path, scale=500), ranks=2)
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(serving(learner, channel=channel, deadline=deadline))
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        healthy = await stack.enter_async_context(joined(publisher, tmp_path, deadline=deadline))
        victim = await stack.enter_async_context(
            actor(publisher.address, tmp_path, name="victim", deadline=deadline, strike=f"{channel}:{fault}")
        )
        await until(lambda: set(publisher.members) == {"actor-0", "victim"}, seconds=60)

        for version in range(1, 1 + TRIES):
            blobs = await trio.to_thread.run_sync(scrambled, learner)  # beside the publisher, as in a learner
            report = await publisher.publish(version=version, parent=version - 1, blobs=blobs)
            if victim.of("struck"):
                break
            assert sorted(report.members) == ["actor-0", "victim"]
        if "victim" in report.members:
            raise Missed
        assert report.members == ("actor-0",)
        # Silence ends a membership after the deadline, too: counted from the last word, perhaps one before the round.
        reasons = [f"version {version} not staged within {deadline:g} s", f"silent for {deadline:g} s"]
        # A dead member is missed sooner than that, unless the machine is busy; a frozen one never is.
        assert report.removed["victim"] in reasons + ["disconnected for 3 s"] * (fault == "SIGKILL")
        assert list(report.removed) == ["victim"]
        # A frozen member's system may have taken the rest: then the collective is complete for the others.
        assert report.channel == channel or (channel, report.channel) == ("collective", "collective+stream")
        assert report.seconds < deadline + 0.5
        await until(lambda: healthy.active[-1] == version)
        healthy.assert_serves(learner)
        assert version not in victim.active()

        learner.step()
        after = await publisher.publish(version=version + 1, parent=version, blobs=learner.blobs())
        assert (after.members, after.removed, after.channel) == (("actor-0",), {}, channel)
        assert after.seconds < deadline / 2

        if fault == "SIGSTOP":
            victim.popen.send_signal(signal.SIGCONT)
            back = victim
        else:
            assert victim.popen.wait(5) == -signal.SIGKILL
            back = await stack.enter_async_context(actor(publisher.address, tmp_path, name="victim", deadline=deadline))
        await until(lambda: version + 1 in activated(back) and len(publisher.members) == 2, seconds=60)
        assert activated(back)[version + 1] == after.checksum
        if fault == "SIGSTOP":
            assert [e["reason"] for e in back.of("healed")] == ["the learner removed this actor"]

        learner.step()
        again = await publisher.publish(version=version + 2, parent=version + 1, blobs=learner.blobs())
        assert sorted(again.members) == ["actor-0", "victim"]
        assert again.channel == channel
        await until(lambda: version + 2 in activated(back))
        assert activated(back)[version + 2] == again.checksum
        await until(lambda: healthy.active[-1] == version + 2)
        healthy.assert_serves(learner)


@pytest.mark.trio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_fault_between_publications_costs_one_deadline_once(tmp_path: Path, fault: signal.Signals) -> None:
    deadline = 2.5
    learner = Learner(write_model(tmp_path), ranks=1)
    async with (
        serving(learner, deadline=deadline) as publisher,
        joined_after_first(publisher, learner, tmp_path, deadline) as healthy,
        actor(publisher.address, tmp_path, name="victim", deadline=deadline) as victim,
    ):
        await until(lambda: set(publisher.members) == {"actor-0", "victim"}, seconds=60)
        victim.popen.send_signal(fault)
        learner.step()
        report = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
        assert (report.members, list(report.removed)) == (("actor-0",), ["victim"])
        assert report.seconds < deadline + 0.5
        learner.step()
        after = await publisher.publish(version=2, parent=1, blobs=learner.blobs())
        assert (after.members, after.removed, after.channel) == (("actor-0",), {}, "collective")
        assert after.seconds < deadline / 2
        await until(lambda: healthy.active[-1] == 2)
        healthy.assert_serves(learner)


@pytest.mark.trio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("channel", ["collective", "stream"])
async def test_a_dead_member_costs_less_than_a_long_deadline(tmp_path: Path, channel: str) -> None:
    deadline = 60.0
    learner = Learner(write_model(tmp_path), ranks=1)
    async with (
        serving(learner, deadline=deadline, channel=channel) as publisher,
        joined_after_first(publisher, learner, tmp_path, deadline),
        actor(publisher.address, tmp_path, name="victim", deadline=deadline) as victim,
    ):
        await until(lambda: set(publisher.members) == {"actor-0", "victim"}, seconds=60)
        learner.step()
        both = await publisher.publish(version=1, parent=0, blobs=learner.blobs())
        assert len(both.members) == 2
        victim.popen.kill()
        victim.popen.wait()
        learner.step()
        report = await publisher.publish(version=2, parent=1, blobs=learner.blobs())
        assert report.members == ("actor-0",)
        assert report.removed == {"victim": "disconnected for 3 s"}
        assert report.seconds < deadline / 4
