"""The numbered prompts of each environment, and whose turn it is to get one.

A stream is endless: number i stands for the same prompt in every process (an environment maps it to an epoch and a
position). A ticket takes a number; one that comes to nothing gives it back, and the next ticket of that environment
gets it, so every number is used once.

Turns are shared by weight, as in start-time fair queueing: each grant moves its environment's clock on by 1 / weight,
the one that is furthest behind goes first, and nobody may be further behind than `credit` grants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lachesis_transport.decisions import ReplayError
from lachesis_transport.tables import Table

ATTEMPTS = 3
"""Tickets that may fail over one prompt before it is skipped."""

MAX_STREAMS = 1024
"""Environments of one run, beside those of its configuration."""

BLAMELESS = frozenset(
    {"cancelled", "actor_left", "actor_expired", "actor_stopped", "client_gone", "stale", "finished", "no_item"}
)
"""Reasons of a void that say nothing about the prompt."""


@dataclass(slots=True)
class Stream:
    """The prompts of one environment."""

    next: int = 0
    """Lowest number that was never taken."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """Numbers that were given back, ascending, each with its failed attempts. As many as tickets and groups at most."""
    clock: float = 0.0
    """How far its turns have come, in grants by weight."""

    def to_row(self) -> list[Any]:
        """Plain values."""
        return [self.next, [list(pair) for pair in self.returned], self.clock]

    @classmethod
    def from_row(cls, _: str, row: list[Any]) -> Stream:
        """The stream that the row is of."""
        return cls(row[0], [(item, attempts) for item, attempts in row[1]], row[2])


class Items:
    """The streams of all environments by name."""

    def __init__(self, weights: Mapping[str, float], *, credit: int) -> None:
        self.streams: Table[str, Stream] = Table("stream", Stream.to_row)
        self._weights, self._credit = weights, credit

    def clock(self, environment: str) -> float:
        """Lower goes first."""
        stream = self.streams.get(environment)
        return stream.clock if stream is not None else 0.0

    def take(self, environment: str) -> tuple[int, int]:
        """The number for the next ticket, and how often it failed before. Raises ReplayError: too many environments."""
        stream = self.streams.get(environment)
        if stream is None and environment not in self._weights and len(self.streams) >= MAX_STREAMS:
            raise ReplayError(f"environment: {environment!r}, but there are {MAX_STREAMS} others already")
        stream = stream or Stream()
        latest = max((s.clock for s in self.streams.values()), default=0.0)
        own = self._weights.get(environment, 1.0)
        total = own + sum(self._weights.get(name, 1.0) for name in self.streams if name != environment)
        stream.clock = max(stream.clock, latest - self._credit / total) + 1 / own
        if stream.returned:
            taken = stream.returned.pop(0)
        else:
            taken = (stream.next, 0)
            stream.next += 1
        self.streams[environment] = stream
        return taken

    def give_back(self, environment: str, item: int, *, attempts: int, reason: str) -> bool:
        """Its ticket or group came to nothing; whether the item is tried again (else it has failed too often)."""
        attempts += reason not in BLAMELESS
        if attempts >= ATTEMPTS:
            return False
        stream = self.streams[environment]
        stream.returned = sorted([*stream.returned, (item, attempts)])
        self.streams.touch(environment)
        return True
