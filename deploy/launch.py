"""`lachesis launch`: the whole of a run on this node, from the configuration to the report."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import trio

from lachesis_actors.environment_check import check_environments
from lachesis_actors.environments import BUILT_IN
from lachesis_configs.devices import check_actor_devices, check_learner_devices
from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Config
from lachesis_deploy.audit import lasting
from lachesis_deploy.folder import (
    CONFIG,
    LOGS,
    METRICS,
    REPORT,
    SUMMARY,
    default_folder,
    fresh_folder,
    locked,
    placed,
    write_config,
    write_whole,
)
from lachesis_deploy.panel import show_progress
from lachesis_deploy.processes import Command
from lachesis_deploy.records import numbers, read_all, read_json
from lachesis_deploy.resume import check_resumable, holdings, not_evaluated, nothing_left, run_to_resume
from lachesis_deploy.summary import Summary, summarise
from lachesis_deploy.supervisor import GRACE_SECONDS, RoleFailed, supervise
from lachesis_transport.keys import load_keys
from lachesis_transport.queue_files import EVENTS, STATISTICS

logger = logging.getLogger("lachesis.launch")


def launch(config_path: str, overrides: Sequence[str] = (), *, resume: bool = False) -> int:
    """Run queue, learner and actors on this node until the run is finished; returns the exit code.

    0: finished, summary.json and report.html are written. 1: a role failed, which is named with the end of its log.
    128 + n: stopped by signal n. Whatever the code, no process of the run is left.

    Args:
        config_path: the YAML file.
        overrides: key=value on top of it.
        resume: go on with the newest run in its folder, instead of starting one in a folder of its own.

    Raises ConfigError for a wrong configuration, a taken address, a folder that is no run's or a change that the run
    to be resumed cannot take.
    """
    config = load_config(config_path, overrides)
    again = shlex.join(["lachesis", "launch", config_path, *overrides, "--resume"])
    if not resume:
        config, folder = _prepared(config)
        with locked(folder):
            return _run(config, folder, again)
    found = run_to_resume(config, config_path)
    folder = found.folder
    with locked(folder):
        for line in found.passed_over:
            print(line)
        if nothing_left(config, folder):
            print(f"{folder} has finished: all {config.run.steps} steps of run.steps are trained, nothing is left")
            for line in not_evaluated(folder):
                print(line)
            close_run(folder)  # who ended the launch may have done so before the summary
            return 0
        got_to = f"which {found.holds}" if found.holds else "which got nowhere yet: it begins with step 1"
        print(f"going on with {folder}, {got_to}")
        return _run(_prepared_again(config, folder), folder, again)


def _run(config: Config, folder: Path, again: str) -> int:
    """Run in `folder`; `again` is the command that would go on with it."""
    logs = folder / LOGS
    logs.mkdir(exist_ok=True)
    print(f"run folder {folder} (logs in {logs})", flush=True)
    commands = role_commands(config, write_config(config, folder))
    try:
        stopped_by = trio.run(run_roles, config, folder, commands)
    except RoleFailed as error:
        print(
            f"lachesis launch: {error}\nThe other roles were ended. {_next(folder, again)}", file=sys.stderr, flush=True
        )
        return 1
    if stopped_by is not None:
        print(f"stopped. {_next(folder, again)}", flush=True)
        return 128 + stopped_by
    close_run(folder)
    return 0


def _next(folder: Path, again: str) -> str:
    """What to do about a run that was ended."""
    holds = holdings(folder)
    if holds is None:
        return f"Nothing was trained in {folder}: start anew."
    return f"{folder} {holds}: `lachesis report {folder}` shows what was done, `{again}` goes on from there."


def role_commands(config: Config, config_path: Path) -> list[Command]:
    """What `launch` starts: the commands that a user would type."""
    # The interpreter that runs this one, so that a launch needs no PATH.
    program = (sys.executable, "-m", "lachesis")
    return [
        Command(role="queue", argv=(*program, "queue", str(config_path)), ends_last=True),
        Command(role="learner", argv=(*program, "learner", str(config_path))),
        *(
            Command(role=f"actor-{i}", argv=(*program, "actor", str(config_path), "--index", str(i)))
            for i in range(config.actor.count)
        ),
    ]


async def run_roles(
    config: Config, folder: Path, commands: Sequence[Command], *, grace_seconds: float = GRACE_SECONDS
) -> int | None:
    """Supervise `commands` and show their progress; returns the signal that stopped them, None at the regular end.

    The first SIGINT or SIGTERM ends the roles in order, a second one at once. Raises RoleFailed.
    """
    hurry = trio.Event()
    stopped: list[int] = []
    failed: list[RoleFailed] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def listen(roles: trio.CancelScope, signals: AsyncIterator[int]) -> None:
                async for number in signals:
                    if stopped:
                        hurry.set()
                    else:
                        stopped.append(number)
                        print("stopping all roles (once more kills them)", flush=True)
                        roles.cancel()

            with trio.CancelScope() as roles:
                nursery.start_soon(listen, roles, signals)
                nursery.start_soon(show_progress, config, folder)
                try:
                    await supervise(
                        commands,
                        logs=folder / LOGS,
                        finished=run_finished(config, folder),
                        hurry=hurry,
                        grace_seconds=grace_seconds,
                    )
                except RoleFailed as error:
                    failed.append(error)
            nursery.cancel_scope.cancel()
    if failed and not stopped:
        raise failed[0]
    return stopped[0] if stopped else None


def run_finished(config: Config, folder: Path) -> Callable[[], bool]:
    """A function that tells whether the run's last step has been trained."""
    return lambda: max(numbers(read_all(folder / METRICS), "step"), default=0) >= config.run.steps


