"""Packing: from a leased batch to the forward and backward passes of every rank.

A row of a micro-batch holds the trajectories of one group as a prefix tree in depth-first order: what they share (the
prompt, and whatever completions have in common) appears once. A position attends to its ancestors and itself, that is
to the positions k <= q with q < ends[k]; its position id is its depth. The hidden states are those of the unpacked
sequences, so packing changes nothing but the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lachesis_transport.messages import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of one rank: R rows of L positions, K trained tokens, n sequences (CPU tensors)."""

    input_ids: torch.Tensor
    """int64 [R, L]; pad_token on padding."""
    position_ids: torch.Tensor
    """int64 [R, L]; 0 on padding."""
    ends: torch.Tensor
    """int64 [R, L]: position k of a row is seen by the positions q with k <= q < ends[k]; padding sees itself alone."""
    predict: torch.Tensor
    """int64 [K]: index into the flattened R * L positions, the one whose hidden state predicts the trained token."""
    targets: torch.Tensor
    """int64 [K]: the trained tokens. Those of one sequence are together and in order."""
    advantages: torch.Tensor
    """float32 [K]: A."""
    behaviour: torch.Tensor
    """float32 [K]: log mu."""
    staleness: torch.Tensor
    """int64 [K]: s, distance in the lineage tree."""
    versions: torch.Tensor
    """int64 [K]: the version that sampled the token."""
    sequences: torch.Tensor
    """int64 [K]: which sequence of this micro-batch the token belongs to, 0 to n - 1."""
    single_version: torch.Tensor
    """bool [K]: whether all trained tokens of its sequence come from one version."""
    names: tuple[tuple[str, int], ...]
    """n pairs: group id and index of the trajectory within its group."""
    tokens: int
    """Positions that are not padding."""

    @property
    def padding(self) -> int:
        """Positions that are padding."""
        return self.input_ids.numel() - self.tokens

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The arguments of `Policy.forward` on `device`."""
        return {
            name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "ends", "predict", "targets")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer step trains on."""

    index: int
    """0 for the first of its batch: the weights are still those at the start of the batch."""
    trained_tokens: int
    """N: trained tokens of all ranks and micro-batches, the denominator of the loss."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """For each rank its micro-batches; equally many on each (passes are collectives), padded with empty ones."""


def plan(
    batch: Batch, *, ranks: int, micro_batch_tokens: int, mini_batches: int, share_prompts: bool, pad_token: int
) -> list[MiniBatch]:
    """Split a batch into mini-batches of whole groups, over ranks and into micro-batches, balanced by tokens.

    A micro-batch has at most `micro_batch_tokens` positions, padding included, unless a single sequence is longer. A
    group that is too large is split, its prompt repeated. Deterministic: every rank may compute it for itself.

    Raises ValueError when there are fewer groups than mini-batches or a version has no known distance.
    """
    raise NotImplementedError
