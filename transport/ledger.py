"""What the queue remembers about what is over: events to log, counts, and the fate of ended tickets and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, TypeVar

from lachesis_transport.store import Event
from lachesis_transport.tables import Table

REMEMBERED = 1 << 16
"""Ended tickets, and ended groups, whose fate is remembered to answer a repeated request."""

REASONS = 64
"""Different reasons of voided tickets that are counted by themselves."""

COUNTED = (
    "tickets_issued",
    "groups_accepted",
    "groups_duplicate",
    "groups_invalid",
    "groups_trained",
    "groups_returned",
    "groups_committed",
    "groups_left",
    "uses_forgone",
    "items_skipped",
    "puts_refused_full",
    "bound_violations",
    "frames_refused",
    "reports_refused",
    "replies_lost",
)

Key = TypeVar("Key", bound=Hashable)
Fate = TypeVar("Fate")


class Ledger:
    """Events and counts of one queue."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.voided: Counter[str] = Counter()
        """Tickets voided, by reason."""
        self.dropped: Counter[str] = Counter()
        """Groups dropped, by reason."""
        self.tickets: Table[int, str] = Table("ticket_fate", str)
        """Why a ticket ended."""
        self.groups: Table[str, tuple[int, str]] = Table("group_fate", list)
        """What became of a group, numbered in the order of their ends."""
        self._ends = 0
        self._events: list[Event] = []
        self._marked: Counter[str] = Counter()

    def note(self, kind: str, **fields: Any) -> None:
        """Add a line to the event log."""
        self._events.append(Event(kind, fields))

    def report(self, event: Event) -> None:
        """Add a client's own line to the event log."""
        self._events.append(event)

    def drain(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def end_ticket(self, ticket: int, fate: str) -> None:
        """Remember why a ticket ended."""
        _remember(self.tickets, ticket, fate)

    def end_group(self, name: str, fate: str) -> None:
        """Remember what became of a group."""
        self._ends += 1
        _remember(self.groups, name, (self._ends, fate))

    def group_fate(self, name: str) -> str | None:
        """What became of a group; None when it did not end, or too long ago."""
        end = self.groups.get(name)
        return None if end is None else end[1]

    def void(self, reason: str) -> None:
        """Count a voided ticket. Clients name reasons freely: beyond REASONS different ones they count as `other`."""
        known = reason in self.voided or len(self.voided) < REASONS
        self.voided[reason if known else "other"] += 1

    def ticket_fate(self, ticket: int) -> str:
        """Why a ticket ended."""
        return self.tickets.get(ticket, "long ago")

    def lost(self) -> dict[str, int]:
        """Groups that came to nothing, by reason: dropped, or their tickets voided."""
        return dict(self.voided + self.dropped)

    def mark(self) -> None:
        """Count `lost_since_mark` from here."""
        self._marked = self.voided + self.dropped

    def lost_since_mark(self) -> dict[str, int]:
        """As `lost`, since the last mark."""
        return dict(self.voided + self.dropped - self._marked)

    def statistics(self) -> dict[str, Any]:
        """Counts since the run started."""
        return {
            **{name: self.counts[name] for name in COUNTED},
            "tickets_voided": dict(self.voided),
            "groups_dropped": dict(self.dropped),
        }

    def to_row(self) -> list[dict[str, int]]:
        """The counts as plain values."""
        return [dict(counter) for counter in (self.counts, self.voided, self.dropped, self._marked)]

    def restore(self, row: list[dict[str, int]], tickets: dict[int, str], groups: dict[str, list[Any]]) -> None:
        """Take over saved counts and fates."""
        self.counts, self.voided, self.dropped, self._marked = (Counter(counts) for counts in row)
        self.tickets.restore(dict(sorted(tickets.items())), lambda _, fate: fate)
        self.groups.restore(dict(sorted(groups.items(), key=lambda end: end[1][0])), lambda _, end: (end[0], end[1]))
        self._ends = max((number for number, _ in self.groups.values()), default=0)


def _remember(memory: Table[Key, Fate], key: Key, fate: Fate) -> None:
    memory[key] = fate
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
