"""What the queue holds and does, for people and programs: plain values made from its state.

Counts are exact; lists are cut, so that the answer stays small whatever the queue holds. Nothing here changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lachesis_transport.ledger import COUNTED
from lachesis_transport.presence import Client
from lachesis_transport.records import Lease, Ticket
from lachesis_transport.replay import Replay
from lachesis_transport.store import Refused

LISTED = 256
"""Actors, environments, and pairs of them, that are listed."""

URGENT = 20
"""Tickets that are listed: those due first."""

BATCHES = 20
"""Batches in no checkpoint that are listed: the newest."""

REASONS = 64
"""Reasons that are listed by themselves; clients may make up any number of them."""

TEXT = 200
"""Characters of a text that are shown."""

HEAD_BYTES = 64
"""Bytes of a refused frame that are shown."""

OTHER = "(other)"


def inspect(replay: Replay, quarantine: Sequence[Refused], *, now: float) -> dict[str, Any]:
    """Everything that `lachesis queue --inspect` shows, as values with a msgpack and a JSON form.

    Deadlines are depths in the lineage tree, bytes include what a group costs beside its content, times are seconds.
    """
    statistics, tickets = replay.statistics(), replay.tickets
    learner = replay.learner
    return {
        "versions": _versions(replay, statistics["staleness_max"]),
        "groups": _groups(replay),
        "ready_by_staleness": [[age, number] for age, number in ready_ages(replay).items()],
        "tickets": _tickets(tickets, replay.next_depth),
        "lease": None if replay.leased is None else _batch(replay.leased),
        "uncommitted": [_batch(lease) for lease in replay.uncommitted[-BATCHES:]],
        "learner": None if learner is None else _client(learner, now),
        "actors": _actors(replay, tickets, now),
        "environments": _environments(replay, tickets),
        "counts": {name: statistics[name] for name in COUNTED},
        "tickets_voided": first_reasons(statistics["tickets_voided"]),
        "groups_dropped": first_reasons(statistics["groups_dropped"]),
        "quarantine": [_refused(refused) for refused in quarantine],
    }


def ready_ages(replay: Replay) -> dict[int | None, int]:
    """Ready groups by the staleness that they would have in the next batch to be leased: 0 to S, and None for more.

    A group counts by its oldest trained token.
    """
    depth, bound = replay.next_depth + (replay.leased is not None), replay.rules.staleness_max
    ages: dict[int | None, int] = dict.fromkeys([*range(bound + 1), None], 0)
    for entry in replay.ready:
        age = max(0, depth + bound - entry.deadline)
        ages[age if age <= bound else None] += 1
    return ages


def first_reasons(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by reason, those beyond the first REASONS added up: none is lost, and none ever falls."""
    shown: dict[str, int] = {}
    for at, (reason, number) in enumerate(counts.items()):
        name = _brief(reason) if at < REASONS else OTHER
        shown[name] = shown.get(name, 0) + number
    return shown


def _versions(replay: Replay, oldest: int) -> dict[str, Any]:
    current = replay.lineage.current
    return {
        "newest": current,
        "depth": None if current is None else replay.lineage.depth(current),
        "reserved": len(replay.lineage),
        "step": replay.step,
        "steps": replay.rules.steps,
        "final": replay.final,
        "next_depth": replay.next_depth,
        "staleness_bound": replay.rules.staleness_max,
        "staleness_trained": oldest,
    }


def _groups(replay: Replay) -> dict[str, Any]:
    leased, uncommitted, rules = replay.leased, replay.uncommitted, replay.rules
    return {
        "ready": len(replay.ready),
        "ready_bytes": sum(entry.nbytes for entry in replay.ready),
        "leased": len(leased.groups) if leased else 0,
        "leased_bytes": leased.nbytes if leased else 0,
        "held_bytes": replay.bytes_held,
        "max_bytes": rules.max_bytes,
        "uncommitted": sum(len(lease.groups) for lease in uncommitted),
        "uncommitted_batches": len(uncommitted),
        "uncommitted_bytes": replay.bytes_uncommitted,
        "max_uncommitted_bytes": rules.max_uncommitted_bytes,
        "batch_groups": rules.batch_groups,
    }


def _tickets(tickets: Sequence[Ticket], next_depth: int) -> dict[str, Any]:
    parts: dict[tuple[str, str], list[Ticket]] = {}
    for ticket in tickets:
        parts.setdefault((ticket.actor, ticket.environment), []).append(ticket)
    shares = [
        {
            "actor": actor,
            "environment": _brief(environment),
            "open": len(part),
            "oldest_version": min(ticket.version for ticket in part),
            "earliest_deadline": min(ticket.deadline for ticket in part),
        }
        for (actor, environment), part in sorted(parts.items())[:LISTED]
    ]
    urgent = [
        {
            "ticket": ticket.number,
            "actor": ticket.actor,
            "environment": _brief(ticket.environment),
            "version": ticket.version,
            "deadline": ticket.deadline,
            "batches_left": ticket.deadline - next_depth,
            "item": ticket.item,
            "attempts": ticket.attempts,
            "groups": ticket.groups,
        }
        for ticket in sorted(tickets, key=lambda ticket: (ticket.deadline, ticket.number))[:URGENT]
    ]
    return {"open": len(tickets), "pairs": len(parts), "by_actor_and_environment": shares, "most_urgent": urgent}


def _batch(lease: Lease) -> dict[str, Any]:
    return {
        "version": lease.version,
        "groups": len(lease.groups),
        "bytes": lease.nbytes,
        "staleness": max(lease.distances.values(), default=0),
        "masked_versions": len(lease.masked),
    }


def _client(client: Client, now: float) -> dict[str, Any]:
    return {"name": client.name, "heard_seconds_ago": now - client.heard}


def _actors(replay: Replay, tickets: Iterable[Ticket], now: float) -> dict[str, Any]:
    actors, held = replay.actors, Counter(ticket.actor for ticket in tickets)
    listed = [
        {
            **_client(actors[name], now),
            "version": actors[name].version,
            "open_tickets": held[name],
            "groups_accepted": actors[name].accepted,
            "groups_per_second": actors[name].rate.a_second(now),
        }
        for name in sorted(actors)[:LISTED]
    ]
    return {"live": len(actors), "listed": listed}


def _environments(replay: Replay, tickets: Iterable[Ticket]) -> dict[str, Any]:
    streams, weights = replay.items.streams, replay.rules.weights
    names = sorted({*streams, *weights})
    held = Counter(ticket.environment for ticket in tickets)
    taken = {name: stream.next - len(stream.returned) for name, stream in streams.items()}
    all_taken, all_weights = sum(taken.values()), sum(weights.get(name, 1.0) for name in names)
    listed = [
        {
            "name": _brief(name),
            "next_item": streams[name].next if name in streams else 0,
            "returned_items": len(streams[name].returned) if name in streams else 0,
            "open_tickets": held[name],
            "share": taken.get(name, 0) / all_taken if all_taken else None,
            "weight_share": weights.get(name, 1.0) / all_weights,
        }
        for name in names[:LISTED]
    ]
    return {"known": len(names), "listed": listed}


def _refused(refused: Refused) -> dict[str, Any]:
    return {
        "time": refused.time,
        "sender": _brief(refused.sender),
        "reason": _brief(refused.reason),
        "bytes_kept": len(refused.frame),
        "head": refused.frame[:HEAD_BYTES].hex(),
    }


def _brief(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 3] + "..."
