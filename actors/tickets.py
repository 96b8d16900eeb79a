"""The tickets that this actor's environments hold. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

ENDED_KEPT = 4096
"""Ended tickets that are remembered, so that a request that was sent again gets the same answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One ticket."""

    ticket: int
    environment: str
    version: int
    """Policy version that the actor served when the ticket was issued."""
    refusal: str | None = None
    """Why the last group that was posted under it was refused, as one word."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was answered to posted groups, by their digest."""


class Tickets:
    """Live tickets, and the last of those that ended."""

    def __init__(self) -> None:
        self._live: dict[int, Ticket] = {}
        self._ended: OrderedDict[int, Ticket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, ticket: int, *, environment: str, version: int) -> None:
        """A ticket was issued to an environment."""
        self._live[ticket] = Ticket(ticket=ticket, environment=environment, version=version)

    def live(self, ticket: int) -> Ticket | None:
        """The ticket while it is live."""
        return self._live.get(ticket)

    def ended(self, ticket: int) -> Ticket | None:
        """The ticket when it ended not long ago."""
        return self._ended.get(ticket)

    def end(self, ticket: int) -> Ticket | None:
        """The ticket's group was scored, or it was voided. Returns it when it was live."""
        ended = self._live.pop(ticket, None)
        if ended is not None:
            self._ended[ticket] = ended
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)
        return ended

    def everything_live(self) -> list[int]:
        """All live tickets."""
        return list(self._live)
