"""The policy: a causal language model that returns log-probs and entropies of given tokens, never whole logits."""

from __future__ import annotations

from typing import Any

import torch

CHUNK_LOGITS = 1 << 25
"""Logits that exist at once, at most (or those of one position, where the vocabulary is larger still)."""


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
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask(ends), use_cache=False
        ).last_hidden_state
        # Completions that branch at one position, and equal ones, share its logits.
        positions, rows = torch.unique(predict, return_inverse=True)
        return self.model.lm_head(hidden.flatten(0, 1).index_select(0, positions), rows, targets)


def attention_mask(ends: torch.Tensor) -> torch.Tensor:
    """bool [R, 1, L, L] (query, key): whether the query sees the key, k <= q < ends[k]. ends: int64 [R, L]."""
    place = torch.arange(ends.shape[1], device=ends.device)
    query, key = place[:, None], place[None, :]
    return ((key <= query) & (query < ends[:, None, :]))[:, None]


class TokenHead(torch.nn.Module):
    """The output layer: hidden states to log-probs of chosen tokens."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        """[V, H], the parameter of the lm_head that this replaces, tied or not."""

    def forward(
        self, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of targets[k] given hidden[rows[k]], and the entropy there. hidden [P, H]; rows, targets int64 [K]."""
        return _TokenLogprobs.apply(hidden, self.weight, rows, targets)


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax in float32 over chunks of positions; a pass of more than one chunk computes its logits twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = hidden.new_empty(len(rows), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        log_total = hidden.new_empty(len(hidden), dtype=torch.float32)
        chunks = _chunks(len(hidden), len(weight))
        logits = None
        for start, stop in chunks:
            logits = hidden[start:stop] @ weight.t()
            exact = logits.float()
            log_total[start:stop] = exact.logsumexp(dim=1)
            here = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            logprobs[here] = exact[rows[here] - start, targets[here]] - log_total[rows[here]]
            spread = log_total[start:stop] - ((exact - log_total[start:stop, None]).exp() * exact).sum(dim=1)
            entropy[here] = spread[rows[here] - start]
        ctx.save_for_backward(hidden, weight, rows, targets, log_total)
        ctx.logits = logits if len(chunks) == 1 else None
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, rows, targets, log_total = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        chunks = _chunks(len(hidden), len(weight))
        grad_weight = torch.zeros_like(weight, dtype=torch.float32 if len(chunks) > 1 else weight.dtype)
        of_row = grad.new_zeros(len(hidden)).index_add_(0, rows, grad)
        for start, stop in chunks:
            logits = hidden[start:stop] @ weight.t() if ctx.logits is None else ctx.logits
            slope = (logits.float() - log_total[start:stop, None]).exp_() * -of_row[start:stop, None]
            here = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            slope.index_put_((rows[here] - start, targets[here]), grad[here], accumulate=True)
            slope = slope.to(hidden.dtype)
            grad_hidden[start:stop] = slope @ weight
            grad_weight += slope.t() @ hidden[start:stop]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(positions: int, vocabulary: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_LOGITS // vocabulary)
    return [(start, min(start + step, positions)) for start in range(0, positions, step)]
