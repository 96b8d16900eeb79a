"""Groups as Atropos environments post them: JSON checked into arrays. Pure."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lachesis_transport.messages import MAX_TRAJECTORIES

UNTRAINED = -100
"""Atropos's mask value of a token that is not trained; trained tokens carry their own id."""

TICKET_KEY = "lachesis_ticket"
"""Key of group_overrides that carries the ticket."""

MAX_ID = 2**31 - 1


class ScoredDataError(ValueError):
    """A posted group is malformed. The text names the field, the value and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """One posted group."""

    tokens: tuple[np.ndarray, ...]
    """int32 [n] a sequence."""
    masks: tuple[np.ndarray, ...]
    """uint8 [n] a sequence: 1 on tokens to train."""
    scores: tuple[float, ...]
    advantages: tuple[tuple[float, ...], ...] | None
    """The environment's, one a token; None: absent."""
    zeroed: tuple[bool, ...]
    """Sequences whose advantage the environment set to zero (overrides: set_advantage_to_zero)."""
    ticket: int | None
    env_id: int | None

    def digest(self) -> str:
        """Identity of the content, so that a group that is posted again after a lost answer is known."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens, mask, score in zip(self.tokens, self.masks, self.scores, strict=True):
            digest.update(len(tokens).to_bytes(8, "little"))
            for array in (tokens, mask, np.float64(score)):
                digest.update(array.tobytes())
        return digest.hexdigest()


def parse_group(data: Any, *, max_tokens: int) -> ScoredGroup:
    """Check one group of POST /scored_data; no sequence may be longer than `max_tokens`. Raises ScoredDataError."""
    if not isinstance(data, dict):
        raise ScoredDataError(f"group: {type(data).__name__}, expected an object")
    sequences = _list(data, "tokens")
    n = len(sequences)
    if not 1 <= n <= MAX_TRAJECTORIES:
        raise ScoredDataError(f"tokens: {n} sequences, expected 1 to {MAX_TRAJECTORIES}")
    masks = _list(data, "masks", length=n)
    scores = _list(data, "scores", length=n)
    tokens = tuple(_ids(s, f"tokens[{i}]", low=0) for i, s in enumerate(sequences))
    for i, ids in enumerate(tokens):
        if not 2 <= len(ids) <= max_tokens:
            raise ScoredDataError(f"tokens[{i}]: {len(ids)} tokens, expected 2 to {max_tokens}")
    overrides = data.get("group_overrides") or {}
    if not isinstance(overrides, dict):
        raise ScoredDataError(f"group_overrides: {type(overrides).__name__}, expected an object or null")
    return ScoredGroup(
        tokens=tokens,
        masks=tuple(_mask(m, ids, f"masks[{i}]") for i, (m, ids) in enumerate(zip(masks, tokens, strict=True))),
        scores=tuple(_number(s, f"scores[{i}]") for i, s in enumerate(scores)),
        advantages=_advantages(data.get("advantages"), tokens),
        zeroed=_zeroed(data.get("overrides"), n),
        ticket=_integer(overrides.get(TICKET_KEY), f"group_overrides.{TICKET_KEY}"),
        env_id=_integer(data.get("env_id"), "env_id"),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _list(data: dict[str, Any], key: str, *, length: int | None = None) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise ScoredDataError(f"{key}: {_short(value)}, expected a list with one item a sequence")
    if length is not None and len(value) != length:
        raise ScoredDataError(f"{key}: {len(value)} items, expected {length}, one a sequence")
    return value


def _integer(value: Any, where: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ScoredDataError(f"{where}: {_short(value)}, expected an integer or null")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ScoredDataError(f"{where}: {_short(value)}, expected a finite number")
    return float(value)


def _ids(value: Any, where: str, *, low: int) -> np.ndarray:
    if not isinstance(value, list):
        raise ScoredDataError(f"{where}: {_short(value)}, expected a list of integers")
    for i, item in enumerate(value):
        if type(item) is not int or not low <= item <= MAX_ID:
            raise ScoredDataError(f"{where}[{i}]: {_short(item)}, expected an integer from {low} to {MAX_ID}")
    return np.array(value, dtype=np.int32)


def _mask(value: Any, tokens: np.ndarray, where: str) -> np.ndarray:
    ids = _ids(value, where, low=UNTRAINED)
    if len(ids) != len(tokens):
        raise ScoredDataError(f"{where}: {len(ids)} values, expected {len(tokens)}, one a token")
    trained = ids != UNTRAINED
    wrong = np.flatnonzero(trained & (ids != tokens))
    if len(wrong):
        at = int(wrong[0])
        raise ScoredDataError(f"{where}[{at}]: {ids[at]}, expected {UNTRAINED} or the token's id {tokens[at]}")
    return trained.astype(np.uint8)


def _advantages(value: Any, tokens: tuple[np.ndarray, ...]) -> tuple[tuple[float, ...], ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) != len(tokens):
        raise ScoredDataError(f"advantages: {_short(value)}, expected {len(tokens)} lists, one a sequence, or null")
    if all(item == [] for item in value):
        return None
    rows = []
    for i, (row, ids) in enumerate(zip(value, tokens, strict=True)):
        if not isinstance(row, list) or len(row) != len(ids):
            raise ScoredDataError(f"advantages[{i}]: {_short(row)}, expected {len(ids)} numbers, one a token")
        rows.append(tuple(_number(item, f"advantages[{i}][{j}]") for j, item in enumerate(row)))
    return tuple(rows)


def _zeroed(value: Any, n: int) -> tuple[bool, ...]:
    if not value:
        return (False,) * n
    if not isinstance(value, list) or len(value) != n or not all(isinstance(item, dict) for item in value):
        raise ScoredDataError(f"overrides: {_short(value)}, expected {n} objects, one a sequence, or null")
    return tuple(bool(item.get("set_advantage_to_zero", False)) for item in value)
