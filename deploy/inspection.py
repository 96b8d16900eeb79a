"""`lachesis queue --inspect`: what a queue holds and does, as it says itself or, when none answers, its database."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lachesis_configs.load import load_config
from lachesis_configs.schema import Config
from lachesis_deploy.folder import CONFIG
from lachesis_deploy.status import ask
from lachesis_transport.broker import rules
from lachesis_transport.inspection import inspect
from lachesis_transport.keys import load_keys
from lachesis_transport.messages import MessageError, take
from lachesis_transport.queue_files import DATABASE
from lachesis_transport.replay import Replay
from lachesis_transport.sqlite_store import Peek, peek
from lachesis_transport.store import StoreError

ANSWER_SECONDS = 2.0

COLUMNS = 240
"""Width of what is printed into a pipe."""

TEXT = 60
"""Characters of a text in a table."""


class NoQueue(RuntimeError):
    """Neither a queue that answers nor a database that can be read; the text says what was tried."""


def print_inspection(config: Config, folder: Path, *, as_json: bool) -> int:
    """Print what the queue of a run holds and does; returns the exit code, 2 when there is nothing to look at."""
    try:
        found = look(config, folder)
    except (NoQueue, MessageError) as error:
        print(f"lachesis queue: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0


def look(config: Config, folder: Path) -> dict[str, Any]:
    """`inspect` of the running queue or, when none answers, of what `folder`/queue.db holds; `source` says which.

    Times since a client was heard, and rates, are null for a database: it does not have them.
    Raises NoQueue, and MessageError when a queue gives a wrong answer.
    """
    address = queue_address(config, folder)
    reply = ask(address, "inspect", deadline_seconds=ANSWER_SECONDS, keys=load_keys(config))
    if reply is not None:
        head = {"source": "queue", "address": address, "run": take(reply, "run_name", str), "queue": reply["queue"]}
        return {**head, **take(reply, "inspection", dict)}
    database = folder / DATABASE
    try:
        held = peek(database)
        changed = max(path.stat().st_mtime for path in (database, Path(f"{database}-wal")) if path.exists())
    except (StoreError, OSError) as error:
        raise NoQueue(f"no queue answers at {address} within {ANSWER_SECONDS:.0f} s, and {error}") from None
    found = inspect(restored(config, held), held.quarantine, now=0.0)
    for client in [*found["actors"]["listed"], *([found["learner"]] if found["learner"] else [])]:
        client["heard_seconds_ago"] = None
        if "groups_per_second" in client:
            client["groups_per_second"] = None
    head = {"source": "database", "address": address, "database": str(database), "changed": changed}
    return {**head, "run": config.run.name, "queue": held.queue_id, **found}


def restored(config: Config, held: Peek) -> Replay:
    """The state that a database holds, under the rules of `config`. To be looked at, not to go on with."""
    told = rules(config)
    replay = Replay.restore(replace(told, steps=0), held.rows, now=0.0)  # a queue that goes on may reopen its run
    replay.rules = told
    return replay


def queue_address(config: Config, folder: Path) -> str:
    """Where the queue is: `queue.address`, or what a launch chose where its port is 0."""
    if config.queue.address.endswith(":0") and (folder / CONFIG).is_file():
        return load_config(folder / CONFIG).queue.address
    return config.queue.address


# ---------------------------------------------------------------------- for people


def _print(found: dict[str, Any]) -> None:
    # A pipe has no width: whole lines there.
    console = Console(width=None if sys.stdout.isatty() else COLUMNS, highlight=False)
    versions, groups = found["versions"], found["groups"]
    console.print(Text(_source(found)), soft_wrap=True)
    console.print(_pairs(_overview(found)))
    holds = _table("groups", "groups>", "bytes>", "limit>")
    holds.add_row("ready", str(groups["ready"]), _size(groups["ready_bytes"]), "")
    holds.add_row("leased", str(groups["leased"]), _size(groups["leased_bytes"]), "")
    both = groups["ready"] + groups["leased"]
    holds.add_row("ready and leased", str(both), _size(groups["held_bytes"]), _size(groups["max_bytes"]))
    limit = _size(groups["max_uncommitted_bytes"])
    holds.add_row("trained, in no checkpoint", str(groups["uncommitted"]), _size(groups["uncommitted_bytes"]), limit)
    _section(console, "What it holds", holds)
    ages = _table("staleness if trained next", "groups>", "")
    most = max((number for _, number in found["ready_by_staleness"]), default=0)
    for age, number in found["ready_by_staleness"]:
        name = f"above {versions['staleness_bound']}" if age is None else str(age)
        ages.add_row(name, str(number), "#" * round(40 * number / most) if most else "")
    _section(console, "Ready groups", ages)
    _tickets(console, found["tickets"])
    batches = _table("batch", "of version>", "groups>", "bytes>", "staleness>")
    named = [("leased", found["lease"])] if found["lease"] else []
    for name, batch in [*named, *(("trained", batch) for batch in reversed(found["uncommitted"]))]:
        row = (batch["version"], batch["groups"], _size(batch["bytes"]), batch["staleness"])
        batches.add_row(name, *map(str, row))
    left_out = groups["uncommitted_batches"] - len(found["uncommitted"])
    _section(console, "Batches leased, or trained and in no checkpoint", batches, left_out)
    actors = _table("actor", "version>", "heard>", "open tickets>", "groups accepted>", "groups/s>")
    for actor in found["actors"]["listed"]:
        rate = actor["groups_per_second"]
        row = (_or_dash(actor["version"]), _ago(actor), actor["open_tickets"], actor["groups_accepted"])
        actors.add_row(_plain(actor["name"]), *map(str, row), "-" if rate is None else f"{rate:.2f}")
    _section(console, "Actors", actors, found["actors"]["live"] - len(found["actors"]["listed"]))
    streams = _table("environment", "next item>", "returned items>", "open tickets>", "share>", "by weight>")
    for stream in found["environments"]["listed"]:
        share = "-" if stream["share"] is None else f"{stream['share']:.1%}"
        row = (stream["next_item"], stream["returned_items"], stream["open_tickets"], share)
        streams.add_row(_plain(stream["name"]), *map(str, row), f"{stream['weight_share']:.1%}")
    _section(console, "Environments", streams, found["environments"]["known"] - len(found["environments"]["listed"]))
    _section(console, "Counts since the run started", _pairs(list(found["counts"].items())))
    for title, key in (("Tickets voided", "tickets_voided"), ("Groups dropped", "groups_dropped")):
        _section(console, title, _pairs(list(found[key].items())))
    refused = _table("refused at", "sender", "reason", "bytes>", "begins with")
    for frame in found["quarantine"]:
        start = frame["head"] if len(frame["head"]) <= 32 else frame["head"][:32] + "..."
        row = (_plain(frame["sender"]), _plain(frame["reason"], 2 * TEXT), str(frame["bytes_kept"]), start)
        refused.add_row(_time(frame["time"]), *row)
    _section(console, "Quarantine", refused)


def _source(found: dict[str, Any]) -> str:
    if found["source"] == "queue":
        return f"The queue at {found['address']} answered."
    changed = _time(found["changed"])
    return f"No queue answers at {found['address']}: this is what {found['database']} holds, written last at {changed}."


def _overview(found: dict[str, Any]) -> list[tuple[str, Any]]:
    versions, learner = found["versions"], found["learner"]
    newest = "none published" if versions["newest"] is None else f"{versions['newest']}, depth {versions['depth']}"
    ended = "" if versions["final"] is None else f"; finished with version {versions['final']}"
    oldest = f"bound {versions['staleness_bound']}, largest trained {versions['staleness_trained']}"
    return [
        ("run", found["run"]),
        ("queue", found["queue"]),
        ("newest version", newest),
        ("batches trained", f"{versions['step']} of {versions['steps']}{ended}"),
        ("batch to come", f"depth {versions['next_depth']}, {found['groups']['batch_groups']} groups"),
        ("staleness", oldest),
        ("learner", f"{learner['name']}, heard {_ago(learner)}" if learner else "none"),
    ]


def _tickets(console: Console, tickets: dict[str, Any]) -> None:
    shares = _table("actor", "environment", "open>", "oldest version>", "first due at depth>")
    for part in tickets["by_actor_and_environment"]:
        row = (part["open"], part["oldest_version"], part["earliest_deadline"])
        shares.add_row(_plain(part["actor"]), _plain(part["environment"]), *map(str, row))
    title = f"Open tickets: {tickets['open']}"
    _section(console, title, shares, tickets["pairs"] - len(tickets["by_actor_and_environment"]))
    urgent = _table(
        "ticket", "actor", "environment", "version>", "due at depth>", "batches left>", "item>", "attempts>"
    )
    for ticket in tickets["most_urgent"]:
        numbers = [ticket[key] for key in ("version", "deadline", "batches_left", "item", "attempts")]
        names = (str(ticket["ticket"]), _plain(ticket["actor"]), _plain(ticket["environment"]))
        urgent.add_row(*names, *map(str, numbers))
    _section(console, "Tickets that are due first", urgent, tickets["open"] - len(tickets["most_urgent"]))


def _section(console: Console, title: str, table: Table, left_out: int = 0) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    if table.row_count:
        console.print(table)
    else:
        console.print("  none")
    if left_out > 0:
        console.print(f"  and {left_out} more")


def _table(*columns: str) -> Table:
    """A table with these columns, those that end with `>` aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _pairs(pairs: Sequence[tuple[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, value in pairs:
        table.add_row(_plain(name), _plain(str(value)))
    return table


def _plain(text: str, length: int = TEXT) -> Text:
    """What a stranger wrote, in printable characters and without rich's markup."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: length + 1])
    return Text(shown if len(shown) <= length else shown[: length - 3] + "...")


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _ago(client: dict[str, Any]) -> str:
    seconds = client["heard_seconds_ago"]
    return "-" if seconds is None else f"{seconds:.1f} s ago"


def _size(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{number} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
