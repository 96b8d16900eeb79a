from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from lachesis_actors.child import open_child

# A child that starts a grandchild, ignores SIGTERM if told so, and writes both ids.
FAMILY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
print("family", os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def family(log_path: Path) -> list[int]:
    with trio.fail_after(20):
        while True:
            if log_path.exists() and "family" in log_path.read_text():
                return [int(pid) for pid in log_path.read_text().split("family")[1].split()[:2]]
            await trio.sleep(0.02)


async def gone(pids: list[int]) -> None:
    with trio.fail_after(20):
        while any(running(pid) for pid in pids):
            await trio.sleep(0.02)


@pytest.mark.parametrize("manner", ["obedient", "deaf"])
@pytest.mark.trio
async def test_the_block_ends_child_and_grandchild(tmp_path, manner):
    log_path = tmp_path / "log"
    command = [sys.executable, "-I", "-S", "-c", FAMILY, manner]
    async with open_child(command, log_path=log_path, grace_seconds=0.3):
        pids = await family(log_path)
        assert all(running(pid) for pid in pids)
    await gone(pids)


@pytest.mark.trio
async def test_status_and_last_lines(tmp_path):
    command = [sys.executable, "-I", "-S", "-c", "print('a'); print('b'); raise SystemExit(3)"]
    async with open_child(command, log_path=tmp_path / "log") as child:
        assert await child.wait() == 3
        assert child.tail(lines=1) == "b"


@pytest.mark.trio
async def test_a_signals_status(tmp_path):
    command = [sys.executable, "-I", "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    async with open_child(command, log_path=tmp_path / "log") as child:
        assert await child.wait() == 128 + 9


@pytest.mark.trio
async def test_terminate_asks_the_child(tmp_path):
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('up', flush=True)\n"
    command = [sys.executable, "-I", "-S", "-c", script + "signal.pause()"]
    async with open_child(command, log_path=tmp_path / "log") as child:
        with trio.fail_after(20):
            while "up" not in child.tail():
                await trio.sleep(0.02)
            child.terminate()
            assert await child.wait() == 5


@pytest.mark.trio
async def test_cores(tmp_path):
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-I", "-S", "-c", "import os; print(os.sched_getaffinity(0))"]
    async with open_child(command, log_path=tmp_path / "log", cores=str(core)) as child:
        assert await child.wait() == 0
        assert child.tail() == f"{{{core}}}"


PARENT = """
import sys, trio
from pathlib import Path
from lachesis_actors.child import open_child

async def main():
    command = [sys.executable, "-I", "-S", "-c", sys.argv[2], sys.argv[3]]
    async with open_child(command, log_path=Path(sys.argv[1]), grace_seconds=0.3):
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("manner", ["obedient", "deaf"])
@pytest.mark.trio
async def test_no_orphan_is_left_when_the_parent_is_killed(tmp_path, manner):
    log_path = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log_path), FAMILY, manner])
    try:
        pids = await family(log_path)
        started = time.monotonic()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        await gone(pids)
        assert time.monotonic() - started < 5
    finally:
        with suppress(ProcessLookupError):
            parent.kill()
        parent.wait()
