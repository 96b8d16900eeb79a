"""The msgpack form of one message: a map, stamped with the schema version.

    frame = pack({"op": "trained", "version": 7})
    version = take(unpack(frame), "version", int)

Whatever a stranger sends, `unpack` and `take` end in a value or in a MessageError.
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgpack

SCHEMA = 2
"""Version of every message between roles (`messages`). It grows with any change of meaning or layout."""

MAX_MESSAGE_BYTES = 1 << 30
"""A frame longer than this is neither sent nor read."""

SHORT_LIST = 64
"""A frame whose lists have at most so many items is decoded at once, another only after its lengths were checked."""

MAX_TEXT = 4096
MAX_INTEGER = (1 << 63) - 1


class MessageError(ValueError):
    """A message is malformed. The text names the field, the value and what was expected."""


class SchemaError(MessageError):
    """The message was written under another schema version."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode one message (a map of plain values and `bytes`) and stamp it with the schema version.

    Raises MessageError for a value that has no msgpack form, and for a message that no receiver would read.
    """
    try:
        frame = msgpack.packb({"schema": SCHEMA, **message})
    except (OverflowError, TypeError, ValueError) as error:
        raise MessageError(f"message: {type(error).__name__}: {error}, expected values with a msgpack form") from None
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message: {len(frame)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return frame


def unpack(frame: bytes | memoryview) -> dict[str, Any]:
    """Decode one message. What that allocates is bounded by a multiple of the frame's size, whatever it holds.

    Raises MessageError when the frame is oversized, is not msgpack or is not a map, and SchemaError when it was written
    under another schema version.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageError(f"frame: {len(frame)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    try:
        message = _decode(frame)
    except Exception as error:  # msgpack raises a dozen types on garbage
        raise MessageError(f"frame: not msgpack ({type(error).__name__}: {error})") from None
    if not isinstance(message, dict):
        raise MessageError(f"frame: {type(message).__name__}, expected a map")
    schema = message.pop("schema", None)
    if schema != SCHEMA:
        raise SchemaError(f"schema: version {brief(schema)}, this process speaks version {SCHEMA}")
    return message


def _decode(frame: bytes | memoryview) -> Any:
    # The decoder reserves a list before it has seen an item, at up to 1024 levels: a longer list only where it is real.
    try:
        return msgpack.unpackb(frame, max_array_len=SHORT_LIST, ext_hook=_refuse_extension)
    except ValueError:
        scan = msgpack.Unpacker(max_buffer_size=len(frame))
        scan.feed(frame)
        scan.skip()
        return msgpack.unpackb(frame, ext_hook=_refuse_extension)


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


_MISSING = object()
_TAKEN_AS_THEY_ARE = {bool, bytes, dict, float, list}


def take(message: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    """`message[key]`, checked to be of `kind` (bool is not an int here; an int is accepted as a float)."""
    value: Any = message.get(key, _MISSING)
    if type(value) is kind and kind in _TAKEN_AS_THEY_ARE:
        return value
    if kind is int and type(value) is int and value <= MAX_INTEGER:
        return value
    if value is _MISSING:
        raise MessageError(f"{key}: missing")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds:
        raise MessageError(f"{key}: {value!r}, expected {_kind_names(kinds)}")
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    if not isinstance(value, kinds):
        raise MessageError(f"{key}: {brief(value)}, expected {_kind_names(kinds)}")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise MessageError(f"{key}: {len(value)} characters, expected at most {MAX_TEXT}")
    if isinstance(value, int) and value > MAX_INTEGER:
        raise MessageError(f"{key}: {value}, expected at most {MAX_INTEGER}")
    return value


def _kind_names(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)


class _Brief(reprlib.Repr):
    """The repr of a value that a stranger sent: it looks at no more of it than it shows."""

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[:100])

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:100])


_BRIEF = _Brief()


def brief(value: Any) -> str:
    """The value for an error text: at most 80 characters of it."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
