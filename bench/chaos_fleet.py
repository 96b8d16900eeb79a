"""The processes of a run that are killed, frozen and started again: the real queue, and a learner and actors without
engines."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lachesis_bench.chaos_history import newest_checkpoint
from lachesis_bench.chaos_learner import CHECKPOINT_EVERY, read_newest
from lachesis_configs.schema import Config
from lachesis_deploy.folder import placed, write_config

HEARTBEAT_SECONDS = 1.5
BATCH_GROUPS = 4
STALENESS_MAX = 4
CONFIG = Config.model_validate(
    {
        "run": {"name": "chaos", "steps": 1_000_000},
        "queue": {
            "address": "tcp://127.0.0.1:0",
            "batch_groups": BATCH_GROUPS,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
        },
        "weights": {"address": "tcp://127.0.0.1:0"},
        "staleness": {"max": STALENESS_MAX, "late_seconds": 5.0},
    }
)

QUEUE, LEARNER = "queue", "learner"
STALLED_SECONDS = 60.0
"""Nobody may take longer to get going again."""
POLL_SECONDS = 0.01
LAST_STEPS = 8 * CHECKPOINT_EVERY
"""Batches from the last checkpoint to the end of the run, once the driver has enough."""


class ChaosError(RuntimeError):
    """A process failed by itself, or the run stood still. Names the run folder, which stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One blow: after so many batches and then so many seconds, these processes are killed and started again."""

    batches: int
    seconds: float
    roles: tuple[str, ...]
    frozen_seconds: float | None = None
    """Not killed, but stopped for so long."""
    replaced: bool = False
    """Stopped until another process has taken over; what wakes then has to find that out and end."""


def plan(seed: int, *, kills: int, freezes: int, actors: Sequence[str], batches: tuple[int, int]) -> list[Strike]:
    """Random strikes with at least `kills` kills, evenly of queue, learner and actors, and `freezes` freezes.

    Most come once between `batches` batches were trained since the last one, a third while all still recover.
    """
    rng = random.Random(seed)

    def role(kind: str) -> str:
        return rng.choice(actors) if kind == "actor" else kind

    def strike(roles: tuple[str, ...], frozen: float | None = None) -> Strike:
        early = rng.random() < 1 / 3
        return Strike(
            batches=0 if early else rng.randint(*batches),
            seconds=rng.uniform(0.0, 1.0 if early else 0.2),
            roles=roles,
            frozen_seconds=frozen,
        )

    kinds: list[str] = []
    while len(kinds) < kills:
        kinds += rng.sample([QUEUE, LEARNER, "actor"], 3)
    strikes = []
    while kinds:
        kind = kinds.pop()
        roles = [role(kind)]
        if kinds and kinds[-1] != kind and rng.random() < 1 / 3:
            roles.append(role(kinds.pop()))
        strikes.append(strike(tuple(roles)))
    for i in range(freezes):
        kind, replaced = ((LEARNER, True), ("actor", False), (QUEUE, False), (LEARNER, False))[i % 4]
        frozen = strike((role(kind),), rng.uniform(1.2, 1.6) * HEARTBEAT_SECONDS)
        strikes.insert(rng.randint(1, len(strikes)), replace(frozen, replaced=replaced))
    return strikes


class Fleet:
    """The processes of one run folder. `open_fleet` makes it."""

    def __init__(self, folder: Path, *, actors: int, seed: int) -> None:
        self.folder = folder
        self.actors = [f"actor-{i}" for i in range(actors)]
        self.kills = self.freezes = 0
        self._seed = seed
        self._configure(placed(CONFIG, folder, folder))
        self._ending = False
        self.address = self._config.queue.address
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._superseded: list[subprocess.Popen[bytes]] = []

    def start(self, role: str) -> None:
        """Start `role` now."""
        place = [self.address, str(self.folder)]
        if role == QUEUE:
            command = ["lachesis", "queue", str(self.folder / "config.yaml"), "--folder", str(self.folder)]
        elif role == LEARNER:
            command = ["lachesis_bench.chaos_learner", *place, str(self._seed)]
        else:
            command = ["lachesis_bench.chaos_actor", *place, role, str(self._seed)]
        with (self.folder / f"{role}.log").open("ab") as log:
            self._processes[role] = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)

    def strike(self, strike: Strike) -> None:
        """Wait for the moment of `strike`, and strike."""
        goal = self.version + strike.batches
        self.wait(lambda: self.version >= goal, f"{strike.batches} batches")
        time.sleep(strike.seconds)
        self._check()
        if strike.frozen_seconds is None:
            self.kill(strike.roles)
            return
        [role] = strike.roles
        frozen = self._processes[role]
        frozen.send_signal(signal.SIGSTOP)
        if strike.replaced:
            self._superseded.append(frozen)
            self.start(role)
            taken_over = self.version + 2
            self.wait(lambda: self.version >= taken_over, f"another {role}")
        else:
            time.sleep(strike.frozen_seconds)
        frozen.send_signal(signal.SIGCONT)
        if strike.replaced:
            self.wait(lambda: frozen.poll() is not None, f"the end of the {role} that was replaced")
            if not frozen.returncode:
                raise ChaosError(f"{self.folder}: a {role} that was replaced ended well, expected a refusal")
        self.freezes += 1

    def kill(self, roles: Sequence[str]) -> None:
        """kill -9 those of `roles` that have not ended, and start them again."""
        running = [role for role in roles if self._processes[role].poll() is None]
        for role in running:
            self._processes[role].kill()
        for role in running:
            if self._processes[role].wait() == -signal.SIGKILL:
                self.kills += 1
                self.start(role)

    @property
    def version(self) -> int:
        """The newest version that the actors may serve; -1 before the first."""
        newest = read_newest(self.folder)
        return -1 if newest is None else newest

    def pid(self, role: str) -> int:
        """The process of `role`."""
        return self._processes[role].pid

    def wait(self, done: Callable[[], bool], what: str, *, seconds: float = STALLED_SECONDS) -> None:
        """Wait until `done`, while every process lives. Raises ChaosError when one ends, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not done():
            self._check()
            if time.monotonic() > deadline:
                raise ChaosError(f"{self.folder}: waited {seconds:g} s for {what}, at version {self.version}")
            time.sleep(POLL_SECONDS)

    def finish(self, last: Strike | None = None) -> None:
        """Bring the queue back with an end of the run in sight, strike once more and wait for that end."""
        checkpoint = newest_checkpoint(self.folder)
        steps = LAST_STEPS + (checkpoint.step if checkpoint else 0)
        self._configure(self._config.model_copy(update={"run": self._config.run.model_copy(update={"steps": steps})}))
        self._ending = True
        self.kill([QUEUE])
        if last is not None:
            self.strike(last)
        # An actor that is killed at the very end may find no queue any more, and waits for one.
        self.wait(lambda: self._processes[QUEUE].poll() is not None, "the end of the run")

    def _configure(self, config: Config) -> None:
        self._config = config
        write_config(config, self.folder)

    def _check(self) -> None:
        for role, process in self._processes.items():
            code = process.poll()
            if code is not None and (code != 0 or not self._ending):
                log = (self.folder / f"{role}.log").read_text(errors="replace")
                raise ChaosError(f"{self.folder}: {role} ended with {code}: {log[-2000:]}")

    def close(self) -> None:
        """End every process that is left."""
        processes = [*self._processes.values(), *self._superseded]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def open_fleet(folder: Path, *, actors: int, seed: int) -> Iterator[Fleet]:
    """A fleet that runs: the learner has trained a batch. On exit none of its processes is left."""
    fleet = Fleet(folder, actors=actors, seed=seed)
    try:
        for role in (QUEUE, LEARNER, *fleet.actors):
            fleet.start(role)
        fleet.wait(lambda: fleet.version > 0, "the first batch")
        yield fleet
    finally:
        fleet.close()
