"""The replay queue's database: its tables and settings, and a way to look into it from outside."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from lachesis_transport.store import Key, Refused, Rows, StoreError, unpack_value

SCHEMA = 2
"""Version of the database's tables; another one is refused."""

PAGE_BYTES = 1 << 13
CACHE_BYTES = 64 << 20
CHECKPOINT_BYTES = 32 << 20
WAL_BYTES = 64 << 20
"""Larger pages suit large groups, smaller ones the rows. The write-ahead log is copied back at CHECKPOINT_BYTES and cut
to WAL_BYTES after a larger transaction. The database reuses the pages of what was deleted: it stays as large as the
most it held."""

BUSY_SECONDS = 5.0

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE rows (kind TEXT, key, value BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID",
    "CREATE TABLE contents (id TEXT PRIMARY KEY, checksum BLOB, content BLOB)",
    "CREATE TABLE log (number INTEGER PRIMARY KEY, line TEXT)",
    "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, sender TEXT, reason TEXT, frame BLOB, time REAL)",
)


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
            row = db.execute("SELECT id, checksum, content FROM contents WHERE id = ?", (name,)).fetchone()
            if row is None:
                raise KeyError(name)
            return checked(*row)


def peek(path: Path) -> Peek:
    """Look into the database of a queue, stopped or running, without changing or holding up anything.

    Raises StoreError when there is no database at `path`, or none that this version can read.
    """
    with _looking(Path(path)) as db:
        queue_id = _check_tables(db)
        contents = dict(db.execute("SELECT id, length(content) FROM contents ORDER BY id"))
        return Peek(Path(path), queue_id, read_rows(db), contents, read_quarantine(db))


@contextmanager
def _looking(path: Path) -> Iterator[sqlite3.Connection]:
    log = Path(f"{path}-wal")
    with database_errors(path, "looking"):
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


def configure(db: sqlite3.Connection) -> None:
    """Settings of the connection that writes; the first one of a new file also fixes its page size."""
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = OFF")  # else each page of a deleted group is written once more
    db.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")


def make_tables(db: sqlite3.Connection) -> str:
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


def read_rows(db: sqlite3.Connection) -> Rows:
    """Table -> key -> value, keys in order."""
    tables: dict[str, dict[Key, Any]] = {}
    for table, key, value in db.execute("SELECT kind, key, value FROM rows ORDER BY kind, key"):
        try:
            tables.setdefault(table, {})[key] = unpack_value(value)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise StoreError(f"row {table} {key!r} is damaged ({type(error).__name__}), expected msgpack") from None
    return tables


def read_quarantine(db: sqlite3.Connection) -> list[Refused]:
    """Oldest first."""
    found = db.execute("SELECT sender, reason, frame, time FROM quarantine ORDER BY number")
    return [Refused(*row) for row in found]


def checksum(content: bytes) -> bytes:
    """What is kept beside a group's content: SQLite itself notices no flipped bit."""
    return xxhash.xxh3_64_digest(content)


def checked(name: str, kept: bytes, content: bytes) -> bytes:
    """`content`; raises StoreError when it is not what was saved as group `name`."""
    if not isinstance(content, bytes) or checksum(content) != kept:
        raise StoreError(f"group {name} is damaged: its content does not have the checksum that it was saved with")
    return content


@contextmanager
def database_errors(path: Path, doing: str) -> Iterator[None]:
    """Errors of the disk and of SQLite become StoreErrors that name the database and what was done to it."""
    try:
        yield
    except StoreError as error:
        raise error if str(path) in str(error) else StoreError(f"{path}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {doing} failed: {error}") from error
