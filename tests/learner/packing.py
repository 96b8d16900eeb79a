"""Batches, a tiny model and plain answers for the tests of the learner's mathematics."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lachesis_transport.messages import Batch, Group, Trajectory

VOCABULARY = 96


def model(kind="llama", *, tied=True, seed=0):
    """A random float32 model of 2 layers with 2 heads that share one key head."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    made = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**shape))
    return made.float().train()


def trajectory(rng, tokens, mask, *, versions=(0,)):
    on = np.array(mask, dtype=bool)
    n = len(tokens)
    return Trajectory(
        tokens=np.array(tokens, dtype=np.int32),
        mask=on.astype(np.uint8),
        logprobs=np.where(on, -rng.exponential(2.0, n) - 0.01, 0).astype(np.float32),
        versions=np.where(on, np.sort(rng.choice(versions, n)), -1).astype(np.int32),
        advantages=np.where(on, rng.normal(0, 1, n), 0).astype(np.float32),
        score=float(rng.random()),
    )


def random_batch(seed, *, groups=4, size=4, vocabulary=VOCABULARY, prompt=6, turns=2, longest=7, version=3):
    """Groups of several turns with prompts of random length; a small vocabulary makes completions share prefixes."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        start = rng.integers(1, vocabulary, int(rng.integers(1, prompt + 1)))
        trajectories = []
        for _ in range(size):
            tokens, mask = list(start), [0] * len(start)
            for turn in range(int(rng.integers(1, turns + 1))):
                if turn:
                    tool = rng.integers(1, vocabulary, int(rng.integers(1, 4)))
                    tokens, mask = tokens + list(tool), mask + [0] * len(tool)
                answer = rng.integers(1, vocabulary, int(rng.integers(1, longest + 1)))
                tokens, mask = tokens + list(answer), mask + [1] * len(answer)
            if rng.random() < 0.3:  # a tail that nothing trains
                tokens, mask = [*tokens, 1], [*mask, 0]
            trajectories.append(trajectory(rng, tokens, mask, versions=range(version + 1)))
        made.append(Group(group_id=f"{g}:0", ticket=g, actor="a", environment="e", trajectories=tuple(trajectories)))
    return Batch(version=version, groups=tuple(made), distances={v: version - v for v in range(version + 1)})


def trained(batch):
    """Every trained token of the batch: {(group id, index, place): (history, token, advantage, log mu, s, version)}."""
    return {
        (group.group_id, index, int(t)): (
            tuple(tr.tokens[:t].tolist()),
            int(tr.tokens[t]),
            float(tr.advantages[t]),
            float(tr.logprobs[t]),
            batch.distances[int(tr.versions[t])],
            int(tr.versions[t]),
        )
        for group in batch.groups
        for index, tr in enumerate(group.trajectories)
        for t in np.flatnonzero(tr.mask)
    }


def token_keys(batch, micro_batch):
    """The key in `trained` of each of the K tokens of a micro-batch."""
    groups = {group.group_id: group for group in batch.groups}
    keys = []
    for sequence, (group_id, index) in enumerate(micro_batch.names):
        places = np.flatnonzero(groups[group_id].trajectories[index].mask)
        assert int((micro_batch.sequences == sequence).sum()) == len(places)
        keys += [(group_id, index, int(t)) for t in places]
    return keys


def plain_logprobs(model, batch):
    """Log-prob and entropy of every trained token, from the model's own forward pass over one sequence at a time."""
    answer = {}
    for group in batch.groups:
        for index, tr in enumerate(group.trajectories):
            logits = model(input_ids=torch.from_numpy(tr.tokens).long()[None]).logits[0].float()
            log_p = logits.log_softmax(-1)
            for t in np.flatnonzero(tr.mask):
                row = log_p[t - 1]
                answer[group.group_id, index, int(t)] = row[int(tr.tokens[t])], -(row.exp() * row).sum()
    return answer
