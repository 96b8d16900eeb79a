"""Who is there: the actors and the learner, each a name with an incarnation, alive while it is heard."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from lachesis_transport.decisions import NameTaken, NotJoined
from lachesis_transport.tables import Table

Role = Literal["actor", "learner"]

CANCELLED = 1 << 10
"""Cancelled requests for a ticket that are remembered, an actor: one that arrives late must not be granted."""

MAX_CLIENTS = 4096
"""Live clients."""

RATE_SECONDS = 60.0
"""Time over which a rate forgets."""


@dataclass(slots=True)
class Rate:
    """Events a second, of late: each counts less the longer it is ago."""

    _level: float = 0.0
    _at: float = 0.0

    def count(self, now: float) -> None:
        """One more."""
        self._level = self._left(now) + 1.0
        self._at = now

    def a_second(self, now: float) -> float:
        """The rate at `now`, in events a second."""
        return self._left(now) / RATE_SECONDS

    def _left(self, now: float) -> float:
        return self._level * math.exp((self._at - now) / RATE_SECONDS)


@dataclass(slots=True, kw_only=True)
class Client:
    """A live client."""

    role: Role
    name: str
    incarnation: str
    heard: float
    """When it was heard last."""
    version: int | None = None
    """The version that an actor serves."""
    report_number: int = 0
    """Of the last reports that were logged: repeated ones are not logged again."""
    accepted: int = 0
    """Groups taken from it."""
    rate: Rate = field(default_factory=Rate)
    """Of the groups taken from it."""
    cancelled: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def key(self) -> str:
        """Its name among all clients."""
        return f"{self.role}/{self.name}"

    def cancel(self, ask: int) -> None:
        """Remember that `ask` is given up."""
        self.cancelled[ask] = None
        while len(self.cancelled) > CANCELLED:
            self.cancelled.popitem(last=False)

    def to_row(self) -> list[Any]:
        """Plain values."""
        return [self.incarnation, self.version, self.report_number, self.accepted]


class Presence:
    """The live clients: any number of actors with different names, and one learner."""

    def __init__(self, *, heartbeat_seconds: float) -> None:
        self._seconds = heartbeat_seconds
        self.clients: Table[str, Client] = Table("client", Client.to_row)
        """By role and name."""

    def restore(self, rows: dict[str, list[Any]], now: float) -> None:
        """Take over saved clients; each has `heartbeat_seconds` from now on to be heard."""

        def client(key: str, row: list[Any]) -> Client:
            role, _, name = key.partition("/")
            incarnation, version, report_number, accepted = row
            return Client(
                role="learner" if role == "learner" else "actor",
                name=name,
                incarnation=incarnation,
                heard=now,
                version=version,
                report_number=report_number,
                accepted=accepted,
            )

        self.clients.restore(rows, client)

    @property
    def actors(self) -> dict[str, Client]:
        """The live actors by name."""
        return {client.name: client for client in self.clients.values() if client.role == "actor"}

    @property
    def learner(self) -> Client | None:
        """The live learner."""
        return next((client for client in self.clients.values() if client.role == "learner"), None)

    def join(self, *, role: Role, name: str, incarnation: str, now: float) -> bool:
        """A client says hello; whether it is new. Raises NameTaken."""
        known = self.learner if role == "learner" else self.find(role, name)
        if known is not None and known.incarnation == incarnation:
            known.heard = now
            return False
        if known is not None:
            raise NameTaken(
                f"name: {role} {name!r} is taken by a live {role} {known.name!r}, heard {now - known.heard:.1f} s ago; "
                f"expected another name, or silence of {self._seconds:g} s"
            )
        if len(self.clients) >= MAX_CLIENTS:
            raise NameTaken(f"name: {role} {name!r}, but {MAX_CLIENTS} clients are live already")
        client = Client(role=role, name=name, incarnation=incarnation, heard=now)
        self.clients[client.key] = client
        return True

    def find(self, role: Role, name: str) -> Client | None:
        """The live client of this name."""
        return self.clients.get(f"{role}/{name}")

    def require(self, role: Role, name: str, incarnation: str | None = None) -> Client:
        """The live client. Raises NotJoined when there is none, or another incarnation."""
        client = self.find(role, name)
        if client is None:
            raise NotJoined(f"name: {role} {name!r} is not known (any more), expected a hello first")
        if incarnation not in (None, client.incarnation):
            raise NotJoined(f"incarnation: {incarnation!r} of {role} {name!r}, but {client.incarnation!r} took over")
        return client

    def remove(self, role: Role, name: str) -> Client | None:
        """Forget a client; the one that was forgotten."""
        client = self.find(role, name)
        if client is not None:
            del self.clients[client.key]
        return client

    def silent(self, now: float) -> list[Client]:
        """The clients that were silent for too long."""
        return [client for client in self.clients.values() if now - client.heard > self._seconds]
