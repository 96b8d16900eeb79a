"""Child processes that cannot outlive their parent, and what they leave behind.

A child gets its own session and a parent-death signal, so that it goes with a parent that was killed with -9. The
parent is made the reaper of its descendants, so that a process whose own parent died stays visible to it, whatever
session or process group it moved to.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

LAST_WORDS = 60
"""Lines that are shown of what a role said at its end."""
LAST_LINES = 15
"""Lines that are shown of the log of a role that said nothing."""

_LOGGED = re.compile(r"\d\d:\d\d:\d\d ")
_SAID = re.compile(r"lachesis [a-z]+: ")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A role to be started."""

    role: str
    """Its name in messages and the name of its log file."""
    argv: tuple[str, ...]
    """Program and arguments."""
    ends_last: bool = False
    """Whether the others need it until their end: it is asked to end after they have."""


class Child:
    """One running role. Start it on the main thread: the parent-death signal follows the thread that forked."""

    def __init__(self, command: Command, *, log: Path) -> None:
        """Start `command` with stdout and stderr appended to the file `log`. Raises OSError when it cannot start."""
        self.role = command.role
        self.ends_last = command.ends_last
        self.log = log
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._exit = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, minus the signal that killed it, or None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for the end; returns the code. Cancellation leaves the process running."""
        while (code := self.code) is None:
            await trio.lowlevel.wait_readable(self._exit)
        return code

    def terminate(self) -> None:
        """Ask the role to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the role with its process group."""
        # Popen has not reaped the leader, so the group's number cannot belong to anyone else yet.
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the handle of a process that has ended."""
        os.close(self._exit)

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.code
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def last_words(self) -> list[str]:
        """The end of its log that tells why it ended."""
        return last_words(self.log)


def last_words(log: Path) -> list[str]:
    """What a role says at its end, after the traceback: from its first `lachesis VERB: ` after its last line of log on.

    Its last lines when it was killed before it could say anything.
    """
    lines = tail(log, 1000, max_bytes=1 << 16)
    logged = max((i for i, line in enumerate(lines) if _LOGGED.match(line)), default=-1)
    for i in range(logged + 1, len(lines)):
        if _SAID.match(lines[i]):
            return lines[i:][:LAST_WORDS]
    return lines[-LAST_LINES:]


def tail(path: Path, lines: int, *, max_bytes: int = 8192) -> list[str]:
    """The last lines of a text file, at most `max_bytes` of it; [] when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]


class Descendants:
    """The processes that come from this one's children since `Descendants` was made, orphans included."""

    def __init__(self) -> None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = {process.pid for process in psutil.Process().children()}

    def left(self) -> list[psutil.Process]:
        """Those that still run. Reaps the dead ones that were handed to this process."""
        left = []
        for child in psutil.Process().children():
            if child.pid in self._before:
                continue
            try:
                left += [p for p in child.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
                if child.status() != psutil.STATUS_ZOMBIE:
                    left.append(child)
                else:
                    os.waitpid(child.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue
        return left

    async def end(self, *, patience: float) -> list[str]:
        """Wait `patience` seconds for all to be gone, then kill what is left; returns that as `pid command` lines."""
        with trio.move_on_after(patience):
            while self.left():
                await trio.sleep(0.05)
            return []
        stubborn = []
        while left := self.left():
            for process in left:
                stubborn.append(_described(process))
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            await trio.sleep(0.05)
        return list(dict.fromkeys(stubborn))


def _described(process: psutil.Process) -> str:
    try:
        words: Sequence[str] = process.cmdline() or [process.name()]
    except psutil.Error:
        words = ["?"]
    return f"{process.pid} {' '.join(words)[:120]}"
