"""Reading what HTTP clients send: bounded bodies, JSON, typed fields, and noticing that a client is gone."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from starlette.requests import Request

T = TypeVar("T")

THREAD_BYTES = 1 << 16
"""Bodies from this size on are parsed in a thread, so that the event loop goes on."""


MAX_DIGITS = 18
"""Digits of an integer, at most: what fits into 64 bits."""

MAX_NAME = 64
"""Characters of a name, at most."""


class Refusal(Exception):
    """An answer with an error status. `reason` is one word, for counters."""

    def __init__(self, reason: str, text: str, *, status: int = 400) -> None:
        super().__init__(text)
        self.reason = reason
        self.status = status


async def read_json(request: Request, *, max_bytes: int) -> Any:
    """The request's JSON body, plain or gzip. Raises Refusal when it is neither, or larger than `max_bytes`."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise Refusal("too_large", f"body: more than {max_bytes} bytes", status=413)
        chunks.append(chunk)
    raw = b"".join(chunks)
    zipped = "gzip" in request.headers.get("content-encoding", "").lower()
    if len(raw) < THREAD_BYTES and not zipped:
        return _decode(raw, zipped=False, max_bytes=max_bytes)
    return await trio.to_thread.run_sync(lambda: _decode(raw, zipped=zipped, max_bytes=max_bytes))


def _decode(raw: bytes, *, zipped: bool, max_bytes: int) -> Any:
    if zipped:
        inflater = zlib.decompressobj(wbits=31)
        try:
            raw = inflater.decompress(raw, max_bytes)
        except zlib.error as error:
            raise Refusal("invalid", f"body: not gzip ({error})") from None
        if inflater.unconsumed_tail:
            raise Refusal("too_large", f"body: more than {max_bytes} bytes", status=413)
    try:
        body = json.loads(raw, parse_int=_integer, parse_float=_real, parse_constant=_real)
        if b"\\u" in raw:  # an escape may name half a character, which no other message could carry
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal("invalid", f"body: not JSON that can be read ({error})") from None
    return body


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, expected at most {MAX_DIGITS}")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40}, expected a finite number")
    return value


def take_field(body: Any, key: str, kind: type, *, default: Any = None) -> Any:
    """`body[key]`, checked to be of `kind`; `default` where it is null or missing. Raises Refusal."""
    if not isinstance(body, dict):
        raise Refusal("invalid", f"body: {type(body).__name__}, expected an object")
    value = body.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refusal("invalid", f"{key}: {value!r:.80}, expected {kind.__name__}")
    return value


def take_name(body: Any, key: str) -> str:
    """`body[key]`, a string that can be a name. Raises Refusal."""
    name = take_field(body, key, str)
    if not 0 < len(name) <= MAX_NAME:
        raise Refusal("invalid", f"{key}: {len(name)} characters, expected 1 to {MAX_NAME}")
    return str(name)


async def while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> tuple[T | None, bool]:
    """Do `work` while the client is there: its result (None if it was cancelled), and whether the client is gone.

    The body must have been read. The work is cancelled as soon as the client hangs up.
    """
    gone = False
    result: T | None = None
    failure: Exception | None = None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            result = await work()
        except Exception as error:
            # Raised below, outside of the nursery, so that it isn't wrapped in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result, gone
