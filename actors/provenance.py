"""What the engine sampled, kept until the environment posts it: token ids, log-probs and versions of every answer.

An environment posts bare tokens and masks. Their log-probs and versions come from here and are found by comparing ids:
each run of trained tokens must be the answer of a record whose prompt is everything before it. Text that was decoded
and tokenised again into other ids therefore never enters training with somebody else's log-probs.
Pure: time comes in as an argument, nothing is read or sent.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lachesis_transport.messages import UNSAMPLED

MAX_TAIL = 4
"""Unsampled tokens that may end a run of trained tokens. A chat template closes an assistant's turn with an end token,
often a newline behind it, and Atropos's tokenize_for_trainer counts those to the turn: they lose their mask here."""


class ProvenanceError(ValueError):
    """Posted tokens are not what the engine sampled. The text names the sequence and the position."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One answer of the engine."""

    prompt_ids: np.ndarray
    """int32."""
    output_ids: np.ndarray
    """int32 [n]."""
    logprobs: np.ndarray
    """float32 [n]."""
    versions: np.ndarray
    """int32 [n]."""
    finish_reason: str
    """stop | length."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.prompt_ids.nbytes + self.output_ids.nbytes + self.logprobs.nbytes + self.versions.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """One posted sequence with its provenance; arrays of the sequence's length."""

    mask: np.ndarray
    """uint8: the posted mask without tokens that nobody sampled."""
    logprobs: np.ndarray
    """float32, 0 where mask is 0."""
    versions: np.ndarray
    """int32, UNSAMPLED where mask is 0."""
    finished: bool
    """Whether the last answer in it ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceStatistics:
    """What is held and what was given up."""

    tickets: int
    """Tickets (the one of requests without a ticket included) that have records."""
    records: int
    nbytes: int
    evicted: dict[str, int]
    """Records that were given up, by reason: bytes (the budget was used up), age."""


@dataclass(slots=True, eq=False)
class _Ticket:
    opened: float
    records: dict[bytes, list[Record]] = field(default_factory=dict)
    nbytes: int = 0


def _key(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


class Provenance:
    """The records of all tickets, bounded in bytes and in age."""

    def __init__(self, *, max_bytes: int = 256 << 20, max_age_seconds: float = 3600.0) -> None:
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._tickets: dict[int | None, _Ticket] = {}
        self._nbytes = 0
        self._evicted: Counter[str] = Counter()

    def add(self, ticket: int | None, records: Sequence[Record], *, now: float) -> None:
        """Keep answers for `ticket` (None: of a request without one). The oldest tickets' records go when the budget is
        used up, those without a ticket first."""
        held = self._tickets.setdefault(ticket, _Ticket(opened=now))
        for record in records:
            held.records.setdefault(_key(record.prompt_ids), []).append(record)
            held.nbytes += record.nbytes
            self._nbytes += record.nbytes
        for key in [k for k, t in self._tickets.items() if k is not None and now - t.opened > self._max_age]:
            self._drop(key, "age")
        while self._nbytes > self._max_bytes and self._tickets:
            oldest = None if None in self._tickets else min(self._tickets, key=lambda k: self._tickets[k].opened)
            self._drop(oldest, "bytes")

    def close(self, ticket: int) -> None:
        """Forget a ticket."""
        held = self._tickets.pop(ticket, None)
        if held is not None:
            self._nbytes -= held.nbytes

    def _drop(self, ticket: int | None, reason: str) -> None:
        held = self._tickets.pop(ticket)
        self._nbytes -= held.nbytes
        self._evicted[reason] += sum(len(records) for records in held.records.values())

    def match(
        self, ticket: int | None, tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray]
    ) -> tuple[Matched, ...]:
        """The log-probs and versions of the trained tokens of one group.

        Args:
            ticket: whose records to look in.
            tokens: int32 [n] a sequence.
            masks: uint8 [n] a sequence, 1 on tokens to train.

        A run of trained tokens may lack the end token of its answer, and may go on for at most MAX_TAIL tokens after
        it, which then lose their mask. A record serves one sequence only; records that were used are forgotten, unless
        the group is refused. Raises ProvenanceError.
        """
        held = self._tickets.get(ticket)
        if held is None:
            raise ProvenanceError(
                f"ticket {ticket}: no answers of the engine are on record "
                f"(none were sampled, or they were given up: {dict(self._evicted)})"
            )
        used: set[int] = set()
        matched = tuple(
            _match_sequence(held.records, used, t, m, where=f"sequence {i}")
            for i, (t, m) in enumerate(zip(tokens, masks, strict=True))
        )
        self._forget(held, used)
        return matched

    def _forget(self, held: _Ticket, used: set[int]) -> None:
        for key, records in list(held.records.items()):
            left = [record for record in records if id(record) not in used]
            gone = sum(record.nbytes for record in records) - sum(record.nbytes for record in left)
            held.nbytes -= gone
            self._nbytes -= gone
            if left:
                held.records[key] = left
            else:
                del held.records[key]

    def statistics(self) -> ProvenanceStatistics:
        """What is held now."""
        return ProvenanceStatistics(
            tickets=len(self._tickets),
            records=sum(len(r) for t in self._tickets.values() for r in t.records.values()),
            nbytes=self._nbytes,
            evicted=dict(self._evicted),
        )


def _match_sequence(
    records: dict[bytes, list[Record]], used: set[int], tokens: np.ndarray, mask: np.ndarray, *, where: str
) -> Matched:
    kept = np.zeros(len(tokens), dtype=np.uint8)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    versions = np.full(len(tokens), UNSAMPLED, dtype=np.int32)
    finished = True
    for start, end in _runs(mask):
        at = start
        while at < end:
            found = _longest(records.get(_key(tokens[:at]), ()), used, tokens[at:end])
            if found is None:
                if at > start and end - at <= MAX_TAIL:
                    break
                raise ProvenanceError(_explain(records, used, tokens, at, end, where=where))
            record, length = found
            used.add(id(record))
            kept[at : at + length] = 1
            logprobs[at : at + length] = record.logprobs[:length]
            versions[at : at + length] = record.versions[:length]
            finished = record.finish_reason == "stop"
            at += length
    return Matched(mask=kept, logprobs=logprobs, versions=versions, finished=finished)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each maximal run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _longest(candidates: Sequence[Record], used: set[int], run: np.ndarray) -> tuple[Record, int] | None:
    """The unused record whose answer covers most of the start of `run`, and how many of its tokens are there."""
    best: tuple[Record, int] | None = None
    for record in candidates:
        length = len(record.output_ids)
        if record.finish_reason == "stop" and length == len(run) + 1:
            length -= 1  # the environment dropped the end token
        if id(record) in used or not 0 < length <= len(run) or (best is not None and length <= best[1]):
            continue
        if np.array_equal(record.output_ids[:length], run[:length]):
            best = record, length
    return best


def _explain(
    records: dict[bytes, list[Record]], used: set[int], tokens: np.ndarray, at: int, end: int, *, where: str
) -> str:
    candidates = records.get(_key(tokens[:at]), [])
    if not candidates:
        lengths = sorted({len(r.prompt_ids) for rs in records.values() for r in rs})[:8]
        return (
            f"{where}, position {at}: no answer on record has the {at} tokens before it as its prompt "
            f"(prompts of {lengths} tokens are)"
        )
    free = [r for r in candidates if id(r) not in used]
    if not free:
        return f"{where}, position {at}: all {len(candidates)} answers to this prompt belong to other sequences"
    run = tokens[at:end]
    agreed = max(_agreement(r.output_ids, run) for r in free)
    return (
        f"{where}, position {at + agreed}: differs from every answer to this prompt "
        f"({agreed} of {len(run)} trained tokens agree with the closest of {len(free)})"
    )


def _agreement(output: np.ndarray, run: np.ndarray) -> int:
    length = min(len(output), len(run))
    differs = np.flatnonzero(output[:length] != run[:length])
    return int(differs[0]) if len(differs) else length
