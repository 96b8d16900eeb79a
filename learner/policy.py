"""The policy: a causal language model that returns log-probs and entropies of given tokens, never whole logits."""

from __future__ import annotations

from typing import Any

import torch


class Policy(torch.nn.Module):
    """Wraps a Hugging Face causal language model (`self.model`; parameter names get the prefix `model.`).

    The model's `lm_head` is replaced by a module with the same parameter that computes log-probs in chunks, so ZeRO-3
    gathers it exactly once a pass however many tokens a rank has.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        ends: torch.Tensor,
        predict: torch.Tensor,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob (with gradient) and entropy in nats (without) of every target, float32 [K].

        The arguments are those of `MicroBatch.inputs`. With K = 0 the results are empty but attached to the graph, so
        that a backward pass still runs through every parameter.
        """
        raise NotImplementedError
