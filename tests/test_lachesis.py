from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import yaml
import zmq

import lachesis
from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.schema import Config
from lachesis_transport.store import StoreError


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  name: toy\n")
    return str(path)


def test_validate_prints_the_whole_configuration(config, tmp_path, capsys):
    assert lachesis.main(["validate", config, "learner.lr=1e-5", "staleness.max=3"]) == 0
    (tmp_path / "full.yaml").write_text(capsys.readouterr().out)
    resolved = load_config(tmp_path / "full.yaml")
    assert (resolved.run.name, resolved.learner.lr, resolved.staleness.max) == ("toy", 1e-5, 3)
    assert yaml.safe_load((tmp_path / "full.yaml").read_text())["queue"]["batch_groups"] == 8


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["validate", "{config}", "learner.lr=fast"], "learner.lr: value 'fast', expected a number"),
        (
            ["validate", "nowhere.yaml"],
            "nowhere.yaml: cannot be read (No such file or directory), expected a YAML file",
        ),
        (["report", "nowhere"], "nowhere: no such folder, expected the folder of a run"),
        (["environment", "{config}", "--url", "http://127.0.0.1:1", "--name", "x"], None),
    ],
)
def test_a_users_mistake_is_one_line(config, monkeypatch, tmp_path, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "environment":
        runner = type(sys)("lachesis_actors.environment_runner")
        runner.run_environment = None
        monkeypatch.setitem(sys.modules, runner.__name__, runner)
        line = "--name: value 'x', expected one of arithmetic"
    assert lachesis.main([argument.format(config=config) for argument in arguments]) == 2
    assert capsys.readouterr().err == f"lachesis {arguments[0]}: {line}\n"


def test_what_counts_as_a_users_mistake():
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/x")
    in_use = zmq.ZMQError(errno.EADDRINUSE, "Address already in use (addr='tcp://127.0.0.1:5710')")
    assert lachesis.user_error(ConfigError(["a", "b"])) == ["a", "b"]
    assert lachesis.user_error(missing) == ["/data/x: No such file or directory"]
    assert lachesis.user_error(in_use) == ["Address already in use (addr='tcp://127.0.0.1:5710')"]
    assert lachesis.user_error(ExceptionGroup("nursery", [in_use, ConfigError(["a"])]))[1:] == ["a"]
    assert lachesis.user_error(ExceptionGroup("nursery", [in_use, ZeroDivisionError()])) == []
    assert lachesis.user_error(ZeroDivisionError()) == []
    assert lachesis.user_error(FileNotFoundError("made by hand")) == []
    assert lachesis.user_error(StoreError("queue.db: full")) == ["queue.db: full"]
    assert lachesis.user_error(OSError(errno.ENOSPC, "No space left", "/run/x")) == ["/run/x: No space left"]
    assert lachesis.user_error(OSError(errno.ENOSPC, "No space left")) == ["No space left"]
    assert lachesis.user_error(OSError(errno.EIO, "broken", "/run/x")) == []


@pytest.fixture
def role(monkeypatch):
    """Puts a role in the place of the queue's module."""

    def install(serve_queue):
        broker = type(sys)("lachesis_transport.broker")
        broker.serve_queue = serve_queue
        monkeypatch.setitem(sys.modules, broker.__name__, broker)

    return install


def test_a_role_gets_its_configuration_and_its_folder(config, role, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls = []

    async def serve_queue(config: Config, folder: Path, opened: Callable[[], object]) -> None:
        calls.append((config.run.seed, config.staleness.max, folder, folder.is_dir()))
        assert not (folder / "config.yaml").exists()  # another queue may have the folder
        opened()
        assert load_config(folder / "config.yaml") == config

    role(serve_queue)
    assert lachesis.main(["queue", config, "run.seed=4", "--set", "staleness.max=1"]) == 0
    assert lachesis.main(["queue", config, f"run.folder={tmp_path}/a"]) == 0
    assert lachesis.main(["queue", config, "--folder", f"{tmp_path}/b"]) == 0
    assert calls == [
        (4, 1, Path("runs/toy"), True),
        (0, 2, tmp_path / "a", True),
        (0, 2, tmp_path / "b", True),
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_cancels_a_role(config, role, monkeypatch, tmp_path, number, code):
    monkeypatch.chdir(tmp_path)
    started, cleaned = threading.Event(), []

    async def serve_queue(config: Config, folder: Path, opened: Callable[[], object]) -> None:
        try:
            started.set()
            await trio.sleep_forever()
        finally:
            cleaned.append(True)

    role(serve_queue)
    thread = threading.Thread(target=lambda: (started.wait(), os.kill(os.getpid(), number)))
    thread.start()
    assert lachesis.main(["queue", config]) == code
    thread.join()
    assert cleaned == [True]


def test_a_role_that_cannot_listen_says_so(config, role, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    async def serve_queue(config: Config, folder: Path, opened: Callable[[], object]) -> None:
        async with trio.open_nursery():
            raise OSError(errno.EADDRINUSE, "tcp://127.0.0.1:5710 cannot be bound: in use")

    role(serve_queue)
    assert lachesis.main(["queue", config]) == 2
    assert capsys.readouterr().err == "lachesis queue: tcp://127.0.0.1:5710 cannot be bound: in use\n"


def test_models_are_not_looked_up_on_a_network(config, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    lachesis.main(["validate", config])
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_help_imports_no_role():
    listing = "import sys, lachesis\ntry: lachesis.main(['--help'])\nexcept SystemExit: pass\n"
    heavy = (
        "print(*[m for m in ('torch', 'vllm', 'deepspeed', 'trio', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", listing + heavy], capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n"
    for verb in ("launch", "queue", "learner", "actor", "environment", "status", "validate", "report", "bench"):
        assert f"    {verb}" in done.stdout


def test_a_failure_ends_with_its_cause_however_deeply_it_was_grouped(config, monkeypatch, capsys):
    def fail(_):
        raise BaseExceptionGroup(
            "outer", [ExceptionGroup("inner", [RuntimeError("the engine ended")]), OSError("gone")]
        )

    monkeypatch.setattr(lachesis, "_validate", fail)
    assert lachesis.main(["validate", config]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["lachesis validate: RuntimeError: the engine ended", "lachesis validate: OSError: gone"]
    assert any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    "arguments", [["--resume", "a.yaml", "x=1"], ["a.yaml", "--resume", "x=1"], ["a.yaml", "x=1", "--resume"]]
)
def test_overrides_may_stand_after_an_option(monkeypatch, arguments):
    calls = []
    launching = type(sys)("lachesis_deploy.launch")
    launching.launch = lambda *given, **named: calls.append((*given, named))
    monkeypatch.setitem(sys.modules, launching.__name__, launching)
    assert lachesis.main(["launch", *arguments]) == 0
    assert calls == [("a.yaml", ["x=1"], {"resume": True})]


@pytest.mark.parametrize("extra", ["--again", "word"])
def test_what_is_no_override_is_not_taken_for_one(extra, capsys):
    with pytest.raises(SystemExit) as ended:
        lachesis.main(["launch", "a.yaml", "--resume", extra])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {extra}" in capsys.readouterr().err


def test_whoever_stops_reading_ends_the_output_quietly(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    program = [sys.executable, "-m", "lachesis", "validate", str(config)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(60), errors) == (128 + signal.SIGPIPE, b"")


def test_the_index_of_an_actor_is_a_whole_number(capsys):
    with pytest.raises(SystemExit):
        lachesis.main(["actor", "config.yaml", "--index", "-1"])
    assert "--index: value '-1', expected a whole number of 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["run.folder=/proc/x"], ["--folder", "/proc/x"]])
def test_what_is_missing_or_impossible_is_named(config, arguments, capsys):
    if not arguments:
        with pytest.raises(SystemExit):
            lachesis.main(["launch"])
        assert capsys.readouterr().err.endswith("the following arguments are required: CONFIG\n")
        return
    assert lachesis.main(["queue", config, *arguments]) == 2
    assert capsys.readouterr().err.startswith(
        f"lachesis queue: {arguments[0].split('=')[0]}: value '/proc/x', expected"
    )


def test_options_have_no_short_forms(monkeypatch, capsys):
    for arguments in (["launch", "a.yaml", "--resum"], ["queue", "a.yaml", "--inspec"], ["bench", "delta", "--shor"]):
        with pytest.raises(SystemExit) as ended:
            lachesis.main(arguments)
        assert ended.value.code == 2
        assert f"unrecognized arguments: {arguments[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["learner", "actor"])
def test_a_role_whose_devices_are_not_there_ends_at_once(config, verb, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for module, name in (("lachesis_learner.learner", "run_learner"), ("lachesis_actors.actor", "run_actor")):
        stand_in = type(sys)(module)
        setattr(stand_in, name, None)
        monkeypatch.setitem(sys.modules, module, stand_in)
    assert lachesis.main([verb, config, f"{verb}.gpus=[1000]"]) == 2
    assert capsys.readouterr().err.startswith(f"lachesis {verb}: {verb}.gpus: value [1000], expected n")
