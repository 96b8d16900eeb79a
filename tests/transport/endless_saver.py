"""A process that saves until it is killed, `endless_saver.py FOLDER MOMENT`; prints the number of each save.

Save n adds row n, content n and events about n, deletes those of n - KEPT, and continues after the last n that the
database has. At MOMENT (`never`, or one of the places below) it kills itself in the middle of a save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import trio

from lachesis_transport.event_log import EventLog
from lachesis_transport.sqlite_store import SqliteStore
from lachesis_transport.store import Event, Writing

KEPT = 20
EVENTS = 3
SAVES_BEFORE_MOMENT = 5


def content(n: int) -> bytes:
    return random.Random(n).randbytes(1 + n * 7919 % 100_000)


class DyingLog(EventLog):
    moment = "never"
    left = SAVES_BEFORE_MOMENT

    def lines(self, events, *, time):
        self.left -= 1
        return super().lines(events, time=time)

    def append(self, lines):
        if self.left == 0 and self.moment == "before append":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0 and self.moment == "in append":
            os.write(self._file, "\n".join(line for _, line in lines)[:-10].encode())
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(lines)
        if self.left == 0 and self.moment == "after append":
            os.kill(os.getpid(), signal.SIGKILL)


async def save_endlessly(folder: Path, moment: str) -> None:
    log = DyingLog(folder / "events.jsonl")
    log.moment = moment
    store = SqliteStore(folder / "queue.db", log)
    n = max(store.load().get("t", {0: None}))
    while True:
        n += 1
        await store.save(
            Writing(
                rows={("t", n): {"n": n}, ("t", n - KEPT): None, ("state", "last"): n},
                contents={str(n): content(n), str(n - KEPT): None},
                events=[Event("saved", {"n": n, "part": part}) for part in range(EVENTS)],
            )
        )
        os.write(1, b"%d\n" % n)


if __name__ == "__main__":
    trio.run(save_endlessly, Path(sys.argv[1]), sys.argv[2])
