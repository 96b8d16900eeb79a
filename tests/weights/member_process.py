"""An actor without vLLM, for tests: the real weight client and real receiver threads around an engine that only copies.

Run as a program: python member_process.py ADDRESS NAME FOLDER WORKERS DEADLINE. Prints one JSON line an event.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trio

from lachesis_actors.weight_client import follow_weights
from lachesis_actors.weight_receiver import Receiver, open_receiver
from lachesis_configs.schema import Actor, Config, Engine, Weights


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


def member_config(address: str, *, workers: int, deadline: float) -> Config:
    return Config(
        weights=Weights(address=address, deadline_seconds=deadline),
        actor=Actor(engine=Engine(tensor_parallel=workers)),
    )


async def main(address: str, name: str, folder: str, workers: str, deadline: str) -> None:
    engine = CopyingEngine(Path(folder), workers=int(workers))

    def say(kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)

    try:
        await follow_weights(
            config=member_config(address, workers=int(workers), deadline=float(deadline)),
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
