"""Off-policy corrections: pure functions from log-probs, advantages and staleness to a loss per token.

All have one signature (`Correction`); docs/objective.md has the formulas. r = pi/prox, b = prox/mu, rho = pi/mu.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lachesis_configs import schema

Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""L per token, float32 [K] with gradient; and bool [K] tensors: `clipped`, the tokens whose gradient the correction
cut (clipped or masked)."""

Correction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, schema.Correction], Terms
]
"""correction(logprobs, proximal, behaviour, advantages, staleness, sequences, constants): float32 [K], the first with a
gradient; staleness and sequences int64 [K]."""

CORRECTIONS: dict[str, Correction] = {}


def resolve_proximal(learner: schema.Learner) -> str | None:
    """Where this configuration's proximal log-prob comes from: "behaviour", "recompute", or None (not needed; pass the
    behaviour log-prob in its place). Raises ValueError for a combination that would do nothing."""
    raise NotImplementedError
