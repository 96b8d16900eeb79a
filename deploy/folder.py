"""The run folder: which one a run takes, what lies in it, and the ports that its roles need."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lachesis_configs.load import ConfigError, dump_config
from lachesis_configs.schema import Config

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
LOGS = "logs"
LOCK = ".launch.lock"

CHOSEN_PORTS = (20000, 32000)
"""Where port 0 is looked for."""


def default_folder(config: Config) -> Path:
    """`run.folder`, or runs/NAME."""
    return Path(config.run.folder) if config.run.folder else Path("runs") / config.run.name


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted`-2, -3, ... that does not exist or is empty. Makes it.

    Raises ConfigError when that cannot be.
    """
    for folder in _numbered(wanted):
        if not folder.is_dir() or not any(folder.iterdir()):
            make_folder(folder)
            return folder
    raise AssertionError("count ends never")


def make_folder(folder: Path, *, key: str = "run.folder") -> None:
    """Make the run folder, if need be. Raises ConfigError, naming `key`, when there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "expected a folder, or a path where one can be made"
        raise ConfigError([f"{key}: value {str(folder)!r}, {expected} ({error.strerror})"]) from None


def earlier_folders(wanted: Path) -> Iterator[Path]:
    """`wanted`, `wanted`-2, -3, ..., as long as they exist."""
    return itertools.takewhile(Path.is_dir, _numbered(wanted))


def _numbered(wanted: Path) -> Iterator[Path]:
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only launch in `folder` until the block or the process ends. Raises ConfigError while there is one."""
    with (folder / LOCK).open("w") as file:
        _lock(file, folder)
        yield


def check_unused(folder: Path) -> None:
    """Raises ConfigError while a launch is in `folder`; makes no file there."""
    with suppress(FileNotFoundError), (folder / LOCK).open("rb") as file:
        _lock(file, folder)


def _lock(file: IO[Any], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError([f"{folder}: another launch runs in it, expected it to have ended"]) from None


def placed(config: Config, folder: Path, model: Path) -> Config:
    """`config` as it is run: in `folder`, with `model` and the keys found and every port 0 replaced by a free one.

    Raises ConfigError naming the key when an address is taken or is not on this node.
    """
    addresses = {"queue.address": config.queue.address, "weights.address": config.weights.address}
    if config.queue.metrics_address is not None:
        addresses["queue.metrics_address"] = config.queue.metrics_address
    queue, weights, *_ = _free(addresses)
    if config.actor.port:
        _free({f"actor.port + {i}": f"tcp://127.0.0.1:{config.actor.port + i}" for i in range(config.actor.count)})
    keys = None if config.run.keys is None else str(Path(config.run.keys).resolve())
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": str(folder.resolve()), "keys": keys}),
            "model": config.model.model_copy(update={"path": str(model.resolve())}),
            "queue": config.queue.model_copy(update={"address": queue}),
            "weights": config.weights.model_copy(update={"address": weights}),
        }
    )


def _free(addresses: dict[str, str]) -> list[str]:
    """Check that every address can be bound now, all at once; port 0 becomes the port that the kernel chose."""
    found, sockets, lines = [], [], []
    try:
        for key, address in addresses.items():
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            try:
                probe = _listener(host, int(port)) if int(port) else _listener_anywhere(host)
            except (OSError, OverflowError) as error:
                reason = "in use" if getattr(error, "errno", None) == errno.EADDRINUSE else str(error)
                lines.append(f"{key}: {address} is {reason}, expected a free address of this node")
                continue
            sockets.append(probe)
            found.append(f"tcp://{host}:{probe.getsockname()[1]}")
    finally:
        for probe in sockets:
            probe.close()
    if lines:
        raise ConfigError(lines)
    return found


def _listener(host: str, port: int) -> socket.socket:
    probe = socket.socket()
    try:
        # Listeners set this too: connections of an earlier run that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        # Two bound sockets with SO_REUSEADDR collide only when they listen.
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


def _listener_anywhere(host: str) -> socket.socket:
    """A free port outside the range from which the kernel serves connections: it is bound only later, by its role."""
    for _ in range(1000):
        try:
            return _listener(host, random.randint(*CHOSEN_PORTS))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "without a free port", host)


def write_config(config: Config, folder: Path) -> Path:
    """Write the resolved configuration into the run folder, whole or not at all."""
    return write_whole(folder / CONFIG, dump_config(config))


def write_whole(path: Path, text: str) -> Path:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names none
        with suppress(OSError):
            part.unlink()
        raise
    return path
