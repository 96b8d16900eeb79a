"""What the publisher keeps for those who lack something: the newest weights and a bounded number of recent deltas.

Pure: time comes in as an argument. The mirror may lag behind the newest version by the newest few deltas, so that a
joiner can read it in peace: a reader pins it, and `fold` brings it up to date when nobody reads.

    log.append(entry)                      # from then on it is served
    if entries := log.begin_fold(now=now):
        log.fold(entries)                  # CPU-bound: in a thread
        log.end_fold(entries)
    plan = log.plan(reader, checksum=checksum, now=now)
    piece = log.read(reader, version=plan.steps[0].version, anchor=True, offset=0, size=1 << 20, now=now)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lachesis_transport.messages import MessageError, take
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.mirror import Mirror

LIMIT = 16
"""Deltas that are kept, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One published version."""

    version: int
    parent: int | None
    """The version that the payload is a delta to, which need not be the one that it was trained from; None: it holds
    every value."""
    checksum: str
    sizes: tuple[int, ...]
    """Bytes of each rank's part of the payload."""
    payload: bytes
    """The ranks' codec payloads, end to end."""

    @property
    def shards(self) -> int:
        """Ranks of the learner, a parameter of the checksum."""
        return len(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to fetch on the way to the newest version."""

    version: int
    parent: int | None
    """None: an anchor, to be written over whatever is there; its bytes are the mirror's."""
    checksum: str
    sizes: tuple[int, ...]
    shards: int

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return sum(self.sizes)

    def to_wire(self) -> dict[str, Any]:
        """The msgpack map."""
        return {
            "version": self.version,
            "parent": self.parent,
            "checksum": self.checksum,
            "sizes": list(self.sizes),
            "shards": self.shards,
        }

    @classmethod
    def from_wire(cls, wire: Any) -> Step:
        """Decode. Raises MessageError."""
        if not isinstance(wire, dict):
            raise MessageError(f"step: {type(wire).__name__}, expected a map")
        sizes = take(wire, "sizes", list)
        if not sizes or not all(type(s) is int and s >= 0 for s in sizes):
            raise MessageError(f"step.sizes: {sizes}, expected bytes a shard")
        return cls(
            version=take(wire, "version", int),
            parent=take(wire, "parent", (int, type(None))),
            checksum=take(wire, "checksum", str),
            sizes=tuple(sizes),
            shards=take(wire, "shards", int),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The way from a reader's weights to the newest version."""

    held: int | None
    """The version that the reader holds, known by its checksum; None: unknown weights, the first step is an anchor."""
    steps: tuple[Step, ...]
    """What to fetch and apply, in order; empty when the reader is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a version log held when its process ended, for the next one to go on with."""

    mirror: Mirror
    """The weights of `newest`."""
    newest: Entry
    """Its payload may be missing: empty."""
    deltas: tuple[Entry, ...]
    """The newest ones, each to the version before it; the last leads to `newest`."""
    known: dict[str, int]
    """Version of the weights with a checksum, as the learner that ends here or the one that begins would hash them."""


class VersionLog:
    """The newest weights and recent deltas.

    Args:
        layout: of the model.
        limit: deltas kept, at most; their bytes together never exceed the weights' own.
        lease_seconds: how long a reader pins the mirror after its last read.
        kept: what an earlier log held; its mirror becomes this one's.
    """

    def __init__(
        self, layout: Layout, *, limit: int = LIMIT, lease_seconds: float = 30.0, kept: Kept | None = None
    ) -> None:
        self.layout = layout
        self.newest: Entry | None = None
        self._mirror = Mirror(layout)
        self._base: Entry | None = None
        self._folding = False
        self._deltas: deque[Entry] = deque()
        self._known: dict[str, int] = {}
        """Version by checksum, of every version that a kept delta leaves or reaches."""
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._pins: dict[str, float] = {}
        if kept is not None:
            self._mirror, self._known = kept.mirror, dict(kept.known)
            self.newest = self._base = kept.newest
            self._deltas.extend(kept.deltas)
            self._trim(kept.newest)

    @property
    def base(self) -> Entry | None:
        """The version that the mirror holds; None before the first fold."""
        return self._base

    @property
    def mirror(self) -> Mirror:
        """The weights of `base`: to be read only while nothing folds."""
        return self._mirror

    @property
    def nbytes(self) -> int:
        """Bytes of the full weights."""
        return self._mirror.nbytes

    def append(self, entry: Entry) -> None:
        """Add the newest version. Raises ValueError when it does not follow from what is there."""
        newest = self.newest
        if newest is not None and entry.version <= newest.version:
            raise ValueError(f"version: {entry.version}, expected more than {newest.version}")
        if sum(entry.sizes) != len(entry.payload):
            raise ValueError(f"sizes: {sum(entry.sizes)} bytes together, expected {len(entry.payload)}")
        if entry.parent is None:
            self._deltas.clear()
            self._known.clear()
            self._pins.clear()
            self._base = None
        elif newest is None or entry.parent != newest.version:
            held = None if newest is None else newest.version
            raise ValueError(f"parent: {entry.parent}, expected the newest version {held}")
        self._deltas.append(entry)
        self._known[entry.checksum] = entry.version
        self.newest = entry

    def delta_to(self, version: int) -> Entry | None:
        """The delta from this version to the next, while it is kept."""
        return next((entry for entry in self._deltas if entry.parent == version), None)

    def begin_fold(self, *, now: float) -> list[Entry]:
        """The entries to `fold` into the mirror now; empty while it is current, or read by somebody (unless it lags too
        far: then its readers have to start again). Until `end_fold`, `plan` answers None to who needs an anchor."""
        pending = self._pending()
        self._pins = {reader: until for reader, until in self._pins.items() if until > now}
        if not pending or self._folding or (self._pins and self._base and self._may_wait(pending)):
            return []
        self._folding = True
        self._pins.clear()
        return pending

    def _may_wait(self, pending: Sequence[Entry]) -> bool:
        return len(pending) <= self._limit // 2 and sum(len(entry.payload) for entry in pending) <= self.nbytes

    def fold(self, entries: Sequence[Entry]) -> None:
        """Apply entries to the mirror and check the result. CPU-bound, touches nothing else: meant for a thread.

        Raises RuntimeError when the checksum is not that of the last entry.
        """
        for entry in entries:
            self._mirror.apply(entry.payload, sizes=entry.sizes)
        newest = entries[-1]
        checksum = self._mirror.checksum(shards=newest.shards)
        if checksum != newest.checksum:
            raise RuntimeError(f"checksum: {checksum} after version {newest.version}, expected {newest.checksum}")

    def end_fold(self, entries: Sequence[Entry]) -> None:
        """The mirror holds the last of these entries now."""
        self._folding = False
        self._base = entries[-1]
        self._trim(self._base)

    def _trim(self, base: Entry) -> None:
        while self._deltas and self._deltas[0].version <= base.version:
            first = self._deltas[0]
            kept = sum(len(e.payload) for e in self._deltas)
            if first.parent is not None and len(self._deltas) <= self._limit and kept <= self.nbytes:
                break
            self._deltas.popleft()
        first = self._deltas[0] if self._deltas else base
        oldest = first.version if not self._deltas or first.parent is None else first.parent
        self._known = {checksum: version for checksum, version in self._known.items() if version >= oldest}

    def plan(self, reader: str, *, checksum: str, now: float) -> Plan | None:
        """What a reader whose weights have this checksum has to fetch, in order; None: ask again soon."""
        held = self._known.get(checksum)
        if held is not None:
            chain = [e for e in self._deltas if e.version > held]
            if sum(len(e.payload) for e in chain) < self.nbytes:
                return Plan(held=held, steps=tuple(_step(e) for e in chain))
        pending = self._pending()
        if self.newest is None or self._folding or (pending and pending[0].parent is None):
            return None
        assert self._base is not None
        self._pins[reader] = now + self._lease_seconds
        anchor = Step(
            version=self._base.version,
            parent=None,
            checksum=self._base.checksum,
            sizes=(self.nbytes,),
            shards=self._base.shards,
        )
        return Plan(held=None, steps=(anchor, *(_step(e) for e in pending)))

    def read(
        self, reader: str, *, version: int, anchor: bool, offset: int, size: int, now: float
    ) -> bytes | memoryview | None:
        """Bytes [offset, offset + size) of a step; None when it is gone: plan again."""
        if anchor:
            if self._base is None or self._base.version != version or self._folding or reader not in self._pins:
                return None
            self._pins[reader] = now + self._lease_seconds
            return self._mirror.bits.view("u1")[offset : offset + size].tobytes()
        for entry in self._deltas:
            if entry.version == version and entry.parent is not None:
                return memoryview(entry.payload)[offset : offset + size]
        return None

    def pin(self, reader: str, *, until: float) -> bool:
        """Keep the mirror as it is for one who reads `mirror` itself, as `plan` does; False while it can't be."""
        if self._folding or self._base is None:
            return False
        self._pins[reader] = until
        return True

    def pinned(self, reader: str) -> bool:
        """Whether nothing was folded since the reader pinned the mirror. May be called from any thread."""
        return reader in self._pins

    def release(self, reader: str) -> None:
        """The reader is done with the mirror."""
        self._pins.pop(reader, None)

    def _pending(self) -> list[Entry]:
        if self._base is None:
            return list(self._deltas)
        return [e for e in self._deltas if e.version > self._base.version]


def _step(entry: Entry) -> Step:
    return Step(
        version=entry.version,
        parent=entry.parent,
        checksum=entry.checksum,
        sizes=entry.sizes,
        shards=entry.shards,
    )


def entry_of(*, version: int, parent: int | None, checksum: str, payloads: Sequence[bytes | memoryview]) -> Entry:
    """An entry from the payloads of all ranks, in rank order."""
    return Entry(
        version=version,
        parent=parent,
        checksum=checksum,
        sizes=tuple(len(p) for p in payloads),
        payload=b"".join(payloads),
    )
