"""Trains one batch under several variants of the configuration, publishes some steps of an uneven model, and writes
what came of it; run as one or more ranks.

trainer_program.py MODELS OUT RANKS [--rank R]: MODELS has the folders `model` and `uneven`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil

from lachesis_configs import schema
from lachesis_learner.ranks import Ranks, prepare_process

LEARNER = schema.Learner(
    device="cpu",
    precision="fp32",
    threads=1,
    lr=1e-4,
    warmup_steps=4,
    # Without momentum the optimizer's first moment is the gradient of the last step.
    betas=(0.0, 0.999),
    max_grad_norm=1e9,
    micro_batch_tokens=100_000,
)
CLIP = 0.01
DECAY = 0.7
VARIANTS = {
    "whole": {},
    "split": {"micro_batch_tokens": 30, "decay": DECAY},
    "unshared": {"micro_batch_tokens": 30, "share_prompts": False},
    "clipped": {"max_grad_norm": CLIP},
    "offloaded": {"offload_optimizer": True},
    "two steps": {"mini_batches": 2, "correction": schema.Correction(name="decoupled"), "micro_batch_tokens": 60},
}
VARIANT_RANKS = (1, 2)
PUBLISHED = {
    "bf16": {"precision": "bf16"},
    "bf16 offloaded": {"precision": "bf16", "offload_optimizer": True},
    "fp32": {},
    "fp32 offloaded": {"offload_optimizer": True},
}
PUBLISHED_RANKS = (1, 2, 4)
SEED = 5
STALENESS_MAX = 3


def main(models: str, out: str, size: int, rank: int) -> None:
    learner = LEARNER.model_copy(update={"ranks": size})
    device = prepare_process(learner, rank=rank)
    if rank:
        ranks = Ranks.follow(device=device, rank=rank, size=size)
    else:
        command = [sys.executable, __file__, models, out, str(size)]
        ranks = Ranks.lead(device=device, size=size, command=command)

    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from packing import random_batch
    from publishing import publish_steps

    from lachesis_learner.trainer import Trainer

    def make_trainer(model: str, update: dict) -> Trainer:
        return Trainer(
            learner.model_copy(update=update),
            model_path=Path(models) / model,
            staleness_max=STALENESS_MAX,
            control=ranks.control,
        )

    results = {"published": {n: publish_steps(make_trainer("uneven", u), ranks) for n, u in PUBLISHED.items()}}
    for name, update in VARIANTS.items() if size in VARIANT_RANKS else ():
        trainer = make_trainer("model", update)
        shards = trainer.shards()
        trained = trainer.train(random_batch(SEED))
        parameters = dict(trainer._policy.named_parameters())
        results[name] = {
            "loss": trained.sums.loss / trained.sums.tokens,
            "grad_norm": trained.grad_norm,
            "lr": trained.lr,
            "positions": (trained.tokens, trained.padding),
            "metrics": trained.sums.finalise(),
            "gradient": {n: safe_get_full_optimizer_state(p, "exp_avg").clone() for n, p in parameters.items()},
            "weights": {n: safe_get_full_fp32_param(p).clone() for n, p in parameters.items()},
            "shards": [(s.name, s.start, s.numel, s.flat.clone()) for s in shards],
        }
    # As a parameter looks whose shard DeepSpeed keeps on an NVMe drive.
    trainer = make_trainer("uneven", {})
    parameter = next(trainer._policy.parameters())
    parameter.ds_tensor = torch.empty(1, dtype=torch.bfloat16)
    try:
        trainer.shards()
    except RuntimeError as error:
        results["without a shard"] = str(error)
    connections = psutil.Process().net_connections()
    results["listeners"] = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    torch.save(results, f"{out}.{rank}")
    ranks.close(failed=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[5]) if len(sys.argv) > 4 else 0)
