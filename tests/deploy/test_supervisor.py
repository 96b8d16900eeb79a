from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import trio

from lachesis_deploy.processes import Child, Command, Descendants
from lachesis_deploy.supervisor import RoleFailed, supervise

FOREVER = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    "print('up', flush=True); time.sleep(60)"
)
# A child in a session of its own that outlives its parent unless somebody looks for it.
RUNAWAY = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    "start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
)


def python(role, code):
    return Command(role=role, argv=(sys.executable, "-S", "-c", code))


async def until(condition):
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.01)


@pytest.mark.trio
async def test_returns_when_all_have_ended_well(tmp_path):
    await supervise([python("queue", "print('hello')"), python("learner", "")], logs=tmp_path)
    assert (tmp_path / "queue.log").read_text() == "hello\n"
    assert (tmp_path / "learner.log").read_text() == ""


@pytest.mark.trio
async def test_a_role_that_fails_ends_the_others_and_is_named(tmp_path):
    failing = python("learner", "import sys; print('out of memory'); sys.exit(3)")
    with pytest.raises(RoleFailed) as failed:
        await supervise([python("queue", FOREVER), failing, python("actor-0", FOREVER)], logs=tmp_path)
    assert failed.value.role == "learner"
    text = str(failed.value)
    assert text.startswith("learner ended with code 3. Its log ")
    assert text.endswith("\n    out of memory")


@pytest.mark.trio
async def test_what_a_role_says_at_its_end_is_shown_whole_and_without_its_traceback(tmp_path):
    log = tmp_path / "actor-0.log"
    words = ["lachesis actor: EngineError: vLLM ended with status 1; its log x says:", *(f"  {n}" for n in range(30))]
    words.append("lachesis actor: OSError: gone")
    earlier = ["10:00:00 actor-0: up", "lachesis actor: the launch before", "10:00:09 actor-0: up again"]
    log.write_text("\n".join([*earlier, "Traceback (most recent call last):", "  frame", *words]) + "\n")
    with pytest.raises(RoleFailed) as failed:
        await supervise([python("actor-0", "raise SystemExit(1)")], logs=tmp_path)
    lines = "\n".join(f"    {word}" for word in words)
    assert str(failed.value) == f"actor-0 ended with code 1. Its log {log} ends with:\n{lines}"


@pytest.mark.trio
async def test_a_role_that_says_nothing_is_shown_by_its_last_lines(tmp_path):
    log = tmp_path / "actor-0.log"
    lines = ["lachesis actor: the launch before", "10:00:09 actor-0: up again", *map(str, range(20))]
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(RoleFailed) as failed:
        await supervise([python("actor-0", "raise SystemExit(1)")], logs=tmp_path)
    assert [line.strip() for line in str(failed.value).splitlines()[1:]] == list(map(str, range(5, 20)))


@pytest.mark.trio
async def test_a_killed_role_is_named_with_its_signal(tmp_path):
    suicide = python("actor-0", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RoleFailed, match="actor-0 was killed by SIGKILL"):
        await supervise([python("queue", FOREVER), suicide], logs=tmp_path)


@pytest.mark.trio
async def test_a_role_that_ends_before_the_run_does_has_failed(tmp_path):
    with pytest.raises(RoleFailed, match="learner ended with code 0 before the run was finished"):
        await supervise([python("queue", FOREVER), python("learner", "")], logs=tmp_path, finished=lambda: False)


@pytest.mark.trio
async def test_a_role_that_ignores_the_request_is_killed_after_the_grace(tmp_path):
    log = tmp_path / "queue.log"
    failing = python(
        "learner", f"import time\nwhile not open({str(log)!r}).read(): time.sleep(.01)\nraise SystemExit(1)"
    )
    start = time.monotonic()
    with pytest.raises(RoleFailed, match="learner"):
        await supervise([python("queue", STUBBORN), failing], logs=tmp_path, grace_seconds=0.3)
    assert 0.3 <= time.monotonic() - start < 15


