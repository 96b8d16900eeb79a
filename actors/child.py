"""A child process that ends with its parent, with a log file of its own.

    async with open_child(["program", "argument"], log_path=Path("program.log")) as child:
        status = await child.wait()

Leaving the block, by whatever way, ends the child and everything that it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

KEEPER = Path(__file__).with_name("keeper.py")
TAIL_BYTES = 16 * 1024


def kept(command: Sequence[str], *, cores: Collection[int] | None = None, grace_seconds: float = 10.0) -> list[str]:
    """The command line that runs `command` under the keeper (see keeper.py): start it with a pipe as its standard input
    and `start_new_session=True`; closing the pipe ends it and its whole process group."""
    options = [] if cores is None else ["--cores", ",".join(map(str, sorted(cores)))]
    return [sys.executable, "-I", "-S", str(KEEPER), *options, "--grace", str(grace_seconds), "--", *command]


def tail(log_path: Path, *, lines: int = 20) -> str:
    """The last lines of a log file, "" when there is none."""
    try:
        with log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class Child:
    """A running child process."""

    def __init__(self, process: trio.Process, log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """Process id of the keeper, which is also the id of the child's process group."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end; the exit status (128 + n when signal n ended it)."""
        status = await self._process.wait()
        return status if status >= 0 else 128 - status

    def terminate(self) -> None:
        """Ask the child to end (SIGTERM), unless it already has."""
        self._process.terminate()

    def tail(self, *, lines: int = 20) -> str:
        """The last lines that the child wrote."""
        return tail(self.log_path, lines=lines)


@asynccontextmanager
async def open_child(
    command: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cores: Collection[int] | None = None,
    grace_seconds: float = 10.0,
) -> AsyncIterator[Child]:
    """Start `command` in its own process group, its output appended to `log_path`, pinned to `cores` where given.

    At the end of the block the child gets SIGTERM and, after `grace_seconds`, its whole group SIGKILL. The same happens
    when this process dies, also by kill -9.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = await trio.lowlevel.open_process(
            kept(command, cores=cores, grace_seconds=grace_seconds),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    try:
        yield Child(process, log_path)
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(grace_seconds + 5):
                await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
