"""The policy: a causal language model that returns log-probs and entropies of given tokens, never whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lachesis_learner import attention

CHUNK_LOGITS = 1 << 26
"""Logits that exist at once, at most (or those of one position, where the vocabulary is larger still)."""

PART_LOGITS = 1 << 20
"""Of those, the logits that a CPU works on in float32 at once: a third of the time of all in one go."""


class Policy(torch.nn.Module):
    """Wraps a Hugging Face causal language model (`self.model`; parameter names get the prefix `model.`).

    The model's `lm_head` is replaced by a module with the same parameter that computes log-probs in chunks, so ZeRO-3
    gathers it exactly once a pass however many tokens a rank has.

    Raises ValueError for a model whose logits are more than a linear layer over its decoder's output, or whose
    attention is more than the mask says (sliding windows).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        head = getattr(model, "lm_head", None)
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            raise ValueError(
                f"model: the head of {type(model).__name__} is {head}, expected a linear lm_head without bias"
            )
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise ValueError(f"model: config.{name} is {getattr(config, name)}, expected plain logits")
        if any("full" not in kind for kind in getattr(config, "layer_types", None) or ()):
            raise ValueError(
                f"model: config.layer_types is {sorted(set(config.layer_types))}, expected full attention only"
            )
        model.set_attn_implementation(attention.NAME)
        model.lm_head = TokenHead(head.weight)
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
        hidden = self.model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention.attention_mask(ends),
            use_cache=False,
        ).last_hidden_state
        # Completions that branch at one position, and equal ones, share its logits.
        positions, rows = torch.unique(predict, return_inverse=True)
        return self.model.lm_head(hidden.flatten(0, 1).index_select(0, positions), rows, targets)


class TokenHead(torch.nn.Module):
    """The output layer: hidden states to log-probs of chosen tokens."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        """[V, H], the parameter of the lm_head that this replaces, tied or not."""

    def forward(
        self, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of targets[k] given hidden[rows[k]] and entropy there: hidden [P, H], rows and targets int64 [K]."""
        return _TokenLogprobs.apply(hidden, self.weight, rows, targets)


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax in float32. A pass of more than one chunk of logits computes them twice instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = hidden.new_empty(len(rows), dtype=torch.float32)
        log_total = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(log_total)
        chunks = _chunks(hidden, weight)
        logits = None
        for start, stop in chunks:
            logits = hidden[start:stop] @ weight.t()
            for first, part in _parts(logits):
                exact = part.to(torch.float32, copy=True)
                top = exact.amax(dim=1, keepdim=True)
                exact.sub_(top)
                mass = exact.exp()
                total = mass.sum(dim=1)
                at = slice(start + first, start + first + len(part))
                log_total[at] = total.log() + top.squeeze(1)
                entropy[at] = total.log() - torch.linalg.vecdot(mass, exact) / total
            here = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            logprobs[here] = logits[rows[here] - start, targets[here]].float() - log_total[rows[here]]
        ctx.save_for_backward(hidden, weight, rows, targets, log_total)
        ctx.logits = logits if len(chunks) == 1 else None
        entropy = entropy[rows]
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, rows, targets, log_total = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None
        chunks = _chunks(hidden, weight)
        grad_hidden = torch.empty_like(hidden)
        total = None if len(chunks) == 1 else torch.zeros_like(weight, dtype=torch.float32)
        of_position = grad.new_zeros(len(hidden)).index_add_(0, rows, grad)
        for start, stop in chunks:
            # The slope overwrites the logits: a target's gradient times (1 if it is the token, else 0) - probability.
            slope = hidden[start:stop] @ weight.t() if kept is None else kept
            for first, part in _parts(slope):
                at = slice(start + first, start + first + len(part))
                exact = part.to(torch.float32, copy=True).sub_(log_total[at, None]).exp_().mul_(-of_position[at, None])
                here = ((rows >= at.start) & (rows < at.stop)).nonzero().squeeze(1)
                exact.index_put_((rows[here] - at.start, targets[here]), grad[here], accumulate=True)
                part.copy_(exact)
            grad_hidden[start:stop] = slope @ weight
            grad_weight = slope.t() @ hidden[start:stop]
            if total is not None:
                total += grad_weight
        return grad_hidden, grad_weight if total is None else total.to(weight.dtype), None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    step = max(1, CHUNK_LOGITS // len(weight))
    return [(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step)]


def _parts(logits: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of `logits` [P, V] and where they start: on a CPU small enough to stay in its cache between operations."""
    step = max(1, PART_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return ((first, logits[first : first + step]) for first in range(0, len(logits), step))
