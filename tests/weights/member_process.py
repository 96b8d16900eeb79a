"""An actor without vLLM, for tests: the real weight client and real receiver threads around an engine that only copies.

Run as a program: python member_process.py CONFIG NAME FOLDER [STRIKE], where CONFIG is JSON. Prints one JSON line an
event. STRIKE is WHERE:SIGNAL: in the middle of the first transfer of at least STRIKE_BYTES by `collective`, `stream` it
sends itself that signal, after the event `struck`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trio

from lachesis_actors.weight_client import follow_weights
from lachesis_actors.weight_receiver import Receiver, open_receiver
from lachesis_configs.schema import Actor, Config, Engine, Run, Weights
from lachesis_transport.weights.collective import Group

STRIKE_BYTES = 4 << 20
UNTOUCHED = 0xA5


class CopyingEngine:
    """Serves a copy of the mirrors; obeys the calls that activation makes."""

    def __init__(self, folder: Path, *, workers: int) -> None:
        self.folder = folder
        self.workers = workers
        self.receivers: list[Receiver] = []
        self.served: list[Any] = []
        self.served_label = "default"
        self.paused = False
        self.calls: list[str] = []

    async def initialize_weights(self, info: dict[str, Any]) -> None:
        self.receivers = [open_receiver(self.folder, worker=i, **info) for i in range(self.workers)]
        self.served = [r.mirror.bits.copy() for r in self.receivers]

    async def pause(self, *, clear_cache: bool) -> None:
        self.calls.append(f"pause {clear_cache}")
        self.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def update_weights(self, version: int) -> None:
        assert self.paused
        self.calls.append(f"update {version}")
        for i, receiver in enumerate(self.receivers):
            with receiver.lock:
                assert receiver.version == version
                self.served[i] = receiver.mirror.bits.copy()
        self.served_label = str(version)

    async def label(self, version: int) -> None:
        self.calls.append(f"label {version}")
        self.served_label = str(version)

    async def current_label(self) -> str:
        return self.served_label

    def stop(self) -> None:
        for receiver in self.receivers:
            receiver.stop()


def member_config(
    address: str,
    *,
    workers: int,
    deadline: float,
    channel: Literal["auto", "stream"] = "auto",
    keys: Path | None = None,
    trusted_network: bool = False,
) -> Config:
    weights = Weights(
        address=address,
        channel="stream" if keys is not None and not trusted_network else "collective",
        trusted_network=trusted_network,
        deadline_seconds=deadline,
    )
    return Config(
        run=Run(keys=None if keys is None else str(keys)),
        weights=weights,
        actor=Actor(engine=Engine(tensor_parallel=workers), weights_channel=channel),
    )


def strike_in_the_middle(where: str, number: int, say: Callable[..., None]) -> None:
    """Send this process a signal once part of a large payload has come and part has not."""
    struck = False

    def strike() -> None:
        nonlocal struck
        struck = True
        say("struck", where=where)
        os.kill(os.getpid(), number)

    broadcast, chunk = Group.broadcast, Receiver._chunk

    def broadcast_and_strike(self: Group, buffer: np.ndarray, *, seconds: float) -> None:
        def watch() -> None:
            while not over.is_set():
                if (buffer[:64] != UNTOUCHED).any():
                    # A watcher that was held up too long leaves this transfer alone; the next one is as good.
                    if (buffer[-64:] == UNTOUCHED).all():
                        strike()
                    return

        over = threading.Event()
        if struck or len(buffer) < STRIKE_BYTES:
            broadcast(self, buffer, seconds=seconds)
            return
        buffer[:] = UNTOUCHED
        threading.Thread(target=watch, daemon=True).start()
        try:
            broadcast(self, buffer, seconds=seconds)
        finally:
            over.set()

    def chunk_and_strike(self: Receiver, message: dict[str, Any], frame: memoryview | None) -> dict[str, Any]:
        answer = chunk(self, message, frame)
        size = len(self._transfer.buffer)  # type: ignore[union-attr]
        if not struck and size >= STRIKE_BYTES and size // 3 < answer["received"] < size:
            strike()
        return answer

    if where == "collective":
        Group.broadcast = broadcast_and_strike  # type: ignore[method-assign]
    else:
        Receiver._chunk = chunk_and_strike  # type: ignore[method-assign]


def end_with_the_test() -> None:
    """Nobody holds the other end of stdin any more."""
    sys.stdin.read()
    os._exit(1)


async def main(settings: str, name: str, folder: str, strike: str = "never") -> None:
    config = Config.model_validate_json(settings)
    engine = CopyingEngine(Path(folder), workers=config.actor.engine.tensor_parallel)

    def say(kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)

    if strike != "never":
        where, number = strike.split(":")
        strike_in_the_middle(where, signal.Signals[number], say)
    threading.Thread(target=end_with_the_test, daemon=True).start()

    try:
        await follow_weights(
            config=config,
            actor=name,
            engine=engine,
            report=say,
            on_active=lambda version: say("active", version=version),
        )
        say("ended", label=engine.served_label)
    finally:
        engine.stop()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
