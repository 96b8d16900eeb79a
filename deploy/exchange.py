"""`lachesis queue --export` and `--import`: groups from a queue's database to a file, from a file to a queue."""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import trio

from lachesis_configs.schema import Config
from lachesis_deploy.inspection import ANSWER_SECONDS, queue_address
from lachesis_deploy.status import ask
from lachesis_transport.client import QueueError, queue_status
from lachesis_transport.groups_file import read_groups, read_queue_id, write_groups
from lachesis_transport.keys import Keys, load_keys
from lachesis_transport.messages import Group, MessageError, content_id, take
from lachesis_transport.producer import open_producer
from lachesis_transport.queue_files import DATABASE
from lachesis_transport.sockets import plain_errors
from lachesis_transport.sqlite_store import Peek, peek
from lachesis_transport.store import StoreError

STATUSES = ("accepted", "duplicate", "stale", "invalid")

AWAY_SECONDS = 30.0
"""Silence of the queue after which an import gives up."""

WATCH_SECONDS = 5.0

REASONS = 16
"""Reasons that are printed."""


def export_groups(folder: Path, file: Path) -> int:
    """Write all groups that the queue in `folder` holds to `file`, oldest tickets first; returns the exit code.

    The queue may run or not and does not notice. 2 when there is no database, or no folder for the file.
    """
    if not file.parent.is_dir():
        print(f"lachesis queue: {file}: expected a path in a folder that exists", file=sys.stderr)
        return 2
    left: list[str] = []
    try:
        held = peek(folder / DATABASE)
        written = write_groups(file, _contents(held, left), queue_id=held.queue_id)
    except (StoreError, MessageError) as error:
        print(f"lachesis queue: {error}", file=sys.stderr)
        return 2
    gone = f"; {len(left)} ended while it was written" if left else ""
    print(f"{file}: {written} groups of queue {held.queue_id}{gone}")
    return 0


def _contents(held: Peek, left: list[str]) -> Iterator[Group]:
    rows = held.rows.get("group", {})
    for name in sorted(map(str, rows), key=lambda name: tuple(rows[name][:2])):
        try:
            yield Group.unpack(held.content(name))
        except KeyError:
            left.append(name)


def import_groups(config: Config, folder: Path, file: Path) -> int:
    """Put the groups of `file` into the running queue, waiting while it is full; prints what became of them.

    Returns the exit code: 1 when a group was invalid or the queue went away, 2 when there is no queue, or the file is
    none of groups.
    """
    address, keys = queue_address(config, folder), load_keys(config)
    counts: Counter[tuple[str, str]] = Counter()
    try:
        source = read_queue_id(file)
        reply = ask(address, "inspect", deadline_seconds=ANSWER_SECONDS, keys=keys)
        if reply is None:
            print(f"lachesis queue: no queue answers at {address} within {ANSWER_SECONDS:.0f} s", file=sys.stderr)
            return 2
        here = take(reply, "queue", str)
    except MessageError as error:
        print(f"lachesis queue: {error}", file=sys.stderr)
        return 2
    if source not in (None, here):
        print(
            f"{file} comes from queue {source}: its versions are policies of that queue's run, and are taken here "
            f"only where a version of the same number was published"
        )
    code = 0
    try:
        trio.run(_import, address, keys, file, (source, here), counts)
    except (MessageError, QueueError) as error:
        code = 2 if isinstance(error, MessageError) else 1
        print(f"lachesis queue: {error}", file=sys.stderr)
    finally:
        _print(file, address, counts)
    return code or int(any(status == "invalid" for status, _ in counts))


async def _import(
    address: str, keys: Keys | None, file: Path, queues: tuple[str | None, str], counts: Counter[tuple[str, str]]
) -> None:
    name = f"import-{os.getpid()}"
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, address, keys)
            with plain_errors():
                async with open_producer(address, name, uuid.uuid4().hex, keys) as producer:
                    for group in read_groups(file):
                        reply = await producer.put(_named(group, name, *queues), final=False)
                        counts[reply.status, reply.reason] += 1
            nursery.cancel_scope.cancel()


async def _watch(address: str, keys: Keys | None) -> None:
    """Raise QueueError when the queue goes away: a producer waits for it for ever."""
    while True:
        await queue_status(address, seconds=AWAY_SECONDS, keys=keys)
        await trio.sleep(WATCH_SECONDS)


def _named(group: Group, actor: str, source: str | None, here: str) -> Group:
    """`group`, exported from the queue `source`, as this client may put it into the queue `here`.

    To the queue that took it in first, by whatever way it comes back, under its id there: that queue has it, or
    remembers its end, and takes no group of a ticket that is not the sender's. To any other queue without a ticket.
    """
    origin = group.origin or (None if source is None else (source, group.group_id))
    if origin is None or origin[0] != here:
        return replace(group, actor=actor, ticket=None, group_id=content_id(group.trajectories), origin=origin)
    number, ticketed, _ = origin[1].partition(":")
    if ticketed and not number.isdecimal():
        raise MessageError(f"origin: {origin[1]!r}, expected the id of a group")
    return replace(group, actor=actor, ticket=int(number) if ticketed else None, group_id=origin[1], origin=None)


def _print(file: Path, address: str, counts: Counter[tuple[str, str]]) -> None:
    totals = Counter[str]()
    for (status, _), number in counts.items():
        totals[status] += number
    told = ", ".join(f"{totals[status]} {status}" for status in STATUSES)
    print(f"{file}: {totals.total()} groups put into the queue at {address}: {told}")
    reasons = [(number, status, reason) for (status, reason), number in counts.most_common() if reason]
    for number, status, reason in reasons[:REASONS]:
        print(f"  {number} {status}: {reason}")
    if len(reasons) > REASONS:
        print(f"  and {len(reasons) - REASONS} more reasons")
