"""Reading what HTTP clients send: bounded bodies, JSON, typed fields, and noticing that a client is gone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from starlette.requests import Request

T = TypeVar("T")

THREAD_BYTES = 1 << 16
"""Bodies from this size on are parsed in a thread, so that the event loop goes on."""


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
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal("invalid", f"body: not JSON ({error})") from None


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
