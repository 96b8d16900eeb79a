"""The replay queue's database: a `Store` in one SQLite file, and a way to look into it.

One transaction a `save`, in WAL mode with synchronous=FULL: a return means that the disk has it. One connection, used
by one thread at a time; a lock beside the file keeps a second queue out.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

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
    unpack_value,
)

SCHEMA = 1
"""Version of the database's tables; another one is refused."""

PAGE_BYTES = 1 << 13
CACHE_BYTES = 64 << 20
CHECKPOINT_BYTES = 32 << 20
WAL_BYTES = 64 << 20
"""Larger pages suit large groups, smaller ones the rows. The write-ahead log is copied back at CHECKPOINT_BYTES and cut
to WAL_BYTES after a larger transaction. The database reuses the pages of what was deleted: it stays as large as the
most it held."""

SYNC_LINES = 1024
SYNC_SECONDS = 2.0
"""The event log is fsynced, and the outbox emptied, after so many lines or seconds."""

BUSY_SECONDS = 5.0
SELECTED = (1, 8, 64)

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE rows (kind TEXT, key, value BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID",
    "CREATE TABLE contents (id TEXT PRIMARY KEY, content BLOB)",
    "CREATE TABLE log (number INTEGER PRIMARY KEY, line TEXT)",
    "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, sender TEXT, reason TEXT, frame BLOB, time REAL)",
)


class SqliteStore(Store):
    """Keeps everything in the database at `path`, made when missing, and the events in `log`.

    Raises StoreError when the file is no queue's database, is damaged, has another schema, cannot be opened, or is open
    in another process.
    """

    def __init__(self, path: Path, log: EventLog) -> None:
        self.path = Path(path)
        self._log = log
        self._free = trio.Lock()  # the connection is
        self._saving = False
        self._failure: str | None = None
        self._synced = 0
        self._synced_at = time.monotonic()
        with ExitStack() as opened, _errors(self.path, "opening"):
            self._lock = _lock(self.path)
            opened.callback(os.close, self._lock)
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS, cached_statements=64
            )
            opened.callback(self._db.close)
            _configure(self._db)
            self.queue_id = _make_tables(self._db)
            self._quarantine: deque[Refused] = deque(_quarantine(self._db), maxlen=QUARANTINED)
            opened.callback(log.close)
            log.open(self._db.execute("SELECT number, line FROM log ORDER BY number").fetchall())
            opened.pop_all()

    def load(self) -> Rows:
        with _errors(self.path, "loading"):
            return _rows(self._db)

    async def save(self, writing: Writing) -> None:
        assert not self._saving, "save: another task is saving"
        if self._failure is not None:
            raise StoreError(f"{self.path}: nothing is saved any more, since: {self._failure}")
        self._saving = True
        try:
            pending = _Pending.read(writing, self._log)
            with _errors(self.path, "saving"), trio.CancelScope(shield=True):
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
        with _errors(self.path, "reading"):
            async with self._free:
                found = await trio.to_thread.run_sync(
                    _select, self._db, "SELECT id, content FROM contents WHERE id IN", ids
                )
        contents: dict[str, bytes] = dict(found)
        return [contents[name] for name in ids]

    def quarantine(self) -> list[Refused]:
        return list(self._quarantine)

    async def close(self) -> None:
        with _errors(self.path, "closing"), trio.CancelScope(shield=True):
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
    added: list[tuple[str, bytes]]
    removed: list[str]
    lines: list[Line]
    refused: list[Refused]

    @classmethod
    def read(cls, writing: Writing, log: EventLog) -> _Pending:
        return cls(
            upserted=[(*key, pack_value(value)) for key, value in writing.rows.items() if value is not None],
            deleted=[key for key, value in writing.rows.items() if value is None],
            added=[(name, content) for name, content in writing.contents.items() if content is not None],
            removed=[name for name, content in writing.contents.items() if content is None],
            lines=log.lines(writing.events, time=time.time()),
            refused=[shorten(refused) for refused in writing.refused[-QUARANTINED:]],
        )

    def write(self, db: sqlite3.Connection) -> None:
        """All but what is removed from the contents: to find their pages may need the disk."""
        db.executemany("REPLACE INTO rows VALUES (?, ?, ?)", self.upserted)
        db.executemany("DELETE FROM rows WHERE kind = ? AND key = ?", self.deleted)
        db.executemany("REPLACE INTO contents VALUES (?, ?)", self.added)
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


@dataclass(frozen=True, slots=True)
class Peek:
    """What a queue's database held at one moment."""

    path: Path
    queue_id: str
    rows: Rows
    """Table -> key -> value."""
    contents: dict[str, int]
    """Group id -> bytes of the packed group."""
    quarantine: list[Refused]
    """Oldest first."""

    def content(self, name: str) -> bytes:
        """The packed group; raises KeyError when it is not there (any more), StoreError as `peek`."""
        with _looking(self.path) as db:
            row = db.execute("SELECT content FROM contents WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        return row[0]


def peek(path: Path) -> Peek:
    """Look into the database of a queue, stopped or running, without changing or holding up anything.

    Raises StoreError when there is no database at `path`, or none that this version can read.
    """
    with _looking(Path(path)) as db:
        queue_id = _check_tables(db)
        contents = dict(db.execute("SELECT id, length(content) FROM contents ORDER BY id"))
        return Peek(Path(path), queue_id, _rows(db), contents, _quarantine(db))


@contextmanager
def _looking(path: Path) -> Iterator[sqlite3.Connection]:
    log = Path(f"{path}-wal")
    with _errors(path, "looking"):
        if not path.exists():
            raise StoreError(f"{path}: there is no such file, expected a queue's database")
        still = not log.exists()  # nobody has it open: SQLite may, and without files to share must, look at it alone
        uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if still else ''}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
        try:
            db.execute("BEGIN")
            yield db
            if still and log.exists():
                raise StoreError(f"{path}: a queue opened it just now; look again")
        finally:
            db.close()


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


def _configure(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = OFF")  # else each page of a deleted group is written once more
    db.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")


def _make_tables(db: sqlite3.Connection) -> str:
    """Make the tables of a new database; returns the queue's id."""
    db.execute("BEGIN IMMEDIATE")
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in TABLES:
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('schema', ?), ('queue_id', ?)", (SCHEMA, uuid.uuid4().hex))
    db.execute("COMMIT")
    return _check_tables(db)


def _check_tables(db: sqlite3.Connection) -> str:
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        raise StoreError("a database of something else, expected a queue's")
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if meta.get("schema") != SCHEMA:
        raise StoreError(f"schema {meta.get('schema')!r}, expected {SCHEMA}: written by another version of Lachesis")
    return meta["queue_id"]


def _rows(db: sqlite3.Connection) -> Rows:
    tables: dict[str, dict[Key, Any]] = {}
    for table, key, value in db.execute("SELECT kind, key, value FROM rows ORDER BY kind, key"):
        tables.setdefault(table, {})[key] = unpack_value(value)
    return tables


def _quarantine(db: sqlite3.Connection) -> list[Refused]:
    found = db.execute("SELECT sender, reason, frame, time FROM quarantine ORDER BY number")
    return [Refused(*row) for row in found]


@contextmanager
def _errors(path: Path, doing: str) -> Iterator[None]:
    """Errors of the disk and of SQLite become StoreErrors that name the database and what was done to it."""
    try:
        yield
    except StoreError as error:
        raise error if str(path) in str(error) else StoreError(f"{path}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {doing} failed: {error}") from error
