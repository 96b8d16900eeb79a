"""One rank of the learner: a DeepSpeed ZeRO-3 engine, the passes over a planned batch and the optimizer's steps.

All ranks call the same methods with the same arguments in the same order: each of them is made of collectives.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lachesis_configs import schema
from lachesis_learner.batch import MiniBatch, plan
from lachesis_learner.corrections import resolve_proximal
from lachesis_learner.metrics import Phases
from lachesis_learner.objective import StepSums, objective
from lachesis_learner.policy import Policy
from lachesis_learner.shards import Shard
from lachesis_transport.messages import Batch

TAG = "state"
"""Name of DeepSpeed's checkpoint inside the folder that it is given."""

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class NonFiniteGradient(ArithmeticError):
    """The gradient of a step is NaN or infinite. Nothing was updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training a batch measured, over all ranks and optimizer steps."""

    sums: StepSums
    """Sums behind the metrics of the objective."""
    grad_norm: float
    """Mean over the optimizer steps of the global gradient norm before clipping."""
    lr: float
    """Learning rate of the last step."""
    tokens: int
    """Positions processed by forward and backward passes, without padding."""
    padding: int
    """Positions of padding beside them."""


class Trainer:
    """The policy under training, sharded over the ranks of the default process group.

    Args:
        learner: the configuration.
        model_path: folder in Hugging Face format of the weights to start from.
        staleness_max: S.
        seed: of what little is random here.
        control: gloo group of all ranks; None takes the default group (which then has to be gloo).
    """

    def __init__(
        self,
        learner: schema.Learner,
        *,
        model_path: Path,
        staleness_max: int,
        seed: int = 0,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self._learner, self._staleness_max, self._control = learner, staleness_max, control
        self._model_path = model_path
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        dtype = torch.bfloat16 if learner.precision == "bf16" else torch.float32
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        # Without dropout: the learner's log-probs have to be those that the actors sampled with.
        policy = Policy(model).eval()
        config = model.config
        token = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
        self._pad_token = (token[0] if isinstance(token, list) else token) or 0
        # The fused kernel passes over the optimizer's state once: on CPUs a third of the time of the plain one.
        optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=learner.lr,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        self._engine, *_ = deepspeed.initialize(
            model=policy,
            model_parameters=list(policy.parameters()),
            optimizer=optimizer,
            config=engine_config(learner, cpu=os.environ["DS_ACCELERATOR"] == "cpu"),
            dist_init_required=False,
        )
        self._policy = policy
        self._device = self._engine.device
        self._published: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return int(self._engine.global_steps)

    def train(self, batch: Batch, phases: Phases | None = None) -> Trained:
        """Train one batch: proximal log-probs if the correction needs them, then for each mini-batch all its passes and
        an optimizer step. Phases `proximal`, `forward_backward` and `step` are timed in `phases`.

        Raises NonFiniteInput or NonFiniteGradient; the weights are then those of the last mini-batch before.
        """
        phases = phases or Phases()
        mini_batches = plan(
            batch,
            ranks=self._ranks,
            micro_batch_tokens=self._learner.micro_batch_tokens,
            mini_batches=self._learner.mini_batches,
            share_prompts=self._learner.share_prompts,
            pad_token=self._pad_token,
        )
        proximals = None
        if resolve_proximal(self._learner) == "recompute":
            with phases.phase("proximal"):
                proximals = [self._proximal(mini_batch) for mini_batch in mini_batches]
                self._synchronize()
        sums, norms = StepSums.zero(staleness_max=self._staleness_max), []
        for i, mini_batch in enumerate(mini_batches):
            with phases.phase("forward_backward"):
                sums += self._accumulate(mini_batch, proximals[i] if proximals else None)
                self._synchronize()
            with phases.phase("step"):
                norms.append(self._step(batch.version))
                self._synchronize()
        passes = [micro_batch for each in mini_batches for rank in each.ranks for micro_batch in rank]
        return Trained(
            sums=self._merged(sums),
            grad_norm=sum(norms) / len(norms),
            lr=self._engine.optimizer.param_groups[0]["lr"],
            tokens=sum(micro_batch.tokens for micro_batch in passes),
            padding=sum(micro_batch.padding for micro_batch in passes),
        )

    def shards(self) -> list[Shard]:
        """This rank's part of every parameter in bf16, under its checkpoint name; kept up to date by `train`.

        Raises RuntimeError when DeepSpeed does not keep them in memory.
        """
        self._published.clear()
        shards = []
        for name, parameter in _parameters(self._policy):
            partition, numel = parameter.ds_tensor, parameter.ds_numel
            each = -(-numel // self._ranks)
            if partition.numel() != each:
                raise RuntimeError(
                    f"{name}: a shard of {partition.numel()} elements in memory, expected {each} of {numel}: "
                    "parameters that DeepSpeed keeps elsewhere (NVMe) can't be published"
                )
            start = min(self._rank * each, numel)
            flat = partition.data[: min(each, numel - start)]  # without the padding, which is uninitialised
            if flat.dtype != torch.bfloat16:
                source, flat = flat, flat.to(torch.bfloat16)
                self._published.append((flat, source))
            shards.append(Shard(name=name, flat=flat, start=start, numel=numel))
        return shards

    def save(self, folder: Path) -> None:
        """Write the policy in bf16 in Hugging Face format into `folder` (rank 0), and DeepSpeed's state beneath it."""
        weights = {}
        for name, parameter in _parameters(self._policy):
            with deepspeed.zero.GatheredParameters([parameter]):
                if self._rank == 0:
                    weights[name] = parameter.data.to("cpu", torch.bfloat16, copy=True)
        if self._rank == 0:
            for file in self._model_path.iterdir():
                if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                    shutil.copy(file, folder)
            config = self._policy.model.config
            before, config.dtype = config.dtype, torch.bfloat16
            config.save_pretrained(folder)
            config.dtype = before
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._engine.save_checkpoint(str(folder / "deepspeed"), tag=TAG)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote under as many ranks. These files are pickles: only ever load one's own."""
        loaded, _ = self._engine.load_checkpoint(str(folder / "deepspeed"), tag=TAG)
        if loaded is None:
            raise FileNotFoundError(f"{folder / 'deepspeed' / TAG}: expected the optimizer's state of this checkpoint")
        self._publish()

    def _proximal(self, mini_batch: MiniBatch) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._engine(**micro_batch.inputs(self._device))[0] for micro_batch in mini_batch.ranks[self._rank]]

    def _accumulate(self, mini_batch: MiniBatch, proximals: list[torch.Tensor] | None) -> StepSums:
        sums = StepSums.zero(staleness_max=self._staleness_max)
        micro_batches = mini_batch.ranks[self._rank]
        for i, micro_batch in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            logprobs, entropy = self._engine(**micro_batch.inputs(self._device))
            loss, measured = objective(
                logprobs,
                entropy,
                proximals[i] if proximals is not None else None,
                micro_batch,
                trained_tokens=mini_batch.trained_tokens,
                learner=self._learner,
                staleness_max=self._staleness_max,
                first=mini_batch.index == 0,
            )
            # DeepSpeed averages gradients over the ranks, but N counts the tokens of all of them.
            self._engine.backward(loss * self._ranks, scale_wrt_gas=False)
            sums += measured
        return sums

    def _step(self, version: int) -> float:
        warmup = self._learner.warmup_steps
        scale = min(1.0, (self.steps + 1) / warmup) if warmup else 1.0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._learner.lr * scale
        self._engine.step()
        if not self._engine.was_step_applied():
            raise NonFiniteGradient(f"gradient norm: not finite in batch {version}, expected a finite number")
        self._publish()
        return float(self._engine.get_global_grad_norm())

    def _publish(self) -> None:
        for flat, source in self._published:
            flat.copy_(source)

    def _merged(self, sums: StepSums) -> StepSums:
        vector = sums.to_vector()
        vectors = [torch.empty_like(vector) for _ in range(self._ranks)]
        dist.all_gather(vectors, vector, group=self._control)
        return StepSums.merge(vectors)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def engine_config(learner: schema.Learner, *, cpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation is in fp32 whatever the precision; steps are taken by hand."""
    zero: dict[str, Any] = {"stage": 3}
    if cpu:
        # Pieces that fit a CPU's caches and that malloc keeps, where fresh pages would cost more than the arithmetic.
        zero |= {"reduce_bucket_size": 8_000_000, "sub_group_size": 8_000_000}
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not cpu}
    if learner.ranks == 1:
        # Nothing to scatter, and this path has no copies for it.
        zero["reduce_scatter"] = False
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": learner.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": learner.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on either side
        "steps_per_print": 1 << 40,
    }


def _parameters(policy: Policy) -> list[tuple[str, Any]]:
    """Names as in the checkpoint and parameters; a tied head is listed once, under the embedding's name."""
    return [(name.removeprefix("model."), parameter) for name, parameter in policy.named_parameters()]