@pytest.mark.trio
async def test_cancellation_asks_first_and_hurry_kills(tmp_path):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    hurry = trio.Event()
    async with trio.open_nursery() as nursery:

        async def run():
            await supervise(
                [python("queue", STUBBORN), python("learner", POLITE)], logs=tmp_path, hurry=hurry, grace_seconds=600
            )

        nursery.start_soon(run)
        for role in ("queue", "learner"):
            log = tmp_path / f"{role}.log"
            await until(lambda log=log: log.exists() and log.read_text())
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await until(lambda: len(psutil.Process().children()) - len(before) <= 1)  # the polite one is gone
            hurry.set()
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


@pytest.mark.trio
async def test_a_process_that_outlives_its_role_is_found_and_killed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lachesis_deploy.supervisor.LEAVE_SECONDS", 0.1)
    log = tmp_path / "actor-0.log"
    failing = python(
        "learner", f"import time\nwhile not open({str(log)!r}).read(): time.sleep(.01)\nraise SystemExit(1)"
    )
    with pytest.raises(RoleFailed, match="learner"):
        await supervise([python("actor-0", RUNAWAY), failing], logs=tmp_path)
    pid = int(log.read_text())
    assert not psutil.pid_exists(pid)
    assert f"killed a process that outlived its role: {pid} " in caplog.text


@pytest.mark.trio
async def test_a_program_that_does_not_exist_ends_what_was_started(tmp_path):
    before = {p.pid for p in psutil.Process().children()}
    with pytest.RaisesGroup(FileNotFoundError, flatten_subgroups=True):
        await supervise(
            [python("queue", FOREVER), Command(role="learner", argv=("/nonexistent/program",))], logs=tmp_path
        )
    assert {p.pid for p in psutil.Process().children()} <= before


@pytest.mark.trio
async def test_no_role_outlives_a_killed_launch(tmp_path):
    launch = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, trio; from pathlib import Path; from functools import partial\n"
            "from lachesis_deploy.processes import Command; from lachesis_deploy.supervisor import supervise\n"
            f"command = Command(role='queue', argv=(sys.executable, '-c', {STUBBORN!r}))\n"
            f"trio.run(partial(supervise, [command], logs=Path({str(tmp_path)!r})))",
        ]
    )
    try:
        await until(lambda: (tmp_path / "queue.log").exists() and (tmp_path / "queue.log").read_text())
        (role,) = psutil.Process(launch.pid).children()
    finally:
        os.kill(launch.pid, signal.SIGKILL)
        launch.wait()
    await until(lambda: not role.is_running() or role.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.trio
async def test_waiting_for_a_child_can_be_cancelled(tmp_path):
    child = Child(python("queue", FOREVER), log=tmp_path / "queue.log")
    with trio.move_on_after(0.05) as scope:
        await child.wait()
    assert scope.cancelled_caught
    assert child.code is None
    assert child.ending() == "is running"
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.kill()  # of an ended one does nothing
    child.close()


def test_descendants_leaves_older_children_alone():
    older = subprocess.Popen([sys.executable, "-S", "-c", FOREVER])
    try:
        descendants = Descendants()
        assert descendants.left() == []
        newer = subprocess.Popen([sys.executable, "-S", "-c", FOREVER])
        assert [p.pid for p in descendants.left()] == [newer.pid]
        newer.kill()
        newer.wait()
    finally:
        older.kill()
        older.wait()


@pytest.mark.trio
async def test_what_the_others_need_ends_after_them(tmp_path):
    note = "import signal, sys, time\ndef end(*_):\n {body}\n sys.exit(0)\nsignal.signal(signal.SIGTERM, end)\n"
    note += "open('{path}/{role}.up', 'w').close()\ntime.sleep(60)"
    slow = f"time.sleep(0.3); open('{tmp_path}/order', 'a').write('learner ')"
    fast = f"open('{tmp_path}/order', 'a').write('queue ')"
    queue = note.format(body=fast, path=tmp_path, role="queue")
    learner = note.format(body=slow, path=tmp_path, role="learner")
    commands = [
        Command(role="queue", argv=(sys.executable, "-S", "-c", queue), ends_last=True),
        python("learner", learner),
    ]
    async with trio.open_nursery() as nursery:

        async def run():
            await supervise(commands, logs=tmp_path)

        nursery.start_soon(run)
        await until(lambda: len(list(tmp_path.glob("*.up"))) == 2)
        nursery.cancel_scope.cancel()
    assert (tmp_path / "order").read_text() == "learner queue "
