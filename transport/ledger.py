"""What the queue remembers about what is over: events to save, counts, and the fate of ended tickets and groups."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, TypeVar

from lachesis_transport.messages import Group
from lachesis_transport.store import Event

REMEMBERED = 1 << 16
"""Ended tickets, and ended groups, whose fate is remembered to answer a repeated request."""

COUNTED = (
    "tickets_issued",
    "groups_accepted",
    "groups_duplicate",
    "groups_invalid",
    "groups_trained",
    "groups_returned",
    "groups_committed",
    "groups_forgotten",
    "groups_left",
    "puts_refused_full",
    "bound_violations",
)

Key = TypeVar("Key", int, str)


class Ledger:
    """Events and counts of one queue."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.voided: Counter[str] = Counter()
        """Tickets voided, by reason."""
        self.dropped: Counter[str] = Counter()
        """Groups dropped, by reason."""
        self._tickets: OrderedDict[int, str] = OrderedDict()
        self._groups: OrderedDict[str, str] = OrderedDict()
        self._events: list[Event] = []
        self._marked: Counter[str] = Counter()

    def note(self, kind: str, content: Group | None = None, **fields: Any) -> None:
        """Add a change to be saved; `content` is the group that was accepted."""
        self._events.append(Event(kind, fields, content))

    def drain(self) -> list[Event]:
        """The changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def end_ticket(self, ticket: int, fate: str) -> None:
        """Remember why a ticket ended."""
        _remember(self._tickets, ticket, fate)

    def end_group(self, name: str, fate: str) -> None:
        """Remember what became of a group."""
        _remember(self._groups, name, fate)

    def revive_group(self, name: str) -> None:
        """The group is ready again."""
        self._groups.pop(name, None)

    def ticket_fate(self, ticket: int) -> str:
        """Why a ticket ended."""
        return self._tickets.get(ticket, "long ago")

    def group_fate(self, name: str) -> str | None:
        """What became of a group; None when it did not end, or too long ago."""
        return self._groups.get(name)

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
        """Counts since the queue started."""
        return {
            **{name: self.counts[name] for name in COUNTED},
            "tickets_voided": dict(self.voided),
            "groups_dropped": dict(self.dropped),
        }


def _remember(memory: OrderedDict[Key, str], key: Key, fate: str) -> None:
    memory[key] = fate
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)
