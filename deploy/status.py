"""`lachesis status`: ask a running queue how it is doing."""

from __future__ import annotations

import sys
from typing import Any

import zmq

from lachesis_transport.keys import Keys
from lachesis_transport.messages import MessageError, pack, take, unpack

DEADLINE_SECONDS = 5.0


def ask_status(
    address: str, *, deadline_seconds: float = DEADLINE_SECONDS, keys: Keys | None = None
) -> dict[str, Any] | None:
    """The queue's statistics; None when nothing answers within the deadline. Raises MessageError on a wrong answer."""
    reply = ask(address, "status", deadline_seconds=deadline_seconds, keys=keys)
    return None if reply is None else take(reply, "statistics", dict)


def ask(address: str, op: str, *, deadline_seconds: float, keys: Keys | None) -> dict[str, Any] | None:
    """The queue's reply to a request without fields that needs no hello; None and errors as `ask_status`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            keys.secure_client(socket)
        socket.connect(address)
        socket.send(pack({"op": op, "id": 1}))
        if not socket.poll(int(deadline_seconds * 1000)):
            return None
        reply = unpack(socket.recv())
    if not reply.get("ok"):
        raise MessageError(f"{op}: the queue answered {reply.get('error')!r}")
    return reply


def print_status(address: str, keys: Keys | None = None) -> int:
    """Print what the queue at `address` says; returns the exit code, 2 when it does not answer."""
    try:
        statistics = ask_status(address, keys=keys)
    except MessageError as error:
        print(f"lachesis status: {error}", file=sys.stderr)
        return 2
    if statistics is None:
        print(f"lachesis status: no queue answers at {address} within {DEADLINE_SECONDS:.0f} s", file=sys.stderr)
        return 2
    for line in _lines(statistics):
        print(line)
    return 0


def _lines(statistics: dict[str, Any], indent: str = "") -> list[str]:
    width = max((len(key) for key in statistics), default=0)
    lines = []
    for key, value in statistics.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}")
            lines += _lines(value, indent + "  ") or [f"{indent}  none"]
        else:
            lines.append(f"{indent}{key:<{width}}  {value}")
    return lines
