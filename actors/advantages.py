"""Token advantages of one group: those that the environment gave, or group-relative ones from the scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Mode = Literal["given", "group", "mean", "loo"]

EPSILON = 1e-6
"""Keeps `group` finite; DESIGN: (R - mean) / (std + 1e-6)."""


class AdvantageError(ValueError):
    """Token advantages are missing or don't fit the tokens."""


class NoVariance(Exception):
    """All scores of the group are equal and the environment gave no advantages: the group carries no signal."""


def group_advantages(mode: Mode, scores: Sequence[float]) -> np.ndarray:
    """One advantage a sequence, float64 [G].

    `group`: (R - mean) / (std + 1e-6) with the population's std (GRPO, arXiv 2402.03300); `mean`: R - mean (Dr.GRPO,
    2503.20783); `loo`: R - mean of the others (RLOO, 2402.14740). Raises NoVariance when the scores are all equal, a
    group of one included, and AdvantageError for `given`.
    """
    if mode == "given":
        raise AdvantageError("advantages: missing, expected the environment's (actor.advantages is given)")
    rewards = np.asarray(scores, dtype=np.float64)
    if np.ptp(rewards) == 0:
        raise NoVariance
    centred = rewards - rewards.mean()
    if mode == "mean":
        return centred
    if mode == "loo":
        return centred * (len(rewards) / (len(rewards) - 1))
    return centred / (rewards.std() + EPSILON)


def token_advantages(
    mode: Mode,
    *,
    scores: Sequence[float],
    masks: Sequence[np.ndarray],
    given: Sequence[Sequence[float]] | None,
    zeroed: Sequence[bool] | None = None,
) -> list[np.ndarray]:
    """Token advantages, float32 [n] a sequence, 0 where the mask is 0.

    Args:
        mode: what to compute where the environment gave none.
        scores: one a sequence.
        masks: uint8 [n] a sequence.
        given: the environment's, one a token, taken as they are in every mode; None or only empty lists: absent.
        zeroed: sequences whose advantage the environment set to zero.

    Raises AdvantageError and NoVariance.
    """
    if given is None or not any(len(values) for values in given):
        each = group_advantages(mode, scores)
        tokens = [np.full(len(mask), value, dtype=np.float32) for value, mask in zip(each, masks, strict=True)]
    else:
        if len(given) != len(masks):
            raise AdvantageError(f"advantages: {len(given)} lists, expected {len(masks)}, one a sequence")
        tokens = []
        for i, (values, mask) in enumerate(zip(given, masks, strict=True)):
            if len(values) != len(mask):
                raise AdvantageError(f"advantages[{i}]: {len(values)} values, expected {len(mask)}, one a token")
            tokens.append(np.asarray(values, dtype=np.float32))
    off = zeroed or [False] * len(masks)
    return [
        np.where(mask.astype(bool) & (not zero), values, np.float32(0)).astype(np.float32)
        for values, mask, zero in zip(tokens, masks, off, strict=True)
    ]
