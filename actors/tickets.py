"""The tickets that this actor's environments hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One live ticket."""

    ticket: int
    environment: str
    version: int
    """Policy version that the ticket was issued at."""
    refusal: str | None = None
    """Why the last group that was posted under it was refused, as one word."""


class Tickets:
    """The live tickets; the queue bounds how many there are."""

    def __init__(self) -> None:
        self._live: dict[int, Ticket] = {}

    def open(self, ticket: int, *, environment: str, version: int) -> None:
        """A ticket was issued to an environment."""
        self._live[ticket] = Ticket(ticket=ticket, environment=environment, version=version)

    def live(self, ticket: int) -> Ticket | None:
        """The ticket while it is live."""
        return self._live.get(ticket)

    def end(self, ticket: int) -> Ticket | None:
        """The ticket's group was scored, or it was voided. Returns it when it was live."""
        return self._live.pop(ticket, None)

    def everything_live(self) -> list[int]:
        """All live tickets."""
        return list(self._live)