def close_run(folder: Path) -> Summary:
    """Write summary.json and report.html of a run folder and print what matters. Raises ConfigError."""
    # matplotlib is slow to import and only wanted here.
    from lachesis_deploy.report import render_report

    if not folder.is_dir():
        raise ConfigError([f"{folder}: no such folder, expected the folder of a run"])
    config_path = folder / CONFIG
    config = load_config(config_path) if config_path.exists() else None
    metrics, events, queue = (
        lasting(read_all(folder / METRICS)),
        read_all(folder / EVENTS),
        read_json(folder / STATISTICS),
    )
    if not metrics and not events:
        raise ConfigError([f"{folder}: has neither {METRICS} nor {EVENTS}, expected the folder of a run"])
    summary = summarise(
        metrics,
        events,
        queue,
        staleness_bound=config.staleness.max if config else None,
        reuse=config.staleness.reuse if config else 1,
    )
    write_whole(folder / SUMMARY, summary.to_json())
    name = config.run.name if config else folder.name
    write_whole(folder / REPORT, render_report(name, summary, metrics, events))
    summary.print()
    for name in (SUMMARY, REPORT, METRICS, EVENTS):
        print(f"  {folder / name}")
    return summary


def _prepared(config: Config) -> tuple[Config, Path]:
    """`config` as it is run, in a folder of its own."""
    model = _checked(config)
    wanted = default_folder(config)
    folder = fresh_folder(wanted)
    if folder != wanted:
        print(f"{wanted} holds an earlier run")
    return placed(config, folder, model), folder


def _prepared_again(config: Config, folder: Path) -> Config:
    """`config` as it is run in the folder of the run that it continues."""
    config = placed(config, folder, _checked(config))
    check_resumable(config, folder)
    return config


def _checked(config: Config) -> Path:
    """The model's folder, once everything that can be wrong with `config` on this node has been looked at."""
    # Ports first and the folder last: a launch that cannot start converts no model and leaves no empty folder.
    placed(config, Path(), Path())
    if (keys := load_keys(config)) is not None:
        keys.check()
    for i, environment in enumerate(config.environments):
        file = environment.path.partition(":")[0]
        if environment.path not in BUILT_IN and not Path(file).is_file():
            expected = f"one of {', '.join(BUILT_IN)} or a file that exists"
            raise ConfigError([f"environments.{i}.path: value {environment.path!r}, expected {expected}"])
    check_learner_devices(config)
    check_actor_devices(config)
    check_environments(config)
    return resolve_model(config.model.path)
