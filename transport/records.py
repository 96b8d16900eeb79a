"""What the queue knows of a ticket, a group and a batch, and the rows in which a store keeps it.

The bytes of a group are not here: the store has them under the group's id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lachesis_transport.messages import Scores

OVERHEAD_BYTES = 512
"""What a group costs beside its content: no budget is met by very many very small groups."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """The right to start one group, while it is open."""

    number: int
    version: int
    """The version that it was issued at."""
    actor: str
    environment: str
    ask: int
    """Number of the actor's request that it answers."""
    item: int
    """Number of its prompt in the environment's stream."""
    attempts: int = 0
    """Earlier tickets that came to nothing over this prompt."""
    groups: int = 0
    """Groups that came for it."""
    used: bool = False
    """Whether one of them was accepted."""
    deadline: int = 0
    """Depth of the last version that its group may train; follows from the version."""

    def to_row(self) -> list[Any]:
        """Plain values."""
        return [self.version, self.actor, self.environment, self.ask, self.item, self.attempts, self.groups, self.used]

    @classmethod
    def from_row(cls, number: int, row: list[Any]) -> Ticket:
        """The ticket that the row is of; its deadline is yet to be found."""
        version, actor, environment, ask, item, attempts, groups, used = row
        return cls(
            number=number,
            version=version,
            actor=actor,
            environment=environment,
            ask=ask,
            item=item,
            attempts=attempts,
            groups=groups,
            used=used,
        )


@dataclass(slots=True, kw_only=True)
class Entry:
    """A group that the queue holds: ready, leased, or trained and in no checkpoint yet."""

    group_id: str
    order: tuple[int, int]
    """Number of its ticket, and its index in it: the older one first."""
    versions: tuple[int, ...]
    """Distinct versions of its trained tokens, ascending."""
    nbytes: int
    """Bytes of its content, and what it costs beside."""
    actor: str
    environment: str
    item: int | None
    """Number of the prompt that it answers for; None for a further group of a ticket."""
    uses: int = 0
    """Batches that trained it."""
    ready: bool = True
    """Whether a batch may take it."""
    holders: int = 0
    """Batches that hold it, leased or trained and in no checkpoint; follows from the batches."""
    deadline: int = 0
    """Depth of the last version that it may train; follows from its versions."""

    def to_row(self) -> list[Any]:
        """Plain values."""
        return [
            *self.order,
            list(self.versions),
            self.nbytes,
            self.actor,
            self.environment,
            self.item,
            self.uses,
            self.ready,
        ]

    @classmethod
    def from_row(cls, group_id: str, row: list[Any]) -> Entry:
        """The entry that the row is of; its deadline and holders are yet to be found."""
        ticket, index, versions, nbytes, actor, environment, item, uses, ready = row
        return cls(
            group_id=group_id,
            order=(ticket, index),
            versions=tuple(versions),
            nbytes=nbytes,
            actor=actor,
            environment=environment,
            item=item,
            uses=uses,
            ready=ready,
        )


class Ready(dict[str, Entry]):
    """The groups that a batch may take, by id, and how many bytes they are."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        super().__init__()
        self.nbytes = 0
        for entry in entries:
            self[entry.group_id] = entry

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in self:
            self.nbytes -= self[name].nbytes
        super().__setitem__(name, entry)
        self.nbytes += entry.nbytes

    def __delitem__(self, name: str) -> None:
        self.nbytes -= self[name].nbytes
        super().__delitem__(name)


@dataclass(slots=True, kw_only=True)
class Lease:
    """B groups to train one version with; it stays when it is trained, until a checkpoint holds it."""

    version: int
    groups: tuple[Entry, ...]
    distances: dict[int, int]
    """Distance of each version among the trained tokens to `version`, where it is within the bound."""
    masked: tuple[int, ...] = ()
    """Versions whose tokens are too old and count as not trained."""
    scores: Scores = field(default_factory=Scores)
    """Scores of all groups that ended since the last lease."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups that came to nothing until then, by reason."""
    trained: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its groups."""
        return sum(entry.nbytes for entry in self.groups)

    @property
    def names(self) -> list[str]:
        """Ids of its groups."""
        return [entry.group_id for entry in self.groups]

    def to_row(self) -> list[Any]:
        """Plain values."""
        return [
            self.names,
            [list(pair) for pair in self.distances.items()],
            list(self.masked),
            self.scores.to_wire(),
            self.dropped,
            self.trained,
        ]

    @classmethod
    def from_row(cls, version: int, row: list[Any], entries: dict[str, Entry]) -> Lease:
        """The batch that the row is of."""
        names, distances, masked, scores, dropped, trained = row
        return cls(
            version=version,
            groups=tuple(entries[name] for name in names),
            distances=dict(distances),
            masked=tuple(masked),
            scores=Scores.from_wire(scores),
            dropped=dropped,
            trained=trained,
        )


def uses_to_come(deadline: int, uses: int) -> range:
    """Deadlines of the next `uses` batches that take one group, the last of them due by `deadline`.

    They are in different batches, so each is due one depth before the next.
    """
    return range(deadline - uses + 1, deadline + 1)
