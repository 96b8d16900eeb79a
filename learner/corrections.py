"""Off-policy corrections: pure functions from log-probs, advantages and staleness to a loss per token.

All have one signature (`Correction`); docs/objective.md has the formulas and their sources. r = pi/prox and
rho = pi/mu carry the gradient, b = prox/mu carries none.
"""

from __future__ import annotations

import math
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
gradient; staleness and sequences int64 [K]. What a correction has no use for it ignores."""


def none(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    staleness: torch.Tensor,
    sequences: torch.Tensor,
    constants: schema.Correction,
) -> Terms:
    """L = -A log pi: REINFORCE, as if the policy of today had sampled the tokens."""
    return -advantages * logprobs, {"clipped": torch.zeros_like(logprobs, dtype=torch.bool)}


def ppo(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    staleness: torch.Tensor,
    sequences: torch.Tensor,
    constants: schema.Correction,
) -> Terms:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), the minimum for both signs of A.

    1707.06347 (equation 7); the two separate bounds from DAPO, 2503.14476 (equation 10).
    """
    low, high = 1 - constants.clip_low, 1 + constants.clip_high
    log_r = logprobs - proximal
    clipped = ((advantages > 0) & (log_r > math.log(high))) | ((advantages < 0) & (log_r < math.log(low)))
    # The ratio of a clipped token is never formed: it may overflow, and inf * 0 in the backward pass would be NaN.
    r = torch.where(clipped, 0, log_r).exp()
    bound = torch.where(advantages > 0, high, low)
    return -torch.where(clipped, bound, r) * advantages, {"clipped": clipped}


def tis(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    staleness: torch.Tensor,
    sequences: torch.Tensor,
    constants: schema.Correction,
) -> Terms:
    """L = min(b, cap) ppo(r): truncated importance sampling."""
    loss, masks = ppo(logprobs, proximal, behaviour, advantages, staleness, sequences, constants)
    cap = 2.0 if constants.cap is None else constants.cap
    return (proximal - behaviour).exp().clamp(max=cap) * loss, masks


def decoupled(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    staleness: torch.Tensor,
    sequences: torch.Tensor,
    constants: schema.Correction,
) -> Terms:
    """L = b ppo(r), 0 where b > cap: AReaL's decoupled objective, 2505.24298 (equation 5)."""
    loss, masks = ppo(logprobs, proximal, behaviour, advantages, staleness, sequences, constants)
    cap = 5.0 if constants.cap is None else constants.cap
    b = (proximal - behaviour).exp()
    masked = b > cap
    return torch.where(masked, 0, b) * loss, {"clipped": masks["clipped"] | masked}


def dppo(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    staleness: torch.Tensor,
    sequences: torch.Tensor,
    constants: schema.Correction,
) -> Terms:
    """L = -rho A + kappa (log rho)^2, the first term 0 where pi - mu went beyond delta in the advantage's direction.

    2602.04879: the trust region is one of probabilities, not of ratios, so a rare token may change by a large factor.
    """
    log_rho = logprobs - behaviour
    moved = logprobs.detach().exp() - behaviour.exp()
    masked = ((advantages > 0) & (moved > constants.delta)) | ((advantages < 0) & (moved < -constants.delta))
    surrogate = -torch.where(masked, 0, log_rho).exp() * advantages
    return torch.where(masked, 0, surrogate) + constants.kappa * log_rho.square(), {"clipped": masked}


CORRECTIONS: dict[str, Correction] = {"none": none, "ppo": ppo, "tis": tis, "decoupled": decoupled, "dppo": dppo}
"""By name. `schema.PROXIMALS` says which proximals each takes."""


def resolve_proximal(learner: schema.Learner) -> str | None:
    """Where this configuration's proximal log-prob comes from: "behaviour", "recompute", or None (it takes none).

    With "behaviour" and None pass the behaviour log-prob as the proximal. Combinations that would do nothing never get
    here: the schema refuses them.
    """
    takes = schema.PROXIMALS[learner.correction.name]
    return learner.correction.proximal or (takes[0] if takes else None)
