"""Staleness-aware GRPO: the loss of a micro-batch, and the metrics of a step as sums that merge.

    loss = sum over trained tokens of decay^s * L / N

with L from `corrections` and N the trained tokens of all ranks and micro-batches of the optimizer step, counted before
anything is clipped or masked. docs/objective.md defines every metric.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from lachesis_configs import schema
from lachesis_learner.batch import MicroBatch
from lachesis_learner.corrections import CORRECTIONS, resolve_proximal


class NonFiniteInput(ValueError):
    """An input or the loss is NaN or infinite. The text names it, the trajectory and the token."""


def objective(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    proximal: torch.Tensor | None,
    micro_batch: MicroBatch,
    *,
    trained_tokens: int,
    learner: schema.Learner,
    staleness_max: int,
    first: bool,
) -> tuple[torch.Tensor, StepSums]:
    """Loss (a scalar with gradient: this micro-batch's share of sum w L / N) and the sums of its metrics.

    logprobs, entropy: float32 [K] from `Policy.forward`. proximal: float32 [K] from a pass without gradient before the
    batch's first step when `resolve_proximal` says "recompute", else None. trained_tokens: N of the mini-batch. first:
    whether the weights are still those at the start of the batch (MiniBatch.index == 0).

    The loss is not scaled by ranks: where gradients are averaged over ranks (DeepSpeed), multiply by their number.
    Raises NonFiniteInput, and ValueError for a proximal that is missing or not wanted or a staleness above the bound.
    """
    recompute = resolve_proximal(learner) == "recompute"
    if recompute != (proximal is not None):
        raise ValueError(
            f"proximal: {'missing' if recompute else 'given'}, but {learner.correction.name} "
            f"{'needs it' if recompute else 'takes none'} under this configuration"
        )
    device = logprobs.device
    behaviour, advantages = micro_batch.behaviour.to(device), micro_batch.advantages.to(device)
    staleness, sequences = micro_batch.staleness.to(device), micro_batch.sequences.to(device)
    anchor = behaviour if proximal is None else proximal
    _refuse_non_finite(
        micro_batch, logprobs=logprobs, entropy=entropy, proximal=anchor, behaviour=behaviour, advantages=advantages
    )
    if len(staleness) and int(staleness.max()) > staleness_max:
        at = int(staleness.argmax())
        raise ValueError(
            f"staleness of {_name(micro_batch, at)}: {int(staleness[at])}, expected at most {staleness_max}"
        )

    correct = CORRECTIONS[learner.correction.name]
    per_token, masks = correct(logprobs, anchor, behaviour, advantages, staleness, sequences, learner.correction)
    if learner.decay < 1:
        per_token = per_token * learner.decay**staleness
    _refuse_non_finite(micro_batch, loss=per_token)
    loss = per_token.sum() / max(trained_tokens, 1)

    start = proximal if proximal is not None else logprobs if first else None
    with torch.no_grad():
        sums = _measure(
            micro_batch,
            staleness_max=staleness_max,
            losses=per_token,
            log_rho=logprobs.double() - behaviour.double(),
            log_start=None if start is None else start.double() - behaviour.double(),
            entropy=entropy,
            clipped=masks["clipped"],
        )
    return loss, sums


def _name(micro_batch: MicroBatch, token: int) -> str:
    group_id, index = micro_batch.names[int(micro_batch.sequences[token])]
    return f"group {group_id!r}, trajectory {index}"


def _refuse_non_finite(micro_batch: MicroBatch, **inputs: torch.Tensor) -> None:
    if all(bool(torch.isfinite(value).all()) for value in inputs.values()):
        return
    for name, value in inputs.items():
        bad = torch.isfinite(value).logical_not().nonzero()
        if len(bad):
            at = int(bad[0])
            sequence = int(micro_batch.sequences[at])
            place = at - int((micro_batch.sequences == sequence).nonzero()[0])
            raise NonFiniteInput(
                f"{name}: {float(value[at].detach())} at trained token {place} of {_name(micro_batch, at)}, "
                "expected a finite number"
            )


def _measure(
    micro_batch: MicroBatch,
    *,
    staleness_max: int,
    losses: torch.Tensor,
    log_rho: torch.Tensor,
    log_start: torch.Tensor | None,
    entropy: torch.Tensor,
    clipped: torch.Tensor,
) -> StepSums:
    sums = StepSums.zero(staleness_max=staleness_max)
    if not len(losses):
        return sums
    staleness, advantages = micro_batch.staleness.numpy(), micro_batch.advantages.numpy()
    log_rho_, cut = log_rho.cpu().numpy(), clipped.cpu().numpy()
    buckets = staleness_max + 1
    sums.tokens = len(staleness)
    sums.sequences = len(micro_batch.names)
    sums.loss = float(losses.double().sum())
    sums.entropy = float(entropy.double().sum())
    sums.ratio = float(np.exp(log_rho_).sum())
    sums.ratio_max = float(np.exp(log_rho_.max()))
    sums.positive, sums.negative = int((advantages > 0).sum()), int((advantages < 0).sum())
    sums.clipped_positive = int((cut & (advantages > 0)).sum())
    sums.clipped_negative = int((cut & (advantages < 0)).sum())
    sums.histogram = np.bincount(staleness, minlength=buckets).astype(np.float64)
    log_weights = np.bincount(micro_batch.sequences.numpy(), weights=log_rho_, minlength=sums.sequences)
    sums.log_weights = float(np.logaddexp.reduce(log_weights))
    sums.log_squares = float(np.logaddexp.reduce(2 * log_weights))
    if log_start is not None:
        x = log_start.cpu().numpy()
        k3 = np.expm1(x) - x
        sums.kl = np.bincount(staleness, weights=k3, minlength=buckets)
        sums.kl_tokens = sums.histogram.copy()
        fresh = (staleness == 0) & micro_batch.single_version.numpy()
        sums.mismatch, sums.mismatch_tokens = float(k3[fresh].sum()), int(fresh.sum())
    return sums


_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    "ratio_max": max,
    "log_weights": np.logaddexp,
    "log_squares": np.logaddexp,
}
"""How the fields merge that are not sums."""


@dataclass(slots=True, kw_only=True)
class StepSums:
    """What the metrics of a step are made of. Merges over micro-batches, mini-batches and ranks in any order."""

    tokens: float = 0
    """Trained tokens."""
    sequences: float = 0
    """Sequences with at least one trained token."""
    loss: float = 0
    """Sum of decay^s L."""
    entropy: float = 0
    """Sum over tokens, nats."""
    ratio: float = 0
    """Sum of rho over tokens."""
    positive: float = 0
    """Tokens with A > 0."""
    negative: float = 0
    """Tokens with A < 0."""
    clipped_positive: float = 0
    """Of those with A > 0, the clipped or masked ones."""
    clipped_negative: float = 0
    """Of those with A < 0, the clipped or masked ones."""
    mismatch: float = 0
    """Sum of k3 over tokens of staleness 0 in sequences of a single version."""
    mismatch_tokens: float = 0
    """How many tokens those are."""
    ratio_max: float = 0
    """Largest rho."""
    log_weights: float = -math.inf
    """Log of the sum of sequence weights, w_i = product of rho over sequence i."""
    log_squares: float = -math.inf
    """Log of the sum of w_i^2."""
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(1))
    """float64 [staleness_max + 1]: tokens of each staleness."""
    kl: np.ndarray = field(default_factory=lambda: np.zeros(1))
    """float64 [staleness_max + 1]: sum of k3 of each staleness."""
    kl_tokens: np.ndarray = field(default_factory=lambda: np.zeros(1))
    """float64 [staleness_max + 1]: tokens behind `kl`."""

    @classmethod
    def zero(cls, *, staleness_max: int) -> StepSums:
        """Of no token at all."""
        buckets = staleness_max + 1
        return cls(histogram=np.zeros(buckets), kl=np.zeros(buckets), kl_tokens=np.zeros(buckets))

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            **{
                f.name: _MERGE.get(f.name, operator.add)(getattr(self, f.name), getattr(other, f.name))
                for f in fields(self)
            }
        )

    def to_vector(self) -> torch.Tensor:
        """Flat float64 vector, the same length on every rank of a run. To merge ranks: gather, then `merge`."""
        return torch.from_numpy(np.concatenate([np.atleast_1d(getattr(self, f.name)) for f in fields(self)]))

    @classmethod
    def merge(cls, vectors: Sequence[torch.Tensor]) -> StepSums:
        """The sums of all ranks from their vectors (all_gather them: some fields are maxima, not sums)."""
        total: StepSums | None = None
        names = [f.name for f in fields(cls)]
        for vector in vectors:
            values = vector.cpu().numpy()
            scalars, arrays = values[: len(names) - 3], values[len(names) - 3 :].reshape(3, -1)
            each = cls(**dict(zip(names, [*scalars.tolist(), *arrays], strict=True)))
            total = each if total is None else total + each
        if total is None:
            raise ValueError("vectors: none, expected one a rank")
        return total

    def finalise(self) -> dict[str, Any]:
        """The metrics: tokens, sequences, loss, staleness_mean, staleness_max, staleness_p95, staleness_histogram,
        ratio_mean, ratio_max, clip_fraction_positive, clip_fraction_negative, mismatch_kl, kl_by_staleness, ess_ratio,
        entropy. What has no token behind it is None."""
        n = int(self.tokens)
        ages = np.arange(len(self.histogram))
        cumulative = self.histogram.cumsum()
        return {
            "tokens": n,
            "sequences": int(self.sequences),
            "loss": _share(self.loss, n),
            "staleness_mean": _share(float(ages @ self.histogram), n),
            "staleness_max": int(ages[self.histogram > 0].max()) if n else None,
            "staleness_p95": int(np.searchsorted(cumulative, 0.95 * n)) if n else None,
            "staleness_histogram": [int(count) for count in self.histogram],
            "ratio_mean": _share(self.ratio, n),
            "ratio_max": self.ratio_max if n else None,
            "clip_fraction_positive": _share(self.clipped_positive, self.positive),
            "clip_fraction_negative": _share(self.clipped_negative, self.negative),
            "mismatch_kl": _share(self.mismatch, self.mismatch_tokens),
            "kl_by_staleness": {
                str(s): float(self.kl[s] / self.kl_tokens[s]) for s in ages.tolist() if self.kl_tokens[s]
            },
            "ess_ratio": math.exp(2 * self.log_weights - self.log_squares) / self.sequences if n else None,
            "entropy": _share(self.entropy, n),
        }


def _share(total: float, count: float) -> float | None:
    return total / count if count else None
