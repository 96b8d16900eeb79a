"""Published deltas of a model that ZeRO-3 cannot part evenly, beside the weights that DeepSpeed gathers."""

from __future__ import annotations

from typing import Any

import torch
from packing import random_batch
from transformers import Qwen2Config, Qwen2ForCausalLM

STEPS = 2
SMALLEST = 2
"""Elements of the smallest parameter: fewer than the ranks, when these are 4."""


def uneven_model() -> Qwen2ForCausalLM:
    """Tied; nearly all parameters are padded over 4 ranks, some over 2, and a bias is smaller than 4 ranks."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=97,
        hidden_size=6,
        intermediate_size=7,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=SMALLEST,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(shape).float()


def publish_steps(trainer: Any, ranks: Any) -> list[dict[str, Any]]:
    """Train and encode as the learner does. On rank 0 for each version, the anchor first: `changed` elements, the
    weights as `received` and as DeepSpeed has `gathered` them, by name, and whether the checksum is that of both."""
    import deepspeed

    from lachesis_learner.shards import ShardBlob, ShardEncoder
    from lachesis_transport.weights.checksum import combine
    from lachesis_transport.weights.mirror import Mirror

    encoder = ShardEncoder(trainer.shards(), rank=ranks.rank, ranks=ranks.size)
    mirror = Mirror(encoder.layout)
    versions = []
    for number in range(STEPS + 1):
        if number:
            trainer.train(random_batch(number))
        blobs = [ShardBlob.from_wire(wire) for wire in ranks.gather(encoder.encode(anchor=number == 0).to_wire())]
        gathered = {}
        for name, parameter in trainer._policy.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                gathered[name.removeprefix("model.")] = parameter.detach().flatten().to(torch.bfloat16).clone()
        if ranks.rank == 0:
            mirror.apply(b"".join(bytes(b.payload) for b in blobs), sizes=[len(b.payload) for b in blobs])
            versions.append(
                {
                    "changed": sum(blob.changed for blob in blobs),
                    "received": {name: view.clone() for name, view in mirror.tensors()},
                    "gathered": gathered,
                    "checksums_agree": combine(encoder.layout, [blob.checksums for blob in blobs])
                    == mirror.checksum(shards=ranks.size),
                }
            )
    return versions
