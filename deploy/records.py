"""Reading the growing files of a run folder: JSON lines piece by piece, JSON files whole."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JsonLines:
    """A JSON-lines file that another process appends to.

    `read` returns the complete lines that were added since the last call. Lines that are no JSON maps (a process was
    killed while it wrote) are counted in `broken`. NaN and infinities, which JSON does not have, become None.
    A file that was replaced by another is read from its beginning.

    Args:
        skip: leave out what is there already.
        max_bytes: what one `read` takes at most.
    """

    def __init__(self, path: Path, *, skip: bool = False, max_bytes: int = 1 << 26) -> None:
        self.path = path
        self.broken = 0
        found = path.stat() if skip and path.exists() else None
        self._file = found.st_ino if found else None
        self._offset = found.st_size if found else 0
        self._rest = b""
        self._max_bytes = max_bytes

    def read(self) -> list[Record]:
        """New lines, at most `max_bytes` of them (call again for more); [] while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._file, self._offset, self._rest = found.st_ino, 0, b""
                file.seek(self._offset)
                data = file.read(self._max_bytes)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = []
        for line in lines:
            record = _parse(line) if line.strip() else None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                self.broken += 1
        return records


def read_all(path: Path) -> list[Record]:
    """Every complete line of the file."""
    lines = JsonLines(path)
    records: list[Record] = []
    while new := lines.read():
        records += new
    return records


def read_json(path: Path) -> Record | None:
    """The JSON map in the file; None when there is none or it is being written."""
    try:
        record = _parse(path.read_bytes())
    except FileNotFoundError:
        return None
    return record if isinstance(record, dict) else None


def number(record: Record, key: str) -> float | None:
    """`record[key]` when it is a finite number."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def numbers(records: list[Record], key: str) -> list[float]:
    """The finite numbers under `key`, in order."""
    return [value for record in records if (value := number(record, key)) is not None]


def of_kind(events: list[Record], kind: str) -> list[Record]:
    """The lines of events.jsonl of that kind."""
    return [event for event in events if event.get("kind") == kind]


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return None
