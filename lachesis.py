"""The command line: one verb a role, and what surrounds a run.

A mistake of the user (a wrong configuration, an address in use, a missing file) is one clear line and exit code 2; a
failed run is exit code 1; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from lachesis_configs.schema import Config

USER_ERROR = 2
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

EPILOG = """\
Roles find each other by the addresses in CONFIG and wait for each other: start them in any order.
Overrides are dotted keys on top of the file: learner.lr=1e-6 environments.0.workers=4
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    # Models come from folders; nothing is looked up on a network unless the user says so.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = _parsed(arguments)
    start_logging(options.verb)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        raise
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except BaseException as error:
        lines, code = user_error(error), USER_ERROR
        if not lines:
            traceback.print_exception(error)
            # Last, since whoever looks at the end of a log wants the cause and not a frame of trio's.
            lines, code = [f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(error)], 1
        for line in lines:
            print(f"lachesis {options.verb}: {line}", file=sys.stderr)
        return code


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options. argparse takes key=value only before the first --option; here they may come anywhere."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(r.startswith("-") or "=" not in r for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"value {text!r}, expected a whole number of 0 or more")
    return int(text)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of errors, however deep."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


def user_error(error: BaseException) -> list[str]:
    """The lines that tell a user what was wrong; empty when `error`, or a part of it, is not a user's mistake."""
    from lachesis_configs.load import ConfigError
    from lachesis_transport.store import StoreError

    if isinstance(error, BaseExceptionGroup):
        parts = [user_error(part) for part in error.exceptions]
        return [line for part in parts for line in part] if all(parts) else []
    if isinstance(error, ConfigError):
        return list(error.lines)
    if isinstance(error, StoreError):
        return [str(error)]
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return [f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)]
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return [getattr(error, "strerror", None) or str(error)]
    paths = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
    if isinstance(error, paths):
        return [f"{error.filename}: {error.strerror}"] if error.filename else []
    return []


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the time: the live panel takes its place to keep other lines above itself."""

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    @stream.setter
    def stream(self, _: object) -> None:
        pass


def _log_level(name: str) -> int:
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise SystemExit(f"lachesis: LACHESIS_LOG: value {name!r}, expected one of {', '.join(levels)}")
    return levels[name.upper()]


def start_logging(role: str) -> None:
    """Log to stderr, one line each: time, role, message."""
    logging.basicConfig(
        handlers=[_ToStderr()],
        level=_log_level(os.environ.get("LACHESIS_LOG", "INFO")),
        format=f"%(asctime)s {role}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("httpx", "httpcore", "matplotlib", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _launch(options: argparse.Namespace) -> int:
    from lachesis_deploy.launch import launch

    return launch(options.config, options.overrides, resume=options.resume)


def _queue(options: argparse.Namespace) -> int:
    from lachesis_deploy.folder import write_config
    from lachesis_transport.broker import serve_queue

    if options.inspect or options.export_to or options.import_from:
        return _look_at_queue(options)
    if options.json:
        print("lachesis queue: --json goes with --inspect", file=sys.stderr)
        return USER_ERROR
    config, folder = _role(options)
    # What the queue runs with holds for the run: whoever reads the folder later finds it there. But only a queue that
    # got the folder for itself runs.
    return _until_done(partial(serve_queue, opened=partial(write_config, config, folder)), config, folder)


def _look_at_queue(options: argparse.Namespace) -> int:
    from lachesis_deploy.exchange import export_groups, import_groups
    from lachesis_deploy.inspection import print_inspection

    config, folder = _located(options)
    if options.inspect:
        return print_inspection(config, folder, as_json=options.json)
    if options.json:
        print("lachesis queue: --json goes with --inspect", file=sys.stderr)
        return USER_ERROR
    if options.export_to:
        return export_groups(folder, options.export_to)
    return import_groups(config, folder, options.import_from)


def _learner(options: argparse.Namespace) -> int:
    from lachesis_configs.devices import check_learner_devices
    from lachesis_learner.learner import run_learner
    from lachesis_transport.client import QueueError

    config, folder = _role(options)
    if not options.rank:
        check_learner_devices(config)
    try:
        return run_learner(config, folder, rank=options.rank, replay=options.replay)
    except QueueError as error:  # another learner took over, say
        print(f"lachesis learner: {error}", file=sys.stderr)
        return 1


def _actor(options: argparse.Namespace) -> int:
    from lachesis_actors.actor import run_actor
    from lachesis_configs.devices import check_actor_devices

    start_logging(f"actor-{options.index}")
    config, folder = _role(options)
    check_actor_devices(config)
    return _until_done(run_actor, config, folder, options.index)


def _environment(options: argparse.Namespace) -> int:
    from lachesis_actors.environment_runner import run_environment
    from lachesis_configs.load import ConfigError

    start_logging(f"environment {options.name}")
    config, folder = _role(options)
    chosen = [e for e in config.environments if options.name in (None, e.name)]
    if not chosen:
        names = ", ".join(e.name for e in config.environments)
        raise ConfigError([f"--name: value {options.name!r}, expected one of {names}"])
    return run_environment(config, chosen[0], options.url, folder)


def _status(options: argparse.Namespace) -> int:
    from lachesis_configs.load import load_config
    from lachesis_deploy.status import print_status
    from lachesis_transport.keys import load_keys

    config = load_config(options.config, options.overrides)
    return print_status(config.queue.address, load_keys(config))


def _keys(options: argparse.Namespace) -> int:
    from lachesis_transport.keys import guide, make_keys

    made = make_keys(options.folder, options.client)
    print("\n".join([*map(str, made), "", guide(options.folder, options.client)]))
    return 0


def _validate(options: argparse.Namespace) -> int:
    from lachesis_configs.load import dump_config, load_config

    print(dump_config(load_config(options.config, options.overrides)), end="")
    return 0


def _report(options: argparse.Namespace) -> int:
    from lachesis_deploy.launch import close_run

    close_run(options.folder)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from lachesis_bench.figures import run_benches

    return run_benches(options.name, length=options.length, as_json=options.json)


def _role(options: argparse.Namespace) -> tuple[Config, Path]:
    """The resolved configuration and the run folder, which is made if need be."""
    from lachesis_deploy.folder import make_folder

    config, folder = _located(options)
    make_folder(folder, key="--folder" if options.folder else "run.folder")
    return config, folder


def _located(options: argparse.Namespace) -> tuple[Config, Path]:
    """The resolved configuration and where the run folder is, or would be."""
    from lachesis_configs.load import load_config
    from lachesis_deploy.folder import default_folder

    config = load_config(options.config, [*options.overrides, *options.set])
    return config, options.folder or default_folder(config)


def _until_done(role: Callable[..., Awaitable[None]], *arguments: object) -> int:
    """Run an asynchronous role to its end, or until SIGTERM (exit code 0) or Ctrl-C (130) asks it to stop."""
    import trio

    stopped: list[int] = []

    async def listen(scope: trio.CancelScope, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            stopped.append(number)
            scope.cancel()

    async def run() -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen, nursery.cancel_scope, signals)
                await role(*arguments)
                nursery.cancel_scope.cancel()

    trio.run(run)
    return 128 + signal.SIGINT if signal.SIGINT in stopped else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lachesis",
        description="Asynchronous off-policy reinforcement learning of language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        described = text[0].upper() + text[1:] + "."
        added = verbs.add_parser(name, help=text, description=described, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    def configured(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        added.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="dotted keys that override the file"
        )
        return added

    def role(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = configured(verb(name, run, text))
        added.add_argument("--set", action="append", default=[], metavar="key=value", help="the same as key=value")
        added.add_argument(
            "--folder", type=Path, metavar="FOLDER", help="run folder (default: run.folder or runs/NAME)"
        )
        return added

    added = configured(verb("launch", _launch, "run queue, learner and actors on this node, to the end"))
    added.add_argument("--resume", action="store_true", help="go on with the newest run in its folder")
    added = role("queue", _queue, "the replay queue")
    instead = added.add_mutually_exclusive_group()
    instead.add_argument(
        "--inspect", action="store_true", help="show what the queue, running or stopped, holds and does"
    )
    added.add_argument("--json", action="store_true", help="with --inspect: as one JSON object")
    instead.add_argument(
        "--export", dest="export_to", type=Path, metavar="FILE", help="write the groups that the queue holds to a file"
    )
    instead.add_argument(
        "--import",
        dest="import_from",
        type=Path,
        metavar="FILE",
        help="put the groups of a file into the running queue",
    )
    added = role("learner", _learner, "the learner, with all its ranks")
    added.add_argument("--rank", type=int, default=0, help="rank to run (set by rank 0 for the others)")
    added.add_argument("--replay", type=Path, metavar="FILE", help="train recorded batches instead of leasing")
    added = role("actor", _actor, "one rollout actor: engine, gateway, environments")
    added.add_argument("--index", type=_whole, default=0, help="number of this actor among its fleet (default 0)")
    added = role("environment", _environment, "one environment against an actor that runs")
    added.add_argument("--name", help="name of the environment in CONFIG (default: its first)")
    added.add_argument("--url", required=True, help="address of the actor, http://127.0.0.1:PORT")
    configured(verb("status", _status, "ask the queue of a run how it is doing"))
    configured(verb("validate", _validate, "check a configuration and print it in full"))
    added = verb("keys", _keys, "make the keys that roles on several nodes know each other by")
    added.add_argument("folder", type=Path, metavar="FOLDER", help="new folder for them (run.keys)")
    added.add_argument("--client", metavar="NAME", help="add one more client's keys to the folder of a fleet")
    added = verb("report", _report, "write summary.json and report.html of a run folder, also while it runs")
    added.add_argument("folder", type=Path, metavar="FOLDER", help="run folder")
    added = verb("bench", _bench, "measure hot paths against their limits")
    added.add_argument("name", metavar="NAME", help=f"one of {', '.join(_benches())}, all")
    length = added.add_mutually_exclusive_group()
    length.add_argument("--short", dest="length", action="store_const", const="short", help="seconds")
    length.add_argument("--long", dest="length", action="store_const", const="long", help="minutes, smaller spread")
    added.add_argument("--json", action="store_true", help="one JSON object a figure and line")
    added.set_defaults(length="normal")
    return parser


def _benches() -> list[str]:
    from lachesis_bench.figures import bench_names

    return bench_names()


if __name__ == "__main__":
    sys.exit(main())
