"""Attention of packed rows: who sees whom, and how that is computed for short rows on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "lachesis_packed"
"""Name under which transformers knows `packed_attention` (`model.set_attn_implementation`)."""

SHORT_ROW = 512
"""Rows up to this long are computed directly on a CPU, where torch's flash kernel takes 1.3 to 3 times as long on them
(measured from 51 to 512 positions; at 1024 it is faster), whatever the type of the mask."""


def attention_mask(ends: torch.Tensor) -> torch.Tensor:
    """[R, 1, L, L] (query, key): whether the query sees the key, k <= q < ends[k]. ends: int64 [R, L].

    Bool for torch's kernels; for short rows on a CPU float32, 0 where seen and -inf elsewhere, to add to the scores.
    """
    place = torch.arange(ends.shape[1], device=ends.device)
    query, key = place[:, None], place[None, :]
    seen = ((key <= query) & (query < ends[:, None, :]))[:, None]
    if ends.device.type != "cpu" or ends.shape[1] > SHORT_ROW:
        return seen
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [R, L, heads, d] of query [R, heads, L, d] and key and value [R, kv heads, L, d].

    With a float mask scores and softmax are float32 and the heads that share a key are one product; with any other mask
    it is torch's scaled_dot_product_attention.
    """
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, length, width = query.shape
    shared = key.shape[1]
    stacked = (query.float() * scaling).reshape(rows, shared, -1, width)
    scores = (stacked @ key.float().transpose(2, 3)).view(rows, shared, -1, length, length)
    weights = (scores + attention_mask[:, :, None]).softmax(dim=-1).to(value.dtype)
    mixed = weights.view(rows, shared, -1, length) @ value
    return mixed.view(rows, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
