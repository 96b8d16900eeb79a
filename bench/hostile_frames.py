"""Frames that a broken or hostile client might send to the queue: malformed, or valid requests that were damaged.

    stream = mutations(seed=1)
    socket.send(next(stream))

Every request of docs/protocols.md takes part. The same seed gives the same stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from lachesis_transport.messages import SCHEMA, Group, Scores, Trajectory

NO_QUEUE = "0" * 32
"""The id of no queue: a queue that gets it answers that it does not know the client, whatever else is in the frame."""

Path = list[str | int]


def requests(random: random.Random, queue: str) -> dict[str, dict[str, Any]]:
    """One valid request a line of the table in docs/protocols.md, by a name of its own."""
    group = _group(random)
    scores = Scores.of([t.score for t in group.trajectories]).to_wire()
    report = [{"kind": "started", "version": 0}, {"kind": "activity", "tokens": random.randrange(1 << 20)}]
    fields: dict[str, dict[str, Any]] = {
        "hello": {"role": "actor", "name": f"stranger-{random.randrange(8)}", "incarnation": f"{random.random()}"},
        "ticket": {"version": random.randrange(4), "environment": "sums"},
        "void": {"ticket": random.randrange(100), "reason": "failed", "scores": scores},
        "void an ask": {"ticket": None, "ask": random.randrange(100), "reason": "cancelled", "scores": None},
        "put": {"group": group.pack(), "final": True},
        "heartbeat": {"version": 3, "report": report, "report_number": random.randrange(100)},
        "goodbye": {"version": None, "report": [], "report_number": random.randrange(100)},
        "reserve": {"parent": random.choice([None, 3])},
        "published": {"version": random.randrange(100)},
        "lease": {"version": random.randrange(100)},
        "trained": {"version": random.randrange(100)},
        "commit": {"version": random.randrange(100), "checkpoint": "checkpoints/3"},
        "finish": {"version": random.randrange(100)},
        "alive": {"role": "actor", "name": f"stranger-{random.randrange(8)}", "incarnation": f"{random.random()}"},
        "status": {},
        "inspect": {},
    }
    return {
        name: {"schema": SCHEMA, "op": name.split()[0], "id": random.randrange(1 << 32), "queue": queue, **more}
        for name, more in fields.items()
    }


def mutations(seed: int, *, queue: str = NO_QUEUE) -> Iterator[bytes]:
    """Yield malformed and damaged request frames without end; `queue` is the queue id that they name.

    Most frames are shorter than 1 KiB, none is longer than 64 KiB. A part of them is still valid in itself: a queue
    whose id they name may take a group from them, end a ticket or finish.
    """
    draw = random.Random(seed)
    while True:
        for request in requests(draw, queue).values():
            yield draw.choice(_DAMAGES)(draw, request)


def damage(random: random.Random, frame: bytes) -> bytes:
    """`frame` with bits flipped, bytes cut, added or repeated, or a length that promises too much."""
    raw = bytearray(frame)
    at = random.randrange(len(raw))
    kind = random.randrange(6)
    if kind == 0:
        for _ in range(random.randint(1, 8)):
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del raw[at:]
    elif kind == 2:
        del raw[at : at + random.randint(1, 16)]
    elif kind == 3:
        raw[at:at] = random.randbytes(random.randint(1, 16))
    elif kind == 4:
        raw += raw[at : at + 64]
    else:
        raw[at : at + 5] = random.choice(b"\xc6\xc9\xdb\xdd\xdf").to_bytes(1) + random.choice(_LENGTHS)
    return bytes(raw)


def _damage_bytes(random: random.Random, request: dict[str, Any]) -> bytes:
    return damage(random, encode(request))


def _replace_value(random: random.Random, request: dict[str, Any]) -> bytes:
    replace(request, random.choice(paths(request)), _hostile_value(random))
    return encode(request)


def _remove_value(random: random.Random, request: dict[str, Any]) -> bytes:
    path = random.choice(paths(request))
    del _parent(request, path)[path[-1]]  # type: ignore[arg-type]
    return encode(request)


def _rename_field(random: random.Random, request: dict[str, Any]) -> bytes:
    field = random.choice(sorted(request))
    request[random.choice([field + "s", field.upper(), "\udcff", ""])] = request.pop(field)
    return encode(request)


def _damage_group(random: random.Random, request: dict[str, Any]) -> bytes:
    """A sound request around a group that is not; another kind of damage where there is no group."""
    if "group" not in request:
        return _replace_value(random, request)
    group = msgpack.unpackb(request["group"])
    kind = random.randrange(3)
    if kind == 0:
        request["group"] = damage(random, request["group"])
    elif kind == 1:
        replace(group, random.choice(paths(group)), _hostile_value(random))
        request["group"] = encode(group)
    else:
        trajectory = group["trajectories"][0]
        trajectory["arrays"] = damage(random, trajectory["arrays"])
        request["group"] = encode(group)
    return encode(request)


def _nest(random: random.Random, request: dict[str, Any]) -> bytes:
    """Lists or maps within each other, deeper than a decoder's stack, or each promising more than there is."""
    opening = random.choice([b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xdd\x00\x00\x10\x00"])
    return opening * random.choice([10, 500, 1_000, 5_000]) + b"\xc0" * random.choice([0, 1, 5_000])


def _noise(random: random.Random, request: dict[str, Any]) -> bytes:
    return random.randbytes(random.choice([0, 1, 2, 16, 300, 5_000]))


_DAMAGES: list[Callable[[random.Random, dict[str, Any]], bytes]] = [
    _damage_bytes,
    _damage_bytes,
    _replace_value,
    _replace_value,
    _remove_value,
    _rename_field,
    _damage_group,
    _nest,
    _noise,
]
_LENGTHS = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x10\x00\x00", b"\x00\x00\x00\x00"]


def _hostile_value(random: random.Random) -> Any:
    scalars = [None, True, False, 0, -1, 1, 1.5, float("nan"), float("inf"), -(1 << 63), (1 << 63) - 1, (1 << 64) - 1]
    return random.choice(
        [
            *scalars,
            *("", "x", "x" * 5_000, "../../etc/passwd", "a\0b", "\udcff\udcfe", "-1", "𝛑" * 20),
            *(b"", b"\xff", random.randbytes(64)),
            *([], [None], [[]], [1, "2", b"3"], list(range(600)), {}, {"a": {}}, {"kind": 1}, {"": [[[]]]}),
            *(msgpack.Timestamp(random.randrange(1 << 40), 7), msgpack.ExtType(random.randrange(128), b"ext")),
        ]
    )


def paths(value: Any) -> list[Path]:
    """Where the values inside of `value` are: keys and indices from the outermost."""
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [[key, *rest] for key, inner in items for rest in [[], *paths(inner)]]


def _parent(value: Any, path: Path) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def replace(value: Any, path: Path, new: Any) -> None:
    """Put `new` where `path` leads."""
    _parent(value, path)[path[-1]] = new


def encode(message: Any) -> bytes:
    """As `pack`, but strings may hold what is not UTF-8 (as lone surrogates, by surrogateescape)."""
    frame: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    return frame


def _group(random: random.Random) -> Group:
    """A valid group of 1 to 3 trajectories of up to 40 tokens, of a ticket or none."""
    ticket = random.choice([None, random.randrange(100)])
    trajectories = []
    for _ in range(random.randint(1, 3)):
        n = random.randint(2, 40)
        mask = (np.arange(n) >= random.randint(1, n - 1)).astype(np.uint8)
        trajectories.append(
            Trajectory(
                tokens=np.arange(n, dtype=np.int32),
                mask=mask,
                logprobs=(-0.5 * mask).astype(np.float32),
                versions=np.where(mask, random.randrange(4), -1).astype(np.int32),
                advantages=mask.astype(np.float32),
                score=float(random.randrange(2)),
            )
        )
    return Group(
        group_id=f"{ticket}:0",
        ticket=ticket,
        actor="stranger",
        environment="sums",
        trajectories=tuple(trajectories),
    )
