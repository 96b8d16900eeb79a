"""What shared-prompt packing saves the learner: forward and backward of the same groups, packed and unpacked.

The groups are like those of the arithmetic task: 40 tokens of prompt, 8 completions of 8 to 16 tokens, SmolLM2-135M.
Completions are random tokens, so that nothing but the prompt is shared (real ones share more).
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lachesis_bench.figures import Figure, Length
from lachesis_configs.models import resolve_model
from lachesis_learner.batch import MicroBatch, plan
from lachesis_learner.policy import Policy
from lachesis_transport.messages import Batch, Group, Trajectory

GROUP_SIZE, PROMPT, SHORTEST, LONGEST = 8, 40, 8, 16
MICRO_BATCH_TOKENS = 1024
"""The budget with which unshared packing is fastest on two cores; shared packing does not mind."""

AMOUNT: dict[Length, tuple[int, int]] = {"short": (4, 2), "normal": (8, 3), "long": (8, 9)}
"""Groups and runs."""


def run(length: Length) -> list[Figure]:
    """learner.packing: trained tokens a second through forward and backward, shared against unshared prompts."""
    groups, runs = AMOUNT[length]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m-instruct"), dtype=torch.bfloat16)
    vocabulary = model.config.vocab_size
    policy = Policy(model).to(device)
    batch = _batch(groups, vocabulary=vocabulary)
    shared, unshared = (_passes(batch, share_prompts=share) for share in (True, False))
    trained = sum(len(m.targets) for m in shared)
    for passes in (shared, unshared):
        _seconds(policy, passes[:1], device)
    # Alternating, so that what else the machine does falls on both.
    pairs = [(_seconds(policy, shared, device), _seconds(policy, unshared, device)) for _ in range(runs)]
    ratios = [slow / fast for fast, slow in pairs]
    return [
        Figure(
            figure="learner.packing",
            value=trained / statistics.median(fast for fast, _ in pairs),
            unit="tokens/s",
            against="unshared packing, same groups, same model, same run",
            reference=trained / statistics.median(slow for _, slow in pairs),
            ratio=statistics.median(ratios),
            runs=runs,
            spread=_spread(ratios),
        )
    ]


def _passes(batch: Batch, *, share_prompts: bool) -> tuple[MicroBatch, ...]:
    (mini_batch,) = plan(
        batch,
        ranks=1,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        mini_batches=1,
        share_prompts=share_prompts,
        pad_token=0,
    )
    return mini_batch.ranks[0]


def _seconds(policy: Policy, passes: tuple[MicroBatch, ...], device: str) -> float:
    policy.zero_grad(set_to_none=False)
    start = time.perf_counter()
    for micro_batch in passes:
        logprobs, _ = policy(**micro_batch.inputs(device))
        (logprobs * micro_batch.advantages.to(device)).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _batch(groups: int, *, vocabulary: int) -> Batch:
    random = np.random.default_rng(0)

    def trajectory(prompt: np.ndarray) -> Trajectory:
        answer = random.integers(vocabulary, size=int(random.integers(SHORTEST, LONGEST + 1)))
        tokens = np.concatenate([prompt, answer]).astype(np.int32)
        mask = (np.arange(len(tokens)) >= PROMPT).astype(np.uint8)
        return Trajectory(
            tokens=tokens,
            mask=mask,
            logprobs=np.where(mask, -1, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.where(mask, random.choice([-1, 1]), 0).astype(np.float32),
            score=0.0,
        )

    made = []
    for ticket in range(groups):
        prompt = random.integers(vocabulary, size=PROMPT)
        made.append(
            Group(
                group_id=f"{ticket}:0",
                ticket=ticket,
                actor="bench",
                environment="bench",
                trajectories=tuple(trajectory(prompt) for _ in range(GROUP_SIZE)),
            )
        )
    return Batch(version=0, groups=tuple(made), distances={0: 0})


def _spread(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle
