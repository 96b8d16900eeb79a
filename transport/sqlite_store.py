"""A `Store` in one SQLite file.

One transaction a `save`, in WAL mode with synchronous=FULL: a return means that the disk has it. One connection, used
by one thread at a time; a lock beside the file keeps a second queue out.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from lachesis_transport.database import (
    BUSY_SECONDS,
    checked,
    checksum,
    configure,
    database_errors,
    make_tables,
    read_quarantine,
    read_rows,
)
from lachesis_transport.database import Peek as Peek
from lachesis_transport.database import peek as peek
from lachesis_transport.event_log import EventLog, Line
from lachesis_transport.store import (
    QUARANTINED,
    Key,
    Refused,
    Rows,
    Store,
    StoreError,
    Writing,
    pack_value,
    shorten,
)

SYNC_LINES = 1024
SYNC_SECONDS = 2.0
"""The event log is fsynced, and the outbox emptied, after so many lines or seconds."""
CHECK_SECONDS = 2.0
"""Whether the files are still there is looked at so often."""

SELECTED = (1, 8, 64)


class SqliteStore(Store):
    """Keeps everything in the database at `path`, made when missing, and the events in `log`.

    Raises StoreError when the file is no queue's database, is damaged, has another schema, cannot be opened, is open in
    another process, or is older than the events.
    """

    def __init__(self, path: Path, log: EventLog) -> None:
        self.path = Path(path)
        self._log = log
        self._free = trio.Lock()  # the connection is
        self._saving = False
        self._failure: str | None = None
        self._synced = 0
        self._synced_at = self._checked_at = time.monotonic()
        with ExitStack() as opened, database_errors(self.path, "opening"):
            self._lock = _lock(self.path)
            opened.callback(os.close, self._lock)
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS, cached_statements=64
            )
            opened.callback(self._db.close)
            configure(self._db)
            self.queue_id = make_tables(self._db)
            self._quarantine: deque[Refused] = deque(read_quarantine(self._db), maxlen=QUARANTINED)
            opened.callback(log.close)
            outbox = self._db.execute("SELECT number, line FROM log ORDER BY number").fetchall()
            log.open(outbox)
            # Lines are appended after their commit, so not even a power cut leaves the file ahead of the database.
            if (ahead := log.last - (outbox[-1][0] if outbox else 0)) > 0:
                raise StoreError(
                    f"{ahead} events in {log.path} (up to number {log.last}) are not in the database: it or its -wal "
                    "file was lost, damaged or replaced by an older one, and a queue that goes on from here issues "
                    "versions and tickets a second time. Expected files of one moment: restore them, or, to accept "
                    f"the loss, move {log.path.name} away"
                )
            files = [self.path, Path(f"{self.path}-wal"), Path(f"{self.path}.lock"), log.path]
            self._files = {path: identity for path in files if (identity := _identity(path)) is not None}
            opened.pop_all()

    def load(self) -> Rows:
        with database_errors(self.path, "loading"):
            return read_rows(self._db)

    async def save(self, writing: Writing) -> None:
        assert not self._saving, "save: another task is saving"
        if self._failure is not None:
            raise StoreError(f"{self.path}: nothing is saved any more, since: {self._failure}")
        self._saving = True
        try:
            pending = _Pending.read(writing, self._log)
            with database_errors(self.path, "saving"), trio.CancelScope(shield=True):
                async with self._free:
                    await self._keep(pending)
        except BaseException as error:
            self._failure = str(error)
            raise
        finally:
            self._saving = False
        self._quarantine.extend(pending.refused)

    async def _keep(self, pending: _Pending) -> None:
        # The many short statements run here: a thread would wait for the interpreter's lock at each of them. What may
        # wait for the disk runs in a thread.
        try:
            self._db.execute("BEGIN IMMEDIATE")
            pending.write(self._db)
            if self._synced:
                self._db.execute("DELETE FROM log WHERE number < ?", (self._synced,))  # the newest keeps the count
            await trio.to_thread.run_sync(self._commit, pending)
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _commit(self, pending: _Pending) -> None:
        _select(self._db, "DELETE FROM contents WHERE id IN", pending.removed)
        self._db.execute("COMMIT")
        self._synced = 0
        self._log.append(pending.lines)
        now = time.monotonic()
        if self._log.unsynced >= SYNC_LINES or (self._log.unsynced and now - self._synced_at >= SYNC_SECONDS):
            self._synced, self._synced_at = self._log.sync(), now

    async def read(self, ids: Sequence[str]) -> list[bytes]:
        with database_errors(self.path, "reading"):
            async with self._free:
                found = await trio.to_thread.run_sync(
                    _select, self._db, "SELECT id, checksum, content FROM contents WHERE id IN", ids
                )
            contents = {name: checked(name, kept, content) for name, kept, content in found}
        return [contents[name] for name in ids]

    def quarantine(self) -> list[Refused]:
        return list(self._quarantine)

    def check(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        for path, identity in self._files.items():
            if _identity(path) != identity:
                self._failure = f"{path}: was removed or replaced while a queue has it open; nothing is safe any more"
                raise StoreError(self._failure)

    async def close(self) -> None:
        with database_errors(self.path, "closing"), trio.CancelScope(shield=True):
            async with self._free:
                if self._lock >= 0:
                    await trio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        try:
            if self._failure is None:
                self._db.execute("DELETE FROM log WHERE number < ?", (self._log.sync(),))
        finally:
            self._log.close()
            self._db.close()
            os.close(self._lock)
            self._lock = -1


@dataclass(frozen=True, slots=True)
class _Pending:
    """A `Writing`, read at once and ready for the database."""

    upserted: list[tuple[str, Key, bytes]]
    deleted: list[tuple[str, Key]]
    added: list[tuple[str, bytes, bytes]]
    removed: list[str]
    lines: list[Line]
    refused: list[Refused]

    @classmethod
    def read(cls, writing: Writing, log: EventLog) -> _Pending:
        return cls(
            upserted=[(*key, pack_value(value)) for key, value in writing.rows.items() if value is not None],
            deleted=[key for key, value in writing.rows.items() if value is None],
            added=[
                (name, checksum(content), content) for name, content in writing.contents.items() if content is not None
            ],
            removed=[name for name, content in writing.contents.items() if content is None],
            lines=log.lines(writing.events, time=time.time()),
            refused=[shorten(refused) for refused in writing.refused[-QUARANTINED:]],
        )

    def write(self, db: sqlite3.Connection) -> None:
        """All but what is removed from the contents: to find their pages may need the disk."""
        db.executemany("REPLACE INTO rows VALUES (?, ?, ?)", self.upserted)
        db.executemany("DELETE FROM rows WHERE kind = ? AND key = ?", self.deleted)
        db.executemany("REPLACE INTO contents VALUES (?, ?, ?)", self.added)
        db.executemany("INSERT INTO log VALUES (?, ?)", self.lines)
        if self.refused:
            kept = [(refused.sender, refused.reason, refused.frame, refused.time) for refused in self.refused]
            db.executemany("INSERT INTO quarantine (sender, reason, frame, time) VALUES (?, ?, ?, ?)", kept)
            oldest = "(SELECT max(number) FROM quarantine) - ?"
            db.execute(f"DELETE FROM quarantine WHERE number <= {oldest}", (QUARANTINED,))


def _select(db: sqlite3.Connection, statement: str, names: Sequence[str]) -> list[tuple]:
    """Run `statement` for many names at a time, with few texts so that SQLite parses each once."""
    found = []
    for start in range(0, len(names), SELECTED[-1]):
        chosen = [*names[start : start + SELECTED[-1]]]
        width = next(width for width in SELECTED if width >= len(chosen))
        chosen += chosen[-1:] * (width - len(chosen))
        found += db.execute(f"{statement} ({','.join('?' * width)})", chosen).fetchall()
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another of its name; None when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> int:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StoreError(f"{path}: another process has this queue open; expected one at a time") from None
    except BaseException:
        os.close(lock)
        raise
    return lock
