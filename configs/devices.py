"""Whether this node has the CUDA devices that a configuration names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config

COUNT_SECONDS = 120.0
"""What importing torch and asking the driver may take."""


def check_learner_devices(config: Config) -> None:
    """Raises ConfigError when ranks of the learner would find no CUDA device though they are to use one.

    Device numbers count those that CUDA_VISIBLE_DEVICES leaves, as the ranks do.
    """
    learner = config.learner
    chosen = learner.device == "cuda" or learner.gpus is not None
    if learner.device == "cpu" or not (chosen or learner.ranks > 1):
        return
    devices = count_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not devices:
        if learner.device == "cuda":
            raise ConfigError(["learner.device: value 'cuda', but torch finds no CUDA device; expected cpu or auto"])
        if learner.gpus is not None:
            raise ConfigError([_missing("learner.gpus", learner.gpus, devices)])
    elif learner.gpus is None and learner.ranks > devices:
        expected = f"expected at most {devices}: torch finds that many CUDA devices, and each rank has its own"
        raise ConfigError([f"learner.ranks: value {learner.ranks}, {expected}"])
    elif learner.gpus is not None and max(learner.gpus) >= devices:
        raise ConfigError([_missing("learner.gpus", learner.gpus, devices)])


def check_actor_devices(config: Config) -> None:
    """Raises ConfigError when `actor.gpus` names a CUDA device that this node doesn't have.

    Device numbers are the driver's own: CUDA_VISIBLE_DEVICES is replaced for each engine.
    """
    gpus = config.actor.gpus
    if gpus is not None and max(gpus, default=-1) >= (devices := count_devices(None)):
        raise ConfigError([_missing("actor.gpus", gpus, devices)])


def count_devices(visible: str | None) -> int:
    """CUDA devices that torch finds under CUDA_VISIBLE_DEVICES=`visible`; None: all of the node's.

    A process of its own looks, because what a process may see is settled when it looks first.
    """
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=COUNT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"counting CUDA devices ended with status {done.returncode}:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def _missing(key: str, gpus: Sequence[int], devices: int) -> str:
    expected = f"expected numbers below {devices}" if devices else "expected none"
    return f"{key}: value {list(gpus)}, {expected}: torch finds {devices or 'no'} CUDA devices on this node"
