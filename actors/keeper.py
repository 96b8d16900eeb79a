"""Run one command and end it, with all its children, when the parent is gone.

    python keeper.py [--cores 0,1] [--grace SECONDS] -- COMMAND...

The keeper leads a process group of its own. It holds the reading end of a pipe (its standard input) whose writing end
lives in the parent: end of file there means the parent ended, be it by kill -9, or asked for the end. Then the command
gets SIGTERM, after the grace SIGKILL, and the whole group with it. A pipe and not the kernel's parent-death signal,
because that one fires when the *thread* that started the child ends, and reaches no grandchildren.
Otherwise the keeper ends with the command's exit status (128 + n for signal n). Standard library only: it starts in
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def _dies_with_its_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_on_eof(command: subprocess.Popen[bytes], grace: float, ending: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ending.set()
    command.terminate()
    try:
        command.wait(grace)
    except subprocess.TimeoutExpired:
        pass
    os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run the command; the exit status is its own."""
    at = argv.index("--")
    options = dict(zip(argv[:at:2], argv[1:at:2], strict=True))
    if "--cores" in options:
        os.sched_setaffinity(0, map(int, options["--cores"].split(",")))
    command = subprocess.Popen(argv[at + 1 :], stdin=subprocess.DEVNULL, preexec_fn=_dies_with_its_parent)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    signal.signal(signal.SIGINT, lambda *_: command.terminate())
    ending = threading.Event()
    grace = float(options.get("--grace", "10"))
    end = threading.Thread(target=_end_on_eof, args=(command, grace, ending), daemon=True)
    end.start()
    status = command.wait()
    if ending.is_set():
        end.join()  # what the command left behind in the group is still to be killed
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
