"""A learner that is killed and comes back, with actors that stay: processes of their own, without vLLM and training."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Process, actor, free, running, until
from model import write_model
from safetensors.torch import load_file

from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.mirror import Mirror

LEARNER = Path(__file__).with_name("learner_process.py")
DEADLINE = 8.0


def any_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def train(learner: Process, *, to: int) -> None:
    """Batches until version `to` is published and on disk."""
    while (version := learner.of("kept")[-1]["version"]) < to:
        learner.tell(do="step")
        await until(lambda version=version: learner.of("kept")[-1]["version"] > version, seconds=60)


def checksum_of(file: Path, *, shards: int) -> str:
    """What a learner of `shards` ranks says of the weights in a file."""
    tensors = load_file(file)
    mirror = Mirror(Layout.of((name, tensor.numel()) for name, tensor in tensors.items()))
    for name, view in mirror.tensors():
        view.copy_(tensors[name].view(-1))
    return mirror.checksum(shards=shards)


@pytest.mark.trio
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
async def test_a_learner_restart_costs_actors_only_deltas(tmp_path: Path, ranks: int) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    run.mkdir()
    write_model(model, scale=200)
    address = any_address()
    async with running(LEARNER, address, run, model, 2, DEADLINE) as first:
        await until(lambda: first.of("kept") != [], seconds=60)
        async with (
            actor(address, model, name="current", deadline=DEADLINE) as current,
            actor(address, model, name="behind", deadline=DEADLINE) as behind,
        ):
            await until(lambda: current.active() == [0] and behind.active() == [0], seconds=60)
            await train(first, to=3)
            first.tell(do="checkpoint")
            await until(lambda: first.of("checkpoint") != [])
            await train(first, to=4)
            await until(lambda: current.active()[-1] == 4 and behind.active()[-1] == 4)
            behind.popen.send_signal(signal.SIGSTOP)  # holds version 4 when all others have 6
            first.tell(do="step")
            await until(lambda: current.active()[-1] == 5)
            await until(lambda: first.of("kept")[-1]["version"] == 5, seconds=2 * DEADLINE)  # it costs one deadline
            await train(first, to=6)
            await until(lambda: current.active()[-1] == 6)
            first.popen.kill()
            first.popen.wait()
            await until(lambda: free(address))

            async with running(LEARNER, address, run, model, ranks, DEADLINE) as second:
                await until(lambda: second.of("kept") != [], seconds=60)
                assert second.of("restored")[0]["newest"] == 6
                behind.popen.send_signal(signal.SIGCONT)
                back = second.of("published")[0]
                assert (back["version"], back["parent"]) == (7, 6)
                assert back["checksum"] == checksum_of(run / "checkpoint.safetensors", shards=ranks)
                await until(lambda: current.active()[-1] == 7 and behind.active()[-1] == 7, seconds=60)
                sizes = {e["version"]: e["bytes"] for e in (*first.of("published"), back)}
                for process, fetched in ((current, [7]), (behind, [5, 6, 7])):
                    activation = process.of("activation")[-1]
                    assert activation["checksum"] == back["checksum"]
                    assert activation["bytes"] == sum(sizes[version] for version in fetched)
                    assert back["full_bytes"] > 5 * activation["bytes"]
                    assert process.of("checksum_mismatch") == []
                await train(second, to=8)
                report = second.of("published")[-1]
                assert (sorted(report["members"]), report["channel"]) == (["behind", "current"], "collective")
                await until(lambda: current.active()[-1] == 8 and behind.active()[-1] == 8)
                assert current.of("activation")[-1]["checksum"] == report["checksum"]


@pytest.mark.trio
@pytest.mark.timeout(120)
async def test_without_what_is_on_disk_a_restart_costs_an_anchor(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    run.mkdir()
    write_model(model, scale=200)
    address = any_address()
    async with running(LEARNER, address, run, model, 2, DEADLINE) as first:
        await until(lambda: first.of("kept") != [], seconds=60)
        async with actor(address, model, name="a", deadline=DEADLINE) as member:
            await until(lambda: member.active() == [0], seconds=60)
            await train(first, to=2)
            await until(lambda: member.active()[-1] == 2)
            first.popen.kill()
            first.popen.wait()
            shutil.rmtree(run / "weights")
            await until(lambda: free(address))
            async with running(LEARNER, address, run, model, 2, DEADLINE) as second:
                await until(lambda: member.active()[-1] == 3, seconds=60)
                back = second.of("published")[0]
                assert (back["version"], back["parent"]) == (3, None)
                activation = member.of("activation")[-1]
                assert activation["bytes"] == back["full_bytes"]
                assert activation["checksum"] == back["checksum"]
                assert back["checksum"] == checksum_of(model / "model.safetensors", shards=2)
