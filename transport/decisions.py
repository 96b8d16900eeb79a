"""What goes into the queue's state machine and what comes out: its rules, answers and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Late = Literal["wait", "drop", "mask_tokens"]
Order = Literal["deadline", "freshest", "uniform"]


class ReplayError(ValueError):
    """A request that the queue's state forbids. The text names the field, the value and what was expected."""


class NameTaken(ReplayError):
    """A live client has this name already."""


class Fenced(ReplayError):
    """This incarnation of the learner was replaced by another: it has no say any more."""


class NotJoined(ReplayError):
    """The client is unknown: it never said hello, or was silent for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the configuration says about the queue."""

    batch_groups: int
    """B: groups a batch."""
    staleness_max: int
    """S: the hard bound, in versions."""
    steps: int
    """Batches of the run."""
    late: Late = "wait"
    """What a batch does about a straggler."""
    late_seconds: float = 120.0
    """How long a batch waits without progress."""
    reuse: int = 1
    """R: batches that train one group, at most S + 1."""
    order: Order = "deadline"
    """Which ready groups a batch takes."""
    max_bytes: int = 1 << 30
    """Bytes of ready and leased groups."""
    max_uncommitted_bytes: int = 4 << 30
    """Bytes of trained groups that no checkpoint holds."""
    heartbeat_seconds: float = 10.0
    """Silence after which a client is gone."""
    seed: int = 0
    """Of the order `uniform`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Share of the tickets of each environment, relative to the others; 1 where it is not named."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet."""

    why: str
    """What for, in words."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has finished: no more tickets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A ticket that was issued."""

    ticket: int
    version: int
    """The version that it was issued at."""
    deadline: int
    """Depth in the lineage tree of the last version that it may train."""
    item: int
    """Number of the prompt in the environment's stream."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a group."""

    status: Literal["accepted", "duplicate", "stale", "full", "invalid"]
    reason: str = ""
    retry_after: float = 0.0
    """Seconds, with `full`."""
