"""Groups in a file: recorded batches to train from without a queue (`lachesis learner CONFIG --replay FILE`).

The file is a sequence of frames, each a little-endian uint32 length and that many bytes of msgpack: first the header
{kind: "groups", queue: id of the queue whose versions they name, or null}, then one packed group (`Group.pack`) a
frame. Every frame carries the schema version.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from lachesis_transport.messages import MAX_MESSAGE_BYTES, Group, MessageError, pack, take, unpack

KIND = "groups"

_LENGTH = struct.Struct("<I")


def write_groups(path: Path, groups: Iterable[Group], *, queue_id: str | None = None) -> int:
    """Write `groups` to `path`, whole or not at all (a reader never sees a part of it); returns how many they were.

    queue_id: of the queue whose versions they name. Raises MessageError when a group is malformed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with part.open("wb") as file:
            _write_frame(file, pack({"kind": KIND, "queue": queue_id}))
            for group in groups:
                group.validate()
                _write_frame(file, group.pack())
                count += 1
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def read_groups(path: Path) -> Iterator[Group]:
    """Yield the groups of a file in order, each checked; one group is in memory at a time.

    Raises MessageError, naming the file, the group and the field, for what is not such a file, is cut short or holds a
    malformed group, and FileNotFoundError.
    """
    with path.open("rb") as file:
        where = f"{path}: not a file of groups"
        try:
            _read_header(file)
            number = 0
            while True:
                where = f"{path}: group {number}"
                frame = _read_frame(file)
                if frame is None:
                    return
                group = Group.unpack(frame)
                group.validate()
                yield group
                number += 1
        except MessageError as error:
            raise type(error)(f"{where}: {error}") from None


def read_queue_id(path: Path) -> str | None:
    """Id of the queue whose versions the groups of a file name; None where it is not told. Raises as `read_groups`."""
    with path.open("rb") as file:
        try:
            return _read_header(file)
        except MessageError as error:
            expected = "expected what `lachesis queue --export` writes"
            raise type(error)(f"{path}: not a file of groups, {expected} (its header: {error})") from None


def _read_header(file: BinaryIO) -> str | None:
    header = unpack(_read_frame(file) or b"")
    kind = take(header, "kind", str)
    if kind != KIND:
        raise MessageError(f"kind: {kind!r}, expected {KIND!r}")
    queue_id: str | None = take({"queue": None, **header}, "queue", (str, type(None)))
    return queue_id


def _write_frame(file: BinaryIO, frame: bytes) -> None:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageError(f"frame: {len(frame)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    file.write(_LENGTH.pack(len(frame)))
    file.write(frame)


def _read_frame(file: BinaryIO) -> bytes | None:
    prefix = file.read(_LENGTH.size)
    if not prefix:
        return None
    if len(prefix) < _LENGTH.size:
        raise MessageError(f"frame: {len(prefix)} bytes of its length, expected {_LENGTH.size}: the file was cut short")
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise MessageError(f"frame: {length} bytes, expected at most {MAX_MESSAGE_BYTES}")
    frame = file.read(length)
    if len(frame) < length:
        raise MessageError(f"frame: {len(frame)} bytes, expected {length}: the file was cut short")
    return frame
