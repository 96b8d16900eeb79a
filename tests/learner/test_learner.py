"""The learner as users start it: from a file on two ranks, and from the real queue with a made-up actor."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import trio
from packing import random_batch, trajectory
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from fleet import actor as following_actor

from lachesis_configs.load import dump_config, load_config
from lachesis_deploy.audit import audit
from lachesis_transport.broker import serve_queue
from lachesis_transport.groups_file import write_groups
from lachesis_transport.messages import Group
from lachesis_transport.producer import Finished, Producer, open_producer
from lachesis_transport.weights.mirror import Mirror

pytestmark = pytest.mark.slow

GROUPS = 12

_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Also when a test fails."""
    yield
    while _started:
        learner = _started.pop()
        learner.kill()
        learner.wait()


def _configure(folder: Path, model: Path, *overrides: str) -> Path:
    """Write a configuration for `model` with fresh ports; returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text("{}")
    config = load_config(
        path,
        [
            f"model.path={model}",
            "learner.device=cpu",
            "learner.precision=fp32",
            "learner.threads=1",
            "learner.lr=1e-3",
            "queue.batch_groups=2",
            "staleness.max=3",
            f"queue.address=tcp://127.0.0.1:{_port()}",
            f"weights.address=tcp://127.0.0.1:{_port()}",
            *overrides,
        ],
    )
    path.write_text(dump_config(config))
    return path


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lachesis", "learner", str(config), "--folder", str(config.parent), *arguments]
    _started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return _started[-1]


def _finish(process: subprocess.Popen[str], *, code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err[-4000:]
    return out, err


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _metrics(folder: Path) -> list[dict]:
    return _lines(folder / "metrics.jsonl")


def _weights(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"{version:08d}" / "model.safetensors")


@pytest.fixture(scope="module")
def replay_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "groups"
    write_groups(path, random_batch(1, groups=GROUPS, version=0).groups)
    return path


def test_replay_on_two_ranks_resumes_as_if_never_stopped(tmp_path: Path, tiny_model: Path, replay_file: Path) -> None:
    replay = ("--replay", str(replay_file))
    common = ("learner.checkpoint_every=2", "run.steps=6")
    whole = _start(_configure(tmp_path / "whole", tiny_model, *common), *replay)
    two = _configure(tmp_path / "two", tiny_model, *common, "learner.ranks=2")
    out, _ = _finish(_start(two, *replay, "--set", "run.steps=3"))
    assert json.loads(out.splitlines()[-1]) == _metrics(two.parent)[-1]
    assert [line["step"] for line in _metrics(two.parent)] == [1, 2, 3]
    assert sorted(p.name for p in (two.parent / "checkpoints").iterdir()) == ["00000002", "00000003"]

    out, err = _finish(_start(two, *replay))
    assert "version 3, step 3" in err
    lines = _metrics(two.parent)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [i for line in lines for i in line["group_ids"]] == [f"{i}:0" for i in range(GROUPS)]
    record = json.loads((two.parent / "checkpoints" / "00000006" / "record.json").read_text())
    assert record == {
        "schema": 2, "version": 6, "parent": 5, "step": 6, "run": "run", "queue": None, "ranks": 2,
    }  # fmt: skip

    _finish(whole)
    for resumed, straight in zip(lines, _metrics(tmp_path / "whole"), strict=True):
        assert resumed["loss"] == pytest.approx(straight["loss"], rel=1e-3)
        assert resumed["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-3)
    ours, theirs, before = (
        _weights(two.parent, 6),
        _weights(tmp_path / "whole", 6),
        load_file(tiny_model / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys() == before.keys()
    assert _gap(ours, theirs) < 0.02 * _gap(ours, before)
    # Loads as any model does, the tied head included.
    model = AutoModelForCausalLM.from_pretrained(two.parent / "checkpoints" / "00000006")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, ours["model.embed_tokens.weight"])

    _, err = _finish(_start(two, *replay, "--set", "learner.ranks=1"), code=2)
    assert "learner.ranks: value 1, expected 2 to resume" in err


def _gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return sum(float((left[n].double() - right[n].double()).square().sum()) for n in left) ** 0.5


def test_a_rank_that_dies_ends_the_learner_with_the_cause(tmp_path: Path, tiny_model: Path) -> None:
    write_groups(tmp_path / "groups", random_batch(2, groups=4000, size=2, version=0).groups)
    config = _configure(tmp_path / "run", tiny_model, "learner.ranks=2", "run.steps=100000")
    learner = _start(config, "--replay", str(tmp_path / "groups"))
    (child,) = _when(lambda: _training(config.parent) and psutil.Process(learner.pid).children())
    child.kill()
    _, err = _finish(learner, code=1)
    assert "rank 1 was killed by SIGKILL" in err


def test_ranks_do_not_outlive_a_killed_learner(tmp_path: Path, tiny_model: Path) -> None:
    write_groups(tmp_path / "groups", random_batch(2, groups=4000, size=2, version=0).groups)
    config = _configure(tmp_path / "run", tiny_model, "learner.ranks=2", "run.steps=100000")
    learner = _start(config, "--replay", str(tmp_path / "groups"))
    (child,) = _when(lambda: _training(config.parent) and psutil.Process(learner.pid).children())
    learner.kill()
    _finish(learner, code=-signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=10)[1] == []


def _training(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and len(_whole_lines(folder / "metrics.jsonl")) > 0


def _whole_lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def _when(condition: Callable[[], object], seconds: float = 90):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@pytest.mark.trio
async def test_stops_and_comes_back_until_the_run_is_finished(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("run.steps=4", "learner.checkpoint_every=100", "staleness.max=1")
    path = _configure(tmp_path, tiny_model, *overrides)
    config = load_config(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_queue, config, tmp_path)
        async with open_producer(config.queue.address, actor="actor-0", incarnation="1") as actor:
            # Waiting for a batch that nobody makes: a stop hands everything back.
            learner = _start(path)
            await _until(lambda: actor.state.current == 0)
            learner.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(_finish, learner)
            assert not list(tmp_path.glob("checkpoints/*"))

            # Without a checkpoint the same weights come back under a new version.
            learner = _start(path)
            await _until(lambda: actor.state.current == 1)
            async with trio.open_nursery() as making:
                making.start_soon(_make_groups, actor, 4)
                await _until(lambda: actor.state.step == 2)
                learner.send_signal(signal.SIGTERM)
                await trio.to_thread.run_sync(_finish, learner)
                making.cancel_scope.cancel()
            assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000003"]

            # And with one from there, again under a new version.
            learner = _start(path)
            await _until(lambda: actor.state.current == 4)
            async with trio.open_nursery() as making:
                making.start_soon(_make_groups, actor, 1000)
                _, err = await trio.to_thread.run_sync(_finish, learner)
            assert "finished: 4 steps, version 6" in err
            assert (actor.state.finished, actor.state.final) == (True, 6)

    lines = _metrics(tmp_path)
    assert [(m["step"], m["version"], m["published"]) for m in lines] == [(1, 1, 2), (2, 2, 3), (3, 4, 5), (4, 5, 6)]
    assert max(m["staleness_max"] for m in lines) <= 1
    assert [m["groups"] for m in lines] == [2, 2, 2, 2]
    assert lines[0]["full_bytes"] == 2 * sum(w.numel() for w in _weights(tmp_path, 6).values())
    for line in lines:
        assert line["delta_bytes"] > 0
        assert 0 < line["changed_share"] <= 1
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds_total"])
        assert line["seconds_wait"] > 0
    logged = _lines(tmp_path / "events.jsonl")
    assert [e["version"] for e in logged if e["kind"] == "publication"] == [0, 1, 2, 3, 4, 5, 6]
    published = {e["version"]: e for e in logged if e["kind"] == "publication"}
    assert published[0]["bytes"] >= published[0]["full_bytes"]
    for version in (1, 4):  # the same weights as before the restart, as a delta to what is in weights/
        assert published[version]["bytes"] < published[version]["full_bytes"] / 100
    statistics = json.loads((tmp_path / "queue.json").read_text())
    assert statistics["groups_trained"] == 8
    assert statistics["bound_violations"] == 0


@pytest.mark.trio
async def test_ranks_killed_in_the_middle_of_a_batch_go_on_from_their_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = tmp_path / "run"
    checkpoints = ("learner.checkpoint_every=4", "learner.keep_checkpoints=3")
    path = _configure(run, tiny_model, "run.steps=10", "learner.ranks=2", "learner.lr=1e-5", *checkpoints)
    config = load_config(path)
    async with (
        trio.open_nursery() as queue,
        following_actor(config.weights.address, tiny_model, name="actor-0", deadline=60) as follower,
    ):
        queue.start_soon(serve_queue, config, run)
        async with (
            open_producer(config.queue.address, actor="actor-0", incarnation="1") as actor,
            trio.open_nursery() as serving,
        ):

            def served() -> int | None:
                return max(follower.active(), default=None)

            async def follow() -> None:
                while True:
                    if (version := served()) is not None:
                        actor.serving(version)
                    await trio.sleep(0.01)

            serving.start_soon(follow)
            killed = _start(path)
            await _until(lambda: served() == 0)
            await _make_groups(actor, 2 * 6, served)
            await _until(lambda: served() == 6)
            await _until((run / "weights" / "00000006.delta").exists)
            [child] = psutil.Process(killed.pid).children()
            await _make_groups(actor, 2, served, size=32, tokens=400)
            await trio.sleep(0.2)  # of the seconds that this batch takes
            killed.kill()
            await trio.to_thread.run_sync(partial(_finish, killed, code=-signal.SIGKILL))
            assert psutil.wait_procs([child], timeout=10)[1] == []
            assert [line["step"] for line in _metrics(run)] == [1, 2, 3, 4, 5, 6]
            checkpoint = run / "checkpoints" / "00000004"

            back = _start(path)
            await _make_groups(actor, 1000, served)
            _, err = await trio.to_thread.run_sync(_finish, back)
            final = actor.state.final
            await _until(lambda: served() == final)
            serving.cancel_scope.cancel()

    events, lines = _lines(run / "events.jsonl"), _metrics(run)
    assert f"resumed from {checkpoint}: version 4, step 4" in err
    assert [e["parent"] for e in events if e["kind"] == "reserved"] == [None, *range(6), 4, *range(7, 13)]
    assert [(line["step"], line["version"]) for line in lines] == [
        *zip(range(1, 5), range(4), strict=True),
        *zip(range(5, 11), range(7, 13), strict=True),
    ]
    assert [line["step"] for line in _lines(run / "metrics.abandoned.jsonl")] == [5, 6]

    found = audit(lines, events)
    assert (found["groups_trained"], len({g for line in lines for g in line["group_ids"]})) == (20, 20)
    assert (found["groups_lost"], found["groups_duplicated"], found["groups_unknown"]) == (0, 0, 0)
    assert max(line["staleness_max"] for line in lines) <= 3

    # The weights of the checkpoint, as a difference to those that were lost with the learner.
    assert "version 7 goes out as a delta to version 6" in err
    [seventh] = [e for e in events if e["kind"] == "publication" and e["version"] == 7]
    assert seventh["bytes"] < seventh["full_bytes"] / 2
    assert seventh["checksum"] == Mirror.load(checkpoint).checksum(shards=2)
    received = follower.of("activation")
    assert max(e["bytes"] for e in received if e["version"] > 0) < seventh["full_bytes"] / 2
    assert received[-1]["version"] == final == 13
    assert received[-1]["checksum"] == Mirror.load(run / "checkpoints" / "00000013").checksum(shards=2)
    assert follower.of("checksum_mismatch") == []


async def _until(condition: Callable[[], bool], seconds: float = 90) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.05)


async def _make_groups(
    actor: Producer, count: int, served: Callable[[], int | None] | None = None, *, size: int = 2, tokens: int = 4
) -> None:
    """Random groups, as an actor sends them that serves the version `served` (by default the newest one), until there
    are `count` or the run has finished."""
    rng = np.random.default_rng()
    for _ in range(count):
        version = served() if served is not None else actor.state.current
        assert version is not None
        actor.serving(version)
        ticket = await actor.ticket(version=version, environment="arithmetic")
        if isinstance(ticket, Finished):
            return
        group = Group(
            group_id=f"{ticket.ticket}:0",
            ticket=ticket.ticket,
            actor="actor-0",
            environment="arithmetic",
            trajectories=tuple(
                trajectory(
                    rng, [5, 6, 7, *rng.integers(3, 300, tokens)], [0] * 3 + [1] * tokens, versions=(ticket.version,)
                )
                for _ in range(size)
            ),
        )
        await actor.put(group)
