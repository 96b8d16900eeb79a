"""What the roles send to each other: trajectories, groups, scores and batches.

Everything that crosses a process boundary is one msgpack map (`frames`). The arrays of a trajectory travel as raw
little-endian bytes inside it (msgpack `bin`), of dtypes and in an order that this file fixes, so a receiver allocates
nothing that it did not check first.
Every message carries the schema version; an unknown one is refused with both versions named.

    >>> group = Group(group_id="7:0", ticket=7, actor="a0", environment="sums", trajectories=(trajectory,))
    >>> Group.unpack(group.pack()) == group

A group crosses the wire packed by itself, as bytes inside the messages that carry it: what stands between actor and
learner keeps and forwards it without encoding it again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lachesis_transport.frames import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from lachesis_transport.frames import SCHEMA as SCHEMA
from lachesis_transport.frames import MessageError as MessageError
from lachesis_transport.frames import SchemaError as SchemaError
from lachesis_transport.frames import brief
from lachesis_transport.frames import pack as pack
from lachesis_transport.frames import take as take
from lachesis_transport.frames import unpack as unpack

MAX_MAGNITUDE = 1e9
"""Largest absolute score and advantage: their squares still add up without overflow."""

LOWEST_LOGPROB = -30.0
"""Lowest behaviour log-prob of a trained token. A policy samples such a token less than once in 10^8, and its
importance ratio could overflow the loss."""

HIGHEST_LOGPROB = 1e-3
"""Highest behaviour log-prob of a trained token: 0, and what rounding may add to it."""

MAX_TRAJECTORIES = 4096
MAX_TOKENS = 4 * 1024 * 1024

UNSAMPLED = -1
"""Version of a token that no policy sampled (prompt, tool output)."""

SENTINEL_LOGPROB = -9000.0
"""vLLM writes -9999 for a missing, NaN or infinite log-prob: anything at or below this is invalid."""

_INT32, _FLOAT32, _UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_ARRAYS: dict[str, np.dtype[Any]] = {
    "tokens": _INT32,
    "logprobs": _FLOAT32,
    "versions": _INT32,
    "advantages": _FLOAT32,
    "mask": _UINT8,
}
"""The arrays of a trajectory in the order in which they travel, one after the other."""

_DTYPES = list(_ARRAYS.values())
_TOKEN_BYTES = sum(dtype.itemsize for dtype in _DTYPES)
_lowest, _highest = np.minimum.reduce, np.maximum.reduce


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One token sequence of one or more turns. All arrays have the same length n and are read-only views."""

    tokens: np.ndarray
    """int32 [n]: the ids that the engine saw and sampled, never retokenised text."""
    mask: np.ndarray
    """uint8 [n]: 1 on tokens to train (sampled by the policy), 0 elsewhere. mask[0] is 0: nothing predicts it."""
    logprobs: np.ndarray
    """float32 [n]: behaviour log-prob, in nats, at the sampling temperature; 0 where mask is 0."""
    versions: np.ndarray
    """int32 [n]: policy version that sampled the token; UNSAMPLED where mask is 0."""
    advantages: np.ndarray
    """float32 [n]: token advantage; 0 where mask is 0."""
    score: float
    """The environment's reward of the whole sequence."""
    finished: bool = True
    """Whether the last turn ended by itself (not cut by a length limit)."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return _TOKEN_BYTES * len(self.tokens)

    def validate(self, *, where: str = "trajectory") -> None:
        """Raise MessageError, naming field and value, unless the arrays agree with each other and are finite."""
        if not self._is_valid():
            self._diagnose(where)

    def _is_valid(self) -> bool:
        """Whether `_diagnose` would find nothing, in a third of its time. NaN fails every comparison."""
        n = len(self.tokens)
        tokens, logprobs, versions, advantages, mask = arrays = self._arrays()
        if not 2 <= n <= MAX_TOKENS or [a.shape for a in arrays] != [(n,)] * 5 or [a.dtype for a in arrays] != _DTYPES:
            return False
        on = versions >= 0
        return (
            not mask[0]
            and mask.tobytes() == on.tobytes()
            and _lowest(versions) >= UNSAMPLED
            and _lowest(tokens) >= 0
            and float(_lowest(logprobs)) >= LOWEST_LOGPROB
            and float(_highest(logprobs)) <= HIGHEST_LOGPROB
            and float(_lowest(advantages)) >= -MAX_MAGNITUDE
            and float(_highest(advantages)) <= MAX_MAGNITUDE
            and abs(self.score) <= MAX_MAGNITUDE
            and not np.count_nonzero((logprobs != 0) > on)
            and not np.count_nonzero((advantages != 0) > on)
        )

    def _diagnose(self, where: str) -> None:
        n = len(self.tokens)
        if n < 2 or n > MAX_TOKENS:
            raise MessageError(f"{where}.tokens: {n} tokens, expected 2 to {MAX_TOKENS}")
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (n,):
                raise MessageError(f"{where}.{name}: {array.dtype}{list(array.shape)}, expected {dtype}[{n}]")
        mask = self.mask
        if mask.max() > 1:
            raise MessageError(f"{where}.mask: value {int(mask.max())}, expected 0 or 1")
        if mask[0]:
            raise MessageError(f"{where}.mask: first token is trained, but nothing predicts it")
        if self.tokens.min() < 0:
            raise MessageError(f"{where}.tokens: id {int(self.tokens.min())}, expected 0 or more")
        on = mask.astype(bool)
        for name in ("logprobs", "advantages"):
            array = getattr(self, name)
            if not np.isfinite(array).all():
                at = int(np.flatnonzero(~np.isfinite(array))[0])
                raise MessageError(f"{where}.{name}[{at}]: {array[at]}, expected a finite number")
            if array[~on].any():
                at = int(np.flatnonzero((array != 0) & ~on)[0])
                raise MessageError(f"{where}.{name}[{at}]: {array[at]} on a token with mask 0, expected 0")
        if on.any():
            lowest, highest = float(self.logprobs[on].min()), float(self.logprobs[on].max())
            if lowest <= SENTINEL_LOGPROB:
                raise MessageError(f"{where}.logprobs: {lowest} marks a missing log-prob")
            if lowest < LOWEST_LOGPROB:
                raise MessageError(f"{where}.logprobs: {lowest}, expected {LOWEST_LOGPROB} or more")
            if highest > HIGHEST_LOGPROB:
                raise MessageError(f"{where}.logprobs: {highest}, expected 0 or less")
            if self.versions[on].min() < 0:
                raise MessageError(f"{where}.versions: {int(self.versions[on].min())} on a trained token")
        if (self.versions[~on] != UNSAMPLED).any():
            raise MessageError(f"{where}.versions: a token with mask 0 has a version, expected {UNSAMPLED}")
        for name, extreme in (("score", self.score), ("advantages", float(np.abs(self.advantages).max()))):
            if not abs(extreme) <= MAX_MAGNITUDE:
                raise MessageError(f"{where}.{name}: {extreme}, expected at most {MAX_MAGNITUDE:g} in magnitude")

    def without(self, versions: Collection[int]) -> Trajectory:
        """This trajectory with every token that one of `versions` sampled taken out of training: mask, log-prob and
        advantage 0, version UNSAMPLED."""
        kept = ~np.isin(self.versions, list(versions))
        if kept.all():
            return self
        return replace(
            self,
            mask=np.where(kept, self.mask, np.uint8(0)),
            logprobs=np.where(kept, self.logprobs, np.float32(0)),
            versions=np.where(kept, self.versions, np.int32(UNSAMPLED)),
            advantages=np.where(kept, self.advantages, np.float32(0)),
        )

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map of this trajectory."""
        arrays = self._arrays()
        try:
            raw = b"".join(arrays)  # type: ignore[arg-type]  # arrays are buffers; 3.11 has no type for them
        except TypeError:  # one is not contiguous
            raw = b"".join(array.tobytes() for array in arrays)
        return {"n": len(self.tokens), "arrays": raw, "score": self.score, "finished": self.finished}

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.logprobs, self.versions, self.advantages, self.mask

    @classmethod
    def from_wire(cls, wire: Any, *, where: str = "trajectory") -> Trajectory:
        """Decode and check shapes; call `validate` for values. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"{where}: {type(wire).__name__}, expected a map")
        try:
            n = take(wire, "n", int)
            if not 0 <= n <= MAX_TOKENS:
                raise MessageError(f"n: {n}, expected 0 to {MAX_TOKENS}")
            raw = take(wire, "arrays", bytes)
            if len(raw) != _TOKEN_BYTES * n:
                raise MessageError(f"arrays: {len(raw)} bytes, expected {_TOKEN_BYTES * n} ({n} x {_TOKEN_BYTES})")
            return cls(
                tokens=np.frombuffer(raw, _INT32, n),
                logprobs=np.frombuffer(raw, _FLOAT32, n, 4 * n),
                versions=np.frombuffer(raw, _INT32, n, 8 * n),
                advantages=np.frombuffer(raw, _FLOAT32, n, 12 * n),
                mask=np.frombuffer(raw, _UINT8, n, 16 * n),
                score=take(wire, "score", float),
                finished=take(wire, "finished", bool),
            )
        except MessageError as error:
            raise MessageError(f"{where}.{error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories sampled for one prompt: the unit of the queue."""

    group_id: str
    """`ticket:index`, or without a ticket a hash of the content (`content_id`)."""
    ticket: int | None
    actor: str
    environment: str
    trajectories: tuple[Trajectory, ...]
    origin: tuple[str, str] | None = None
    """The queue that took it in first and its id there, once a file has brought it to another one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, the size that queue budgets count."""
        return sum(t.nbytes for t in self.trajectories)

    @property
    def versions(self) -> tuple[int, ...]:
        """The distinct policy versions of the trained tokens, ascending."""
        if not self.trajectories:
            return ()
        every = np.concatenate([t.versions for t in self.trajectories])
        changes = np.flatnonzero(every[1:] != every[:-1])  # few: versions come in runs
        distinct = np.unique(np.append(every[changes], every[-1:]))
        return tuple(int(v) for v in distinct if v >= 0)

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(int(np.count_nonzero(t.mask)) for t in self.trajectories)

    def validate(self) -> None:
        """Raise MessageError unless every trajectory is valid and at least one token is to be trained."""
        if not 1 <= len(self.trajectories) <= MAX_TRAJECTORIES:
            raise MessageError(f"trajectories: {len(self.trajectories)}, expected 1 to {MAX_TRAJECTORIES}")
        for i, trajectory in enumerate(self.trajectories):
            trajectory.validate(where=f"trajectories[{i}]")
        if not self.trained_tokens:
            raise MessageError("trajectories: no token has mask 1, expected at least one")

    def without(self, versions: Collection[int]) -> Group | None:
        """This group without training the tokens that one of `versions` sampled (`Trajectory.without`); None when no
        trained token is left. It keeps its id and its trajectories, also those with nothing left to train."""
        group = replace(self, trajectories=tuple(t.without(versions) for t in self.trajectories))
        return group if group.trained_tokens else None

    def pack(self) -> bytes:
        """The frame of this group: how it crosses the wire, and how it is kept. Raises MessageError."""
        return pack(self.to_wire())

    @classmethod
    def unpack(cls, frame: bytes | memoryview) -> Group:
        """Decode a frame and check shapes; call `validate` for values. The arrays are views of copies, not of `frame`.

        Raises MessageError, and SchemaError for a group packed under another schema version.
        """
        return cls.from_wire(unpack(frame))

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map of this group."""
        origin = {} if self.origin is None else {"origin": list(self.origin)}
        return {
            **origin,
            "group_id": self.group_id,
            "ticket": self.ticket,
            "actor": self.actor,
            "environment": self.environment,
            "trajectories": [t.to_wire() for t in self.trajectories],
        }

    @classmethod
    def from_wire(cls, wire: Any) -> Group:
        """Decode and check shapes; call `validate` for values. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"group: {type(wire).__name__}, expected a map")
        trajectories = take(wire, "trajectories", list)
        if len(trajectories) > MAX_TRAJECTORIES:
            raise MessageError(f"trajectories: {len(trajectories)}, expected 1 to {MAX_TRAJECTORIES}")
        return cls(
            group_id=take(wire, "group_id", str),
            ticket=take(wire, "ticket", (int, type(None))),
            actor=take(wire, "actor", str),
            environment=take(wire, "environment", str),
            trajectories=tuple(Trajectory.from_wire(t, where=f"trajectories[{i}]") for i, t in enumerate(trajectories)),
            origin=_origin(take(wire, "origin", list)) if "origin" in wire else None,
        )


