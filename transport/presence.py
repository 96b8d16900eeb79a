"""Who is there: the actors and the learner, each a name with an incarnation, alive while it is heard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from lachesis_transport.decisions import NameTaken, NotJoined

Role = Literal["actor", "learner"]

CANCELLED = 1 << 10
"""Cancelled requests for a ticket that are remembered, an actor: one that arrives late must not be granted."""


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
    cancelled: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cancel(self, ask: int) -> None:
        """Remember that `ask` is given up."""
        self.cancelled[ask] = None
        while len(self.cancelled) > CANCELLED:
            self.cancelled.popitem(last=False)


class Presence:
    """The live clients: any number of actors with different names, and one learner."""

    def __init__(self, *, heartbeat_seconds: float) -> None:
        self._seconds = heartbeat_seconds
        self.actors: dict[str, Client] = {}
        self.learner: Client | None = None

    def join(self, *, role: Role, name: str, incarnation: str, now: float) -> bool:
        """A client says hello; whether it is new. Raises NameTaken."""
        known = self.find(role, name)
        if known is not None and known.incarnation == incarnation:
            known.heard = now
            return False
        if known is not None:
            raise NameTaken(
                f"name: {role} {name!r} is taken by a live {role} {known.name!r}, heard {now - known.heard:.1f} s ago; "
                f"expected another name, or silence of {self._seconds:g} s"
            )
        client = Client(role=role, name=name, incarnation=incarnation, heard=now)
        if role == "learner":
            self.learner = client
        else:
            self.actors[name] = client
        return True

    def find(self, role: Role, name: str) -> Client | None:
        """The live client of this name; as a learner, whatever its name."""
        return self.learner if role == "learner" else self.actors.get(name)

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
        if role == "actor":
            return self.actors.pop(name, None)
        gone, self.learner = self.learner, None
        return gone

    def silent(self, now: float) -> list[Client]:
        """The clients that were silent for too long."""
        everyone = [*self.actors.values(), *([self.learner] if self.learner else [])]
        return [client for client in everyone if now - client.heard > self._seconds]
