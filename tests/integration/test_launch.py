"""Whole runs of a tiny model, started as a user starts them: vLLM, DeepSpeed, Atropos and ZeroMQ, all real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import yaml

LACHESIS = (sys.executable, "-m", "lachesis")
START_SECONDS = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture
def config(tiny_model, tmp_path):
    """A run of four steps. Answers are digits by chance often enough that one group in four has variance."""
    sections = {
        "run": {"name": "tiny", "folder": str(tmp_path / "run"), "steps": 4},
        "model": {"path": str(tiny_model)},
        "queue": {"address": "tcp://127.0.0.1:0", "batch_groups": 2},
        "weights": {"address": "tcp://127.0.0.1:0"},
        "staleness": {"max": 1},
        "actor": {"engine": {"max_model_len": 256, "kv_cache_gib": 1.0, "max_num_seqs": 32, "threads": 1}},
        "environments": [
            {
                "path": "arithmetic",
                "name": "arithmetic",
                "workers": 4,
                "group_size": 8,
                "max_token_length": 128,
                "options": {"max_value": 2, "eval_problems": 8},
            }
        ],
        "learner": {"lr": 1e-4, "device": "cpu", "micro_batch_tokens": 1024, "threads": 1, "checkpoint_every": 100},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def command_line(process):
    """Its words; none when it has ended."""
    try:
        return process.cmdline() if process.is_running() else []
    except psutil.Error:
        return []


class Run:
    """A process under test with everything that comes from it."""

    def __init__(self, *arguments, log):
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen([*LACHESIS, *map(str, arguments)], stdout=out, stderr=out)
        self._seen = {psutil.Process(self.process.pid)}

    def watch(self):
        """Remember the processes that are there now."""
        for process in list(self._seen):
            try:
                self._seen.update(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def until(self, condition, *, seconds):
        """Wait until `condition()` holds while the process lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            self.watch()
            time.sleep(0.1)

    def wait(self, *, seconds):
        """Wait for the end; returns the exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.watch()
            time.sleep(0.1)
        return self.process.returncode

    @property
    def text(self):
        return self.log.read_text()

    def child(self, verb):
        """The process of a role."""
        return next(p for p in self.left() if command_line(p)[1:4] == ["-m", "lachesis", verb])

    def engine(self):
        """The process of the engine's server, None while there is none."""
        module = ["-m", "vllm.entrypoints.openai.api_server"]
        return next((p for p in self.left() if command_line(p)[1:3] == module), None)

    def left(self):
        """Processes that still run."""
        return [p for p in self._seen if command_line(p)]

    def until_nothing_is_left(self, *, seconds):
        """Wait for what follows a process that was killed."""
        deadline = time.monotonic() + seconds
        while self.left():
            self.watch()
            assert time.monotonic() < deadline, self.left()
            time.sleep(0.1)

    def kill(self):
        """Leave nothing behind when a test has failed."""
        self.watch()
        for process in self.left():
            process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts `lachesis ARGUMENTS`."""
    runs = []

    def run(*arguments):
        runs.append(Run(*arguments, log=tmp_path / f"{len(runs)}-{arguments[0]}.log"))
        return runs[-1]

    yield run
    for each in runs:
        each.kill()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_summary(folder, *, steps, final=None):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps
    assert (summary["staleness_bound"], summary["bound_violations"]) == (1, 0)
    assert summary["staleness_max"] <= 1
    assert summary["groups_trained"] == 2 * steps
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["groups_unknown"]) == (0, 0, 0)
    assert summary["checksum_mismatches"] == 0
    assert summary["eval_before_version"] == 0
    assert summary["eval_after_version"] == (steps if final is None else final)
    assert 0 <= summary["reward_first"] <= 1
    assert 0 < summary["delta_bytes_mean"] < summary["full_bytes"]
    assert summary["learner_tokens_per_second"] > 0
    assert summary["actor_tokens_per_second"] > 0
    for share in ("learner_idle_share", "actor_idle_share", "overlap_share"):
        assert 0 <= summary[share] <= 1
    return summary


def test_one_command_trains_and_leaves_nothing_behind(config, start, tmp_path):
    launch = start("launch", config)
    assert launch.wait(seconds=300) == 0, launch.text
    assert launch.left() == []
    folder = tmp_path / "run"
    summary = check_summary(folder, steps=4)
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["version"] for line in metrics] == [0, 1, 2, 3]
    assert summary["mismatch_kl"] is None or abs(summary["mismatch_kl"]) < 0.05
    assert "step 4/4" in launch.text
    assert (folder / "report.html").read_text().count("<img") == 6
    assert {path.stem for path in (folder / "logs").glob("*.log")} >= {"queue", "learner", "actor-0"}


@pytest.mark.parametrize("victim", ["queue", "learner", "engine", "launch"])
def test_whatever_is_killed_nothing_is_left_and_the_cause_is_named(config, start, tmp_path, victim):
    launch = start("launch", config)
    launch.until(launch.engine, seconds=60)
    if victim == "launch":
        launch.process.kill()
        launch.process.wait()
        launch.until_nothing_is_left(seconds=30)
        return
    (launch.engine() if victim == "engine" else launch.child(victim)).kill()
    assert launch.wait(seconds=90) == 1
    assert launch.left() == []
    if victim == "engine":
        assert "actor-0 ended with code 1. Its log" in launch.text
        ended = f"EngineError: vLLM ended with status 137 (SIGKILL); its log {tmp_path}/run/logs/actor-0-vllm.log says:"
        assert ended in launch.text
    else:
        assert f"{victim} was killed by SIGKILL. Its log {tmp_path}/run/logs/{victim}.log ends with:" in launch.text


def test_roles_by_hand_in_any_order(config, start, tmp_path):
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    own = [f"queue.address=tcp://127.0.0.1:{ports[0]}", f"weights.address=tcp://127.0.0.1:{ports[1]}", "run.steps=2"]
    actor = start("actor", config, *own)
    learner = start("learner", config, *own)
    actor.until(lambda: "wait" in actor.text and "wait" in learner.text, seconds=60)
    queue = start("queue", config, *own)
    for role in (learner, actor, queue):
        assert role.wait(seconds=START_SECONDS) == 0, role.text
        assert role.left() == []
    report = start("report", tmp_path / "run")
    assert report.wait(seconds=60) == 0, report.text
    check_summary(tmp_path / "run", steps=2)


def test_ctrl_c_ends_every_role_well(config, start, tmp_path):
    launch = start("launch", config)
    launch.until(lambda: (tmp_path / "run" / "events.jsonl").exists(), seconds=60)
    os.kill(launch.process.pid, signal.SIGINT)
    assert launch.wait(seconds=60) == 130
    assert launch.left() == []
    assert "is killed" not in launch.text


def test_a_run_goes_on_in_its_folder_however_it_was_ended(config, start, tmp_path):
    """Three times: its actor is killed, then launch itself, then it is stopped."""
    folder, own = tmp_path / "run", ("run.steps=9", "learner.checkpoint_every=2")
    metrics, last = [], 1
    for end in ("actor is killed", "launch is killed", "stopped"):
        launch = start("launch", config, *own, *(["--resume"] if metrics else []))
        launch.until(lambda last=last: newest_trained(folder) > last, seconds=START_SECONDS)
        if end == "actor is killed":
            launch.child("actor").kill()
            assert launch.wait(seconds=90) == 1
            assert "actor-0 was killed by SIGKILL. Its log" in launch.text
        elif end == "launch is killed":
            launch.process.kill()
            launch.process.wait()
            launch.until_nothing_is_left(seconds=30)
        else:
            os.kill(launch.process.pid, signal.SIGINT)
            assert launch.wait(seconds=90) == 130
        assert launch.left() == []
        assert not metrics or "step 1/9" not in launch.text
        metrics = continued(metrics, folder)
        last = metrics[-1]["version"]

    changed = start("launch", config, *own, "--resume", "queue.batch_groups=3")
    assert changed.wait(seconds=60) == 2
    assert "queue.batch_groups: value 3, expected 2 to resume" in changed.text

    resumed = start("launch", config, *own, "--resume")
    assert resumed.wait(seconds=240) == 0, resumed.text
    assert resumed.left() == []
    stopped, metrics = metrics, continued(metrics, folder)
    assert metrics[: len(stopped)] == stopped  # a stop loses nothing
    assert len(metrics) == 9
    check_summary(folder, steps=9, final=metrics[-1]["published"])
    assert not (tmp_path / "run-2").exists()

    again = start("launch", config, *own, "--resume")
    assert again.wait(seconds=60) == 0
    assert "has finished: all 9 steps" in again.text


def newest_trained(folder):
    """The version that the last step trained, -1 before the first."""
    metrics = lines(folder / "metrics.jsonl")
    return metrics[-1]["version"] if metrics else -1


def continued(before, folder):
    """The steps of a run that had those `before` when it was ended: checked for what may have become of them."""
    metrics = lines(folder / "metrics.jsonl")
    kept = [line for line in before if line in metrics]
    assert metrics[: len(kept)] == kept
    assert len(before) - len(kept) <= 2  # there is a checkpoint every two steps
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    versions = [line["version"] for line in metrics]
    assert versions == sorted(set(versions))
    if before:
        assert versions[len(kept)] > before[-1]["version"]  # a version of its own for the weights of the checkpoint
    return metrics
