"""The durable half of the replay queue: rows of plain values, the packed groups, the event log and the quarantine.

The broker saves what a request changed before it answers, so an acknowledgement means what `save` means.
`MemoryStore` keeps it while its process lives; `SqliteStore` (sqlite_store.py) also over a kill of it or the machine.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from lachesis_transport.event_log import Event as Event
from lachesis_transport.event_log import EventLog

QUARANTINED = 64
QUARANTINED_BYTES = 1 << 16
REASON_CHARACTERS = 1024
"""The quarantine keeps the newest QUARANTINED frames, the first QUARANTINED_BYTES of each, and as much of a reason."""

Key = str | int
Rows = dict[str, dict[Key, Any]]


class StoreError(ValueError):
    """The database cannot be used; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame that the queue would not take, kept for whoever wants to know what it was."""

    sender: str
    reason: str
    frame: bytes
    time: float
    """Seconds since 1970."""


@dataclass(slots=True)
class Writing:
    """What one commit keeps: all of it or, after a crash, nothing."""

    rows: dict[tuple[str, Key], Any | None] = field(default_factory=dict)
    """(table, key) -> a value of plain msgpack types; None deletes. Tuples come back as lists."""
    contents: dict[str, bytes | None] = field(default_factory=dict)
    """Group id -> packed group; None deletes."""
    events: list[Event] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.contents or self.events or self.refused)


class Store(ABC):
    """Where the queue's changes go before they are acknowledged."""

    queue_id: str
    """Names the state that this store holds. Clients see by it whether a queue that came back still knows their
    versions and tickets."""

    @abstractmethod
    def load(self) -> Rows:
        """All rows: table -> key -> value, keys in order (numbers first). For the start, before the first `save`."""

    @abstractmethod
    async def save(self, writing: Writing) -> None:
        """Keep the changes; after the return they are as safe as this store makes anything.

        The values are read before this awaits anything. One task at a time. A save that has begun is finished, also
        when its task is cancelled. Raises StoreError when the changes cannot be kept; then nothing more is saved.
        """

    @abstractmethod
    async def read(self, ids: Sequence[str]) -> list[bytes]:
        """The packed groups, in the order of `ids`. Raises KeyError naming one that is not there, StoreError
        naming one that is not as it was saved."""

    @abstractmethod
    def quarantine(self) -> list[Refused]:
        """The newest refused frames, oldest first."""

    def check(self) -> None:  # noqa: B027 - what has no files loses none
        """Raise StoreError when what is saved goes nowhere any more: the files were removed, say.

        Looks only now and then, so it may be called often.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of files and threads. What was saved stays saved."""


class MemoryStore(Store):
    """Keeps everything in memory: the state lives and dies with the process.

    log: where events go; without one they go nowhere.
    """

    def __init__(self, log: EventLog | None = None) -> None:
        self.queue_id = uuid.uuid4().hex
        self._log = log
        self._rows: dict[str, dict[Key, bytes]] = {}
        self._contents: dict[str, bytes] = {}
        self._quarantine: deque[Refused] = deque(maxlen=QUARANTINED)
        if log is not None:
            log.open([])

    def load(self) -> Rows:
        return {
            table: {key: unpack_value(rows[key]) for key in sorted(rows, key=lambda key: (isinstance(key, str), key))}
            for table, rows in self._rows.items()
            if rows
        }

    async def save(self, writing: Writing) -> None:
        for (table, key), value in writing.rows.items():
            if value is None:
                self._rows.get(table, {}).pop(key, None)
            else:
                self._rows.setdefault(table, {})[key] = pack_value(value)
        for name, content in writing.contents.items():
            if content is None:
                self._contents.pop(name, None)
            else:
                self._contents[name] = content
        self._quarantine.extend(map(shorten, writing.refused))
        if self._log is not None:
            self._log.append(self._log.lines(writing.events, time=time.time()))

    async def read(self, ids: Sequence[str]) -> list[bytes]:
        return [self._contents[name] for name in ids]

    def quarantine(self) -> list[Refused]:
        return list(self._quarantine)

    async def close(self) -> None:
        if self._log is not None:
            self._log.close()


def pack_value(value: Any) -> bytes:
    """A row's value as msgpack; raises TypeError, ValueError or OverflowError where it is not plain."""
    return msgpack.packb(value)


def unpack_value(packed: bytes) -> Any:
    """A row's value; maps may have numbers for keys."""
    return msgpack.unpackb(packed, strict_map_key=False)


def shorten(refused: Refused) -> Refused:
    """What the quarantine keeps of a refused frame."""
    return Refused(
        refused.sender[:REASON_CHARACTERS].encode(errors="replace").decode(),
        refused.reason[:REASON_CHARACTERS].encode(errors="replace").decode(),
        bytes(refused.frame[:QUARANTINED_BYTES]),
        refused.time,
    )
