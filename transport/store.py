"""The durable half of the replay queue.

The broker hands every change to the store before it answers the request that made it, so an acknowledgement means what
the store means by `save`.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis_transport.messages import Group


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the queue's state: what the store keeps and what the event log shows."""

    kind: str
    """joined, parted, reserved, published, finished; issued, voided; accepted, dropped, left; leased, returned,
    trained, committed, forgotten."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Plain values that describe it."""
    group: Group | None = None
    """The group itself, where `kind` is accepted."""


class Store(ABC):
    """Where the queue's changes go before they are acknowledged."""

    queue_id: str
    """Names the state that this store holds. Clients see by it whether a queue that came back still knows their
    versions and tickets."""

    @abstractmethod
    async def save(self, events: Sequence[Event]) -> None:
        """Keep the changes, in order; after the return they are as safe as this store makes anything."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of files and threads."""


class MemoryStore(Store):
    """Keeps nothing: the state lives and dies with the queue's process, and each process is a new queue."""

    def __init__(self) -> None:
        self.queue_id = uuid.uuid4().hex

    async def save(self, events: Sequence[Event]) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""
