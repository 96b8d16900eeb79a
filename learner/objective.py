"""Staleness-aware GRPO: the loss of a micro-batch, and the metrics of a step as sums that merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lachesis_configs import schema
from lachesis_learner.batch import MicroBatch


class NonFiniteInput(ValueError):
    """An input of the objective is NaN or infinite. The text names the input, the trajectory and the token."""


@dataclass(slots=True, kw_only=True)
class StepSums:
    """What the metrics of a step are made of. Merges over micro-batches, mini-batches and ranks in any order."""

    @classmethod
    def zero(cls, *, staleness_max: int) -> StepSums:
        """Of no token at all."""
        raise NotImplementedError

    def __add__(self, other: StepSums) -> StepSums:
        raise NotImplementedError

    def to_vector(self) -> torch.Tensor:
        """Flat float64 vector, the same length on every rank of a run. To merge ranks: gather, then `merge`."""
        raise NotImplementedError

    @classmethod
    def merge(cls, vectors: Sequence[torch.Tensor]) -> StepSums:
        """The sums of all ranks from their vectors (all_gather them: some fields are maxima, not sums)."""
        raise NotImplementedError

    def finalise(self) -> dict[str, Any]:
        """The metrics: staleness_mean, staleness_max, staleness_p95, staleness_histogram, sequences, tokens, loss,
        ratio_mean, ratio_max, clip_fraction_positive, clip_fraction_negative, mismatch_kl, kl_by_staleness, ess_ratio,
        entropy. What has no token behind it is None."""
        raise NotImplementedError


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
    """Loss (a scalar with gradient: this micro-batch's share of sum m w L / N) and the sums of its metrics.

    logprobs, entropy: float32 [K] from `Policy.forward`. proximal: float32 [K] from a pass without gradient before the
    batch's first step when `resolve_proximal` says "recompute", else None. trained_tokens: N of the mini-batch. first:
    whether the weights are still those at the start of the batch (MiniBatch.index == 0).

    The loss is not scaled by ranks: where gradients are averaged over ranks (DeepSpeed), multiply by their number.
    Raises NonFiniteInput.
    """
    raise NotImplementedError
