from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml

from lachesis_actors.environment_check import check_environments
from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_deploy import launch as launching
from lachesis_deploy.launch import close_run, launch, role_commands, run_finished
from lachesis_deploy.processes import Command

FOREVER = "import time; time.sleep(60)"


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    """A configuration file for a run of two steps in tmp_path/runs/toy, with a model that needs no conversion."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "resolve_model", lambda name: tmp_path / "model")
    monkeypatch.setattr(launching, "check_environments", lambda config: None)
    path = tmp_path / "toy.yaml"
    sections = {
        "run": {"name": "toy", "steps": 2},
        "queue": {"address": "tcp://127.0.0.1:0"},
        "weights": {"address": "tcp://127.0.0.1:0"},
    }
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def roles(monkeypatch, **codes):
    """Replace the roles by little programs that run in the run folder."""

    def commands(config, config_path):
        return [
            Command(
                role=role,
                argv=(sys.executable, "-S", "-c", f"import os; os.chdir({str(config_path.parent)!r})\n{code}"),
            )
            for role, code in codes.items()
        ]

    monkeypatch.setattr(launching, "role_commands", commands)


def learner(steps):
    """A learner that trains `steps` steps."""
    lines = [
        json.dumps({"step": n, "time": 1000.0 + n, "reward_mean": n / 10, "staleness_max": 1, "group_ids": [f"{n}:0"]})
        for n in range(1, steps + 1)
    ]
    return f"open('metrics.jsonl', 'a').write({chr(10).join(lines)!r} + '\\n')"


def test_a_run_to_the_end(wanted, monkeypatch, capsys):
    roles(
        monkeypatch,
        queue="import os, time\nwhile not os.path.exists('metrics.jsonl'): time.sleep(.01)",
        learner=learner(2),
    )
    assert launch(wanted, ["staleness.max=1"]) == 0
    folder = Path("runs/toy")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["reward_last"], summary["staleness_bound"]) == (2, 0.2, 1)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["run"]["folder"] == str(folder.resolve())
    assert written["staleness"]["max"] == 1
    assert written["model"]["path"].endswith("/model")
    out = capsys.readouterr().out
    assert "step 1/2  reward 0.100" in out
    assert "step 2/2  reward 0.200" in out
    assert "runs/toy/summary.json" in out


def test_a_second_run_gets_a_folder_of_its_own(wanted, monkeypatch, capsys):
    roles(monkeypatch, learner=learner(2))
    assert launch(wanted) == 0
    assert launch(wanted) == 0
    out = capsys.readouterr().out
    assert "runs/toy holds an earlier run\nrun folder runs/toy-2 " in out
    assert Path("runs/toy-2/summary.json").exists()


def test_a_failing_role_ends_the_run(wanted, monkeypatch, capsys):
    roles(monkeypatch, queue=FOREVER, learner="print('no memory'); raise SystemExit(7)")
    assert launch(wanted) == 1
    error = capsys.readouterr().err
    assert "learner ended with code 7. Its log runs/toy/logs/learner.log ends with:\n    no memory\n" in error
    assert "Nothing was trained in runs/toy: start anew.\n" in error
    assert not Path("runs/toy/summary.json").exists()


def test_a_learner_that_stops_early_ends_the_run(wanted, monkeypatch, capsys):
    roles(monkeypatch, queue=FOREVER, learner=learner(1))
    assert launch(wanted) == 1
    error = capsys.readouterr().err
    assert "learner ended with code 0 before the run was finished" in error
    again = f"`lachesis launch {wanted} --resume` goes on from there"
    assert f"runs/toy is trained up to step 1: `lachesis report runs/toy` shows what was done, {again}" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_roles(wanted, monkeypatch, capsys, number):
    roles(monkeypatch, queue=f"open('up', 'w').close()\n{FOREVER}", learner=FOREVER)

    def interrupt():
        while not os.path.exists("runs/toy/up"):
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert launch(wanted) == 128 + number
    thread.join()
    assert "stopping all roles" in capsys.readouterr().out


def stopped_run(*, steps):
    """What a launch leaves in runs/toy that was stopped after so many steps."""
    folder = Path("runs/toy")
    (folder / "queue.db").touch()
    (folder / "queue.json").write_text(json.dumps({"finished": steps == 2, "step": steps}))
    return folder


def test_a_stopped_run_goes_on_in_its_folder(wanted, monkeypatch, capsys):
    roles(monkeypatch, learner=learner(1))
    assert launch(wanted) == 1
    folder = stopped_run(steps=1)
    capsys.readouterr()
    second = json.dumps({"step": 2, "time": 2000.0, "reward_mean": 0.2, "group_ids": ["2:0"]})
    roles(monkeypatch, learner=f"open('metrics.jsonl', 'a').write({second!r} + '\\n')")
    assert launch(wanted, ["learner.lr=1e-3"], resume=True) == 0
    out = capsys.readouterr().out
    assert f"going on with {folder}, which is trained up to step 1\nrun folder {folder} " in out
    assert "step 2/2  reward 0.200" in out
    assert "step 1/2" not in out
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert yaml.safe_load((folder / "config.yaml").read_text())["learner"]["lr"] == 1e-3
    assert [path.name for path in Path("runs").iterdir()] == ["toy"]


def test_a_finished_run_says_so_and_goes_on_when_it_shall_be_longer(wanted, monkeypatch, capsys):
    roles(monkeypatch, learner=learner(2))
    assert launch(wanted) == 0
    folder = stopped_run(steps=2)
    summary = (folder / "summary.json").read_text()
    for name in ("summary.json", "report.html"):
        (folder / name).unlink()  # as when the launch was killed just before it wrote them
    roles(monkeypatch, learner="raise SystemExit(7)")
    assert launch(wanted, resume=True) == 0
    assert "runs/toy has finished: all 2 steps of run.steps are trained, nothing is left\n" in capsys.readouterr().out
    assert (folder / "summary.json").read_text() == summary
    assert (folder / "report.html").exists()
    assert launch(wanted, ["run.steps=3"], resume=True) == 1


def test_a_launch_that_failed_at_once_is_not_what_goes_on(wanted, monkeypatch, capsys):
    roles(monkeypatch, learner=learner(1))
    assert launch(wanted) == 1
    stopped_run(steps=1)
    roles(monkeypatch, queue=f"open('queue.db', 'w').close()\n{FOREVER}", actor="raise SystemExit(1)")
    assert launch(wanted) == 1
    capsys.readouterr()
    second = json.dumps({"step": 2, "time": 2000.0, "reward_mean": 0.2, "group_ids": ["2:0"]})
    roles(monkeypatch, learner=f"open('metrics.jsonl', 'a').write({second!r} + '\\n')")
    assert launch(wanted, resume=True) == 0
    out = capsys.readouterr().out
    assert out.startswith("passed over runs/toy-2: ")
    assert "going on with runs/toy, which is trained up to step 1\nrun folder runs/toy " in out


def test_nothing_to_resume(wanted, monkeypatch):
    with pytest.raises(ConfigError, match="runs/toy is not there"):
        launch(wanted, resume=True)
    assert not Path("runs").exists()
    roles(monkeypatch, learner=learner(1))
    assert launch(wanted) == 1
    stopped_run(steps=1)
    with pytest.raises(ConfigError, match=r"staleness\.max: value 5, expected 2 to resume runs/toy"):
        launch(wanted, ["staleness.max=5"], resume=True)


def test_roles_are_the_commands_that_a_user_would_type():
    config = Config.model_validate({"actor": {"count": 2}})
    commands = role_commands(config, Path("/runs/toy/config.yaml"))
    assert [(c.role, c.argv[3:]) for c in commands] == [
        ("queue", ("queue", "/runs/toy/config.yaml")),
        ("learner", ("learner", "/runs/toy/config.yaml")),
        ("actor-0", ("actor", "/runs/toy/config.yaml", "--index", "0")),
        ("actor-1", ("actor", "/runs/toy/config.yaml", "--index", "1")),
    ]
    assert commands[0].argv[:3] == (sys.executable, "-m", "lachesis")
    # The others hand back to it what they hold.
    assert [c.role for c in commands if c.ends_last] == ["queue"]


def test_a_run_is_finished_with_its_last_step(tmp_path):
    config = Config.model_validate({"run": {"steps": 2}})
    finished = run_finished(config, tmp_path)
    assert not finished()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
        file.flush()
        assert not finished()
        file.write('{"step": 2}\n')
        file.flush()
        assert finished()
    assert finished()


def test_user_errors(wanted, tmp_path):
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        close_run(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        close_run(tmp_path / "none")
    assert not Path("runs").exists()


def test_an_environment_that_is_not_there(wanted):
    with pytest.raises(
        ConfigError, match=r"environments\.0\.path: value 'nofile\.py', expected one of arithmetic, gsm8k"
    ):
        launch(wanted, ["environments.0.path=nofile.py"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("environments.0.options.max_valeu=3", "environments.0.options.max_valeu: value 3, unknown key, did you mean"),
        ("learner.gpus=[1000]", "learner.gpus: value [1000], expected n"),
        ("actor.gpus=[1000]", "actor.gpus: value [1000], expected n"),
    ],
)
def test_what_this_node_cannot_run_is_found_before_anything_starts(wanted, monkeypatch, override, line):
    monkeypatch.setattr(launching, "check_environments", check_environments)
    roles(monkeypatch, learner=learner(2))
    with pytest.raises(ConfigError) as caught:
        launch(wanted, [override])
    assert caught.value.lines[0].startswith(line)
    assert not Path("runs").exists()
