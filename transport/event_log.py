"""events.jsonl: each event of the queue is one line, exactly once, also over a kill between commit and append.

A store keeps the lines of a commit in its outbox, in the same transaction, and appends them after the commit. A line
leaves the outbox only when the file was fsynced behind it. So whatever the end of the file looks like after a crash (a
torn line, lines that are missing, blocks of zeros), the outbox has every line that may be damaged: opening the log cuts
the file back to the last line that is older than the outbox and writes the outbox again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 1 << 18
"""Length of the longest line; a longer one is replaced by an `unwritable` event."""

QUEUE = "queue"
"""Source of the queue's own events."""

LOGGED = {
    "joined",
    "parted",
    "dropped",
    "voided",
    "left",
    "returned",
    "finished",
    "trained",
    "committed",
    "skipped",
    "reopened",
}
"""Kinds of the queue's own events that its log shows, too."""

_CHUNK = 1 << 16

Line = tuple[int, str]
"""Number of an event, and its line without the end of line."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the queue or to one of its clients: one line of events.jsonl."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Plain values that describe it."""
    source: str = QUEUE
    """Who says so: the queue, or the client that reported it."""

    @property
    def is_logged(self) -> bool:
        """Whether the queue's log shows it."""
        return self.source == QUEUE and self.kind in LOGGED

    def __str__(self) -> str:
        """For the log: what a client wrote makes no lines of its own there."""
        shown = ((key, str(value)) for key, value in self.fields.items())
        return " ".join([self.kind, *(f"{key}={text if text.isprintable() else ascii(text)}" for key, text in shown)])


class EventLog:
    """Appends events to a file of JSON lines, with `number` (grows by one), `time` (seconds since 1970), `source` and
    `kind` in each. A store owns it: it opens the log with its outbox, and keeps `lines` before it appends them."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = -1
        self._last = 0
        self._unsynced = 0

    def open(self, outbox: Sequence[Line]) -> None:
        """Make the file what the outbox says that it must be; a missing file starts with the lines of the outbox.

        outbox: the lines that may not be on disk yet, in order. Where it is empty, only a torn last line is cut off.
        Raises OSError when the file cannot be opened or written.
        """
        created = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if created:
            _sync_folder(self.path.parent)
        end, last = _intact(self._file, None)
        if outbox and last <= outbox[-1][0]:  # else the file is ahead: its database was replaced by an older one
            end, last = _intact(self._file, outbox[0][0])
        else:
            outbox = ()
        os.ftruncate(self._file, end)
        self._last = last
        self.append(outbox)
        self.sync()

    def lines(self, events: Sequence[Event], *, time: float) -> list[Line]:
        """Number the events and write them as JSON. An event that is not plain JSON, has a NaN or is too long becomes
        one of kind `unwritable` that says which it was and why."""
        first = self._last + 1
        return [(number, _line(event, number, time)) for number, event in enumerate(events, first)]

    def append(self, lines: Sequence[Line]) -> None:
        """Hand lines that the store keeps to the operating system; raises OSError when it does not take them all."""
        if not lines:
            return
        rest = memoryview("".join([f"{line}\n" for _, line in lines]).encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._last = lines[-1][0]
        self._unsynced += len(lines)

    @property
    def last(self) -> int:
        """Number of the last line, 0 without one."""
        return self._last

    @property
    def unsynced(self) -> int:
        """Lines appended since the last `sync`."""
        return self._unsynced

    def sync(self) -> int:
        """Wait for the disk; returns the number of the last line: it and all before it may leave the outbox."""
        os.fsync(self._file)
        self._unsynced = 0
        return self._last

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _line(event: Event, number: int, time: float) -> str:
    head = {"number": number, "time": time, "source": event.source, "kind": event.kind}
    try:
        line = json.dumps({**head, **event.fields, **head}, allow_nan=False)  # first for the order, last for the values
        if len(line) <= MAX_CHARACTERS:
            return line
        reason = f"{len(line)} characters, expected at most {MAX_CHARACTERS}"
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    head.update(source=str(event.source)[:64], kind="unwritable")
    return json.dumps({**head, "event": str(event.kind)[:64], "reason": reason[:512]})


def _intact(file: int, before: int | None) -> tuple[int, int]:
    """Where the file is whole up to, and the number of its last event until there; (0, 0) where nothing is.

    before: look for the last event with a smaller number. None: cut off no more than a torn last line.
    """
    whole = 0
    for start, line in _backward(file):
        if not line.endswith(b"\n"):
            continue
        whole = whole or start + len(line)
        number = _number(line)
        if number is not None and (before is None or number < before):
            return (whole if before is None else start + len(line)), number
    return (whole if before is None else 0), 0


def _number(line: bytes) -> int | None:
    """Number of the event in a line, 0 for one without; None when the line is no event."""
    try:
        number = json.loads(line).get("number", 0)
    except (ValueError, AttributeError, RecursionError):
        return None
    return number if isinstance(number, int) else None


def _backward(file: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, the last first; every one but the last ends with its end of line."""
    start = end = os.fstat(file).st_size
    chunks: list[bytes] = []  # of the line that is being collected, the last first
    while start > 0:
        size = min(_CHUNK, start)
        start -= size
        chunk = os.pread(file, size, start)
        cut = size
        while (newline := chunk.rfind(b"\n", 0, cut)) >= 0:
            line = b"".join([chunk[newline + 1 : cut], *reversed(chunks)])
            if line:
                end -= len(line)
                yield end, line
            chunks = [b"\n"]
            cut = newline
        chunks.append(chunk[:cut])
    if chunks:
        yield 0, b"".join(reversed(chunks))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