def _origin(pair: list[Any]) -> tuple[str, str]:
    if [type(x) for x in pair] != [str, str]:
        raise MessageError(f"origin: {brief(pair)}, expected [queue, group_id]")
    return pair[0], pair[1]


def content_id(trajectories: tuple[Trajectory, ...]) -> str:
    """Identity of a group without a ticket: a hash of tokens, masks, scores and provenance (32 hex digits)."""
    digest = hashlib.blake2b(digest_size=16)
    for t in trajectories:
        for array in (t.tokens, t.mask, t.logprobs, t.versions):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
        digest.update(np.float64(t.score).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of the groups that ended since the last lease, trained or not, so that the reward curve has no bias
    towards groups with variance."""

    groups: int = 0
    sequences: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        """Mean score a sequence; NaN when there was none."""
        return self.total / self.sequences if self.sequences else math.nan

    @property
    def std(self) -> float:
        """Standard deviation over sequences; NaN when there was none."""
        if not self.sequences:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.sequences - self.mean**2))

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            groups=self.groups + other.groups,
            sequences=self.sequences + other.sequences,
            total=self.total + other.total,
            squares=self.squares + other.squares,
        )

    @classmethod
    def of(cls, scores: list[float]) -> Scores:
        """The scores of one group."""
        return cls(groups=1, sequences=len(scores), total=sum(scores), squares=sum(s * s for s in scores))

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: Any) -> Scores:
        """Decode. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"scores: {type(wire).__name__}, expected a map")
        scores = cls(
            groups=take(wire, "groups", int),
            sequences=take(wire, "sequences", int),
            total=take(wire, "total", float),
            squares=take(wire, "squares", float),
        )
        limit = scores.sequences * MAX_MAGNITUDE
        if (
            not 0 <= scores.groups <= scores.sequences < 1 << 62
            or not abs(scores.total) <= limit
            or not 0 <= scores.squares <= limit * MAX_MAGNITUDE
        ):
            raise MessageError(f"scores: {scores}, expected scores of at most {MAX_MAGNITUDE:g} in magnitude")
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one lease hands to the learner: B groups to train version `version` with."""

    version: int
    """The version to be trained: staleness is measured from it."""
    groups: tuple[Group, ...]
    distances: dict[int, int] = field(default_factory=dict)
    """For every version among the groups' trained tokens: its distance to `version` in the lineage tree."""
    scores: Scores = field(default_factory=Scores)
    """Scores of all groups that ended since the last lease, those dropped for lack of variance included."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups dropped since the queue started, by reason."""

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map of this batch."""
        return batch_wire(
            version=self.version,
            groups=[g.pack() for g in self.groups],
            distances=self.distances,
            scores=self.scores,
            dropped=self.dropped,
        )

    @classmethod
    def from_wire(cls, wire: Any) -> Batch:
        """Decode and check shapes; `Group.validate` checks values. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"batch: {brief(wire)}, expected a map")
        return cls(
            version=take(wire, "version", int),
            groups=tuple(_unpack_group(i, frame) for i, frame in enumerate(take(wire, "groups", list))),
            distances=dict(_distance(pair) for pair in take(wire, "distances", list)),
            scores=Scores.from_wire(take(wire, "scores", dict)),
            dropped=dict(_dropped(pair) for pair in take(wire, "dropped", dict).items()),
        )


def batch_wire(
    *, version: int, groups: Sequence[bytes], distances: dict[int, int], scores: Scores, dropped: dict[str, int]
) -> dict[str, Any]:
    """The msgpack map of a batch of packed groups (`Group.pack`), which are neither decoded nor encoded again."""
    return {
        "version": version,
        "groups": list(groups),
        "distances": [[v, d] for v, d in distances.items()],
        "scores": scores.to_wire(),
        "dropped": dropped,
    }


def _unpack_group(index: int, frame: Any) -> Group:
    try:
        if not isinstance(frame, bytes):
            raise MessageError(f"{brief(frame)}, expected a packed group")
        return Group.unpack(frame)
    except MessageError as error:
        raise type(error)(f"groups[{index}]: {error}") from None


def _distance(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, list) or [type(x) for x in pair] != [int, int]:
        raise MessageError(f"distances: {brief(pair)}, expected [version, distance]")
    return pair[0], pair[1]


def _dropped(pair: tuple[Any, Any]) -> tuple[str, int]:
    if [type(x) for x in pair] != [str, int]:
        raise MessageError(f"dropped: {brief(list(pair))}, expected a reason and a count")
    return pair
