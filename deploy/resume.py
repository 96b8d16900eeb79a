"""Going on with a run in its folder: which one it is, whether anything is left to do, and what may have changed."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.schema import Config
from lachesis_deploy.audit import lasting
from lachesis_deploy.folder import CONFIG, METRICS, check_unused, default_folder, earlier_folders
from lachesis_deploy.records import number, numbers, of_kind, read_all, read_json
from lachesis_learner.checkpoint import FOLDER as CHECKPOINTS
from lachesis_learner.checkpoint import RECORD
from lachesis_transport.database import peek
from lachesis_transport.queue_files import DATABASE, EVENTS, STATISTICS
from lachesis_transport.store import StoreError

logger = logging.getLogger("lachesis.launch")

FIXED = {
    "run.seed": "the queue numbers the prompts that it gives",
    "model.path": "the checkpoints are of that model",
    "queue.batch_groups": "the queue has promised places in batches of that size",
    "staleness.max": "the queue has promised deadlines under that bound",
    "staleness.reuse": "the queue has promised places for that many uses of a group",
    "learner.ranks": "the optimizer's state is split over as many",
    "learner.precision": "the optimizer's state is for it",
    "learner.betas": "they are part of the optimizer's state",
    "learner.weight_decay": "it is part of the optimizer's state",
}
"""Keys that hold for the whole run, and why."""

PROMPTS = ("path", "options")
"""What an environment of one name keeps: the queue remembers by number which of its prompts are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The run that a launch goes on with."""

    folder: Path
    holds: str | None
    """What it has to go on from (`holdings`); None when it got nowhere."""
    passed_over: tuple[str, ...] = ()
    """A line for each newer folder, newest first, that has nothing to go on from."""


def run_to_resume(config: Config, config_path: str) -> Resumption:
    """The newest run of `config` that has anything to go on from: NAME or the highest such of NAME-2, NAME-3, ...

    When none has, the newest that has a queue's state. A configuration that lies in a run folder means the run there.
    Raises ConfigError when there is nothing to resume, when a newer folder is in use by another launch, or when a newer
    run was trained but has lost its queue's state: to go on with an older one, its own configuration has to be given.
    """
    wanted = default_folder(config)
    inside = Path(config_path).resolve() == (wanted / CONFIG).resolve()
    folders = [wanted] if inside else list(earlier_folders(wanted))
    passed_over: list[str] = []
    got_nowhere: list[Resumption] = []
    for folder in reversed(folders):
        holds, database = holdings(folder), folder / DATABASE
        if holds is not None and not database.is_file():
            instead = f"an older run goes on by its own file, OLDER/{CONFIG}"
            raise ConfigError([f"--resume: {database} is missing though {folder} {holds}, expected it; {instead}"])
        found = Resumption(folder=folder, holds=holds, passed_over=tuple(passed_over))
        if holds is not None:
            return found
        check_unused(folder)  # a launch that runs there may be about to train
        if database.is_file():
            got_nowhere.append(found)
        why = "nothing was trained in it" if database.is_file() else f"it holds no {DATABASE}"
        passed_over.append(f"passed over {folder}: {why}")
    if got_nowhere:
        return got_nowhere[0]
    missing = f"holds no {DATABASE}" if folders else "is not there"
    expected = "expected the folder of a run; without --resume a new one starts"
    raise ConfigError([f"--resume: {wanted} {missing}, {expected}"])


def holdings(folder: Path) -> str | None:
    """How far the run in `folder` got, as a phrase with a verb: steps, a checkpoint or groups. None: nowhere."""
    if trained := max(numbers(lasting(read_all(folder / METRICS)), "step"), default=0):
        return f"is trained up to step {trained:.0f}"
    if any((folder / CHECKPOINTS).glob(f"[0-9]*/{RECORD}")):
        return "has a checkpoint"
    try:
        groups = len(peek(folder / DATABASE).contents)
    except StoreError as error:
        logger.debug("%s", error)  # there is none, or its launch ended while it was made
        return None
    return f"has groups to train ({groups})" if groups else None


def nothing_left(config: Config, folder: Path) -> bool:
    """Whether the run in `folder` has finished with all the steps of `config`."""
    queue = read_json(folder / STATISTICS) or {}
    return queue.get("finished") is True and (number(queue, "step") or 0) >= config.run.steps


def not_evaluated(folder: Path) -> list[str]:
    """Lines about the environments that were evaluated in the finished run in `folder`, but not at its final version,
    and the command that evaluates it; [] when there are none."""
    final = number(read_json(folder / STATISTICS) or {}, "final")
    if final is None:
        return []
    versions: dict[str, set[Any]] = {}
    for event in of_kind(read_all(folder / EVENTS), "evaluation"):
        versions.setdefault(str(event.get("environment")), set()).add(event.get("version"))
    lines = [
        f"{environment} was not evaluated at version {final:.0f}, the final one, before the run was ended"
        for environment, evaluated in versions.items()
        if final not in evaluated
    ]
    checkpoint = folder / CHECKPOINTS / f"{final:08.0f}"
    if lines and checkpoint.is_dir():
        changes = [f"model.path={checkpoint}", f"run.folder={folder}-evaluation", "run.steps=1"]
        command = shlex.join(["lachesis", "launch", str(folder / CONFIG), *changes])
        lines.append(f"`{command}` evaluates those weights, as its version 0, before it trains one step")
    return lines


def check_resumable(config: Config, folder: Path) -> None:
    """Raises ConfigError with a line for each key of `config` (resolved) that the run in `folder` cannot change."""
    before = load_config(folder / CONFIG)
    lines = [
        f"{key}: value {new!r}, expected {old!r} to resume {folder}: {why}"
        for key, old, new, why in _changes(before, config)
        if old != new
    ]
    trained = max(numbers(lasting(read_all(folder / METRICS)), "step"), default=0)
    if config.run.steps < trained:
        expected = f"expected {trained:.0f} or more to resume {folder}: so many are trained"
        lines.append(f"run.steps: value {config.run.steps}, {expected}")
    if lines:
        raise ConfigError(lines)


def _changes(before: Config, after: Config) -> Iterator[tuple[str, Any, Any, str]]:
    for key, why in FIXED.items():
        section, name = key.split(".")
        yield key, getattr(getattr(before, section), name), getattr(getattr(after, section), name), why
    known = {environment.name: environment for environment in before.environments}
    for i, environment in enumerate(after.environments):
        if environment.name in known:
            for name in PROMPTS:
                why = f"the queue knows which prompts of {environment.name} are used"
                yield (
                    f"environments.{i}.{name}",
                    getattr(known[environment.name], name),
                    getattr(environment, name),
                    why,
                )
