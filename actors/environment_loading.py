"""Finding an environment's class and making its instance with what Lachesis decides about it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum
from pydantic import ValidationError

from lachesis_actors.environments import BUILT_IN
from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config, Environment

REQUESTS_AT_ONCE = 1 << 16
"""Atropos's own client polls once a second when it is at its limit; the tickets are the limit here."""

REQUEST_SECONDS = 1200


def load_environment(path: str, *, key: str) -> type[BaseEnv]:
    """The BaseEnv subclass that `path` names: a built-in, FILE.py with one such class, or FILE.py:Class.

    Raises ConfigError, naming `key`, when there is no such file or class, or more than one class to choose from.
    Whatever the file itself raises on import is raised.
    """
    if path in BUILT_IN:
        module = importlib.import_module(BUILT_IN[path])
        return _only_class(module, path, key)
    file, _, name = path.partition(":")
    if not file.endswith(".py"):
        near = difflib.get_close_matches(path, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        expected = f"one of {', '.join(BUILT_IN)}, FILE.py or FILE.py:Class"
        raise ConfigError([f"{key}: value {path!r}, expected {expected}{hint}"])
    if not Path(file).is_file():
        raise ConfigError([f"{key}: value {path!r}, expected a file that exists"])
    module = _import_file(Path(file).resolve())
    if not name:
        return _only_class(module, path, key)
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, BaseEnv)):
        raise ConfigError([f"{key}: value {path!r}, expected the name of a BaseEnv subclass in the file"])
    return found


def make_environment(
    kind: type[BaseEnv], environment: Environment, config: Config, *, url: str, model: Path, seed: int, folder: Path
) -> BaseEnv:
    """An instance of `kind` whose server is the gateway at `url` and whose tokenizer is that of the folder `model`.

    Its configuration is the class's own default, then `environment.options`, then what Lachesis decides; `seed` goes
    into a config field of that name unless the options set it. Relative paths of what Atropos itself may write (groups,
    evaluations) start at `folder`. Raises ConfigError for options that the class does not
    have, that do not fit, or that Lachesis decides.
    """
    own = _own_config(kind, environment, config, url=url, model=model, seed=seed, folder=folder)
    # A list, because a single config makes Atropos's client ignore base_url and look on ports of its own choice. The
    # type vllm serves what openai does, and tokens with log-probs besides.
    server = APIServerConfig(
        server_type="vllm",
        model_name=str(model),
        tokenizer_name=str(model),
        base_url=f"{url}/v1",
        api_key="x",
        health_check=False,
        timeout=REQUEST_SECONDS,
        num_max_requests_at_once=REQUESTS_AT_ONCE,
        num_requests_for_eval=REQUESTS_AT_ONCE,
    )
    try:
        return kind(config=own, server_configs=[server], slurm=False, testing=False)
    except ValueError as error:
        if str(error).partition(":")[0] not in type(own).model_fields:
            raise
        raise ConfigError([f"{_key(environment, config)}.{error}"]) from error


def check_options(kind: type[BaseEnv], environment: Environment, config: Config) -> None:
    """Raises ConfigError as `make_environment` does for options, as far as their names and values tell."""
    nowhere = "http://127.0.0.1:1"
    _own_config(kind, environment, config, url=nowhere, model=Path(config.model.path), seed=0, folder=Path())


def _own_config(
    kind: type[BaseEnv], environment: Environment, config: Config, *, url: str, model: Path, seed: int, folder: Path
) -> BaseEnvConfig:
    default = kind.config_init()[0]
    decided = _decided(environment, config, url=url, model=model)
    key = _key(environment, config)
    lines = [_unknown(key, name, value, default, decided) for name, value in environment.options.items()]
    if any(lines):
        raise ConfigError([line for line in lines if line])
    values = {**default.model_dump(), **environment.options, **decided}
    if "seed" in type(default).model_fields and "seed" not in environment.options:
        values["seed"] = seed
    for name in ("data_dir_to_save_evals", "data_path_to_save_groups"):
        if values[name] is not None:
            values[name] = str(folder / values[name])
    try:
        return type(default)(**values)
    except ValidationError as error:
        raise ConfigError([_invalid(key, e) for e in error.errors()]) from None


def _key(environment: Environment, config: Config) -> str:
    return f"environments.{config.environments.index(environment)}.options"


def _decided(environment: Environment, config: Config, *, url: str, model: Path) -> dict[str, Any]:
    return {
        "group_size": environment.group_size,
        "max_num_workers": environment.workers,
        "max_token_length": environment.max_token_length,
        "tokenizer_name": str(model),
        "rollout_server_url": url,
        "wandb_name": environment.name,
        "use_wandb": False,
        "batch_size": config.queue.batch_groups * environment.group_size,
        "total_steps": config.run.steps,
        "steps_per_eval": config.run.evaluate_every or -1,
        "eval_handling": EvalHandlingEnum.NONE,
        "max_batches_offpolicy": config.staleness.max + 1,
        "worker_timeout": -1,
        "ensure_scores_are_not_same": False,
        "min_batch_allocation": None,
        "inference_weight": 1.0,
    }


_INSTEAD = {
    "group_size": "group_size",
    "max_num_workers": "workers",
    "max_token_length": "max_token_length",
    "wandb_name": "name",
}


def _unknown(key: str, name: str, value: Any, default: BaseEnvConfig, decided: dict[str, Any]) -> str | None:
    where = f"{key}.{name}: value {value!r}"
    if name in decided:
        instead = f"; set {key.removesuffix('options')}{_INSTEAD[name]}" if name in _INSTEAD else ""
        return f"{where}, expected nothing: Lachesis decides it{instead}"
    known = type(default).model_fields
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected a field of {type(default).__name__}"
    return f"{where}, unknown key, {hint}"


def _invalid(key: str, error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    expected = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key}.{name}: value {error['input']!r}, expected {expected}"


def _import_file(file: Path) -> ModuleType:
    # The file may import its neighbours, as it may when it is run by itself.
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _only_class(module: ModuleType, path: str, key: str) -> type[BaseEnv]:
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, BaseEnv) and c.__module__ == module.__name__
    ]
    leaves = [c for c in own if not any(c in other.__mro__[1:] for other in own)]
    if len(leaves) == 1:
        return leaves[0]
    names = ", ".join(c.__name__ for c in leaves) or "none"
    raise ConfigError([f"{key}: value {path!r}, expected a file with one BaseEnv subclass; has {names}"])
