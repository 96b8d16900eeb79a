"""What a run loses when its processes are killed at random: nothing that was acknowledged, and nothing is trained twice
or too old.

Real processes and files: the queue that `lachesis queue` starts, a learner and actors that do everything but compute. A
seeded driver kills -9 and freezes them and starts them again; what happened is read from the files that they leave.
A second run without kills is flooded with malformed frames.

python -m lachesis_bench.chaos --seed 7 --kills 30 repeats one run with kills.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lachesis_bench.chaos_fleet import BATCH_GROUPS, QUEUE, STALENESS_MAX, ChaosError, Fleet, Strike, open_fleet, plan
from lachesis_bench.chaos_history import Verdict, judge, read_history
from lachesis_bench.chaos_learner import CHECKPOINT_EVERY
from lachesis_bench.figures import Figure, Length
from lachesis_transport.queue_files import STATISTICS

SEED = 20261130
LOST = ("lost", "foreign", "wrong_answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is done."""

    kills: int
    freezes: int
    actors: int
    batches: tuple[int, int]
    """Between two strikes, two of three times. A learner that comes back costs about as many groups however seldom it
    happens (docs/queue.md), so the share of groups that are dropped is smaller the longer this is."""
    frames: int
    """Malformed ones, in the run without kills."""
    quiet_seconds: float
    """How long that run is measured before the flood."""


AMOUNT: dict[Length, Amount] = {
    "short": Amount(kills=6, freezes=1, actors=2, batches=(14, 34), frames=5_000, quiet_seconds=1.0),
    "normal": Amount(kills=30, freezes=3, actors=3, batches=(30, 90), frames=50_000, quiet_seconds=5.0),
    "long": Amount(kills=45, freezes=8, actors=3, batches=(30, 90), frames=1_000_000, quiet_seconds=20.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    verdict: Verdict
    counted_violations: int
    """Groups that the queue itself found too old after they were trained."""
    kills: int
    freezes: int
    batches: int
    """Trained, those of abandoned branches too."""
    returns: int
    """Learners that went on from a checkpoint of one before."""
    folder: Path
    """The run folder, which stays when something was broken."""

    @property
    def broken(self) -> dict[str, Any]:
        """Everything that should not have been, by name."""
        counted = {"counted_violations": self.counted_violations} if self.counted_violations else {}
        return {**self.verdict.broken, **counted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What malformed frames did to a queue."""

    frames: int
    """Sent, and gone through by the queue."""
    seconds: float
    grown: float
    """MB by which the queue's resident memory grew after the first tenth of them."""
    share: float
    """Batches a second during the flood to those before."""


def run(length: Length) -> list[Figure]:
    """chaos.*: counts of what should not be, and what kills and garbage cost."""
    amount = AMOUNT[length]
    killed = run_chaos(amount, SEED)
    flooded, flood = run_flood(amount, SEED)
    return [*_figures(killed, flooded), *_flood_figures(flood)]


def run_chaos(amount: Amount, seed: int) -> Outcome:
    """A run with kills. Raises ChaosError when a process fails by itself or nothing goes on."""
    with _run_folder(seed) as folder, open_fleet(folder, actors=amount.actors, seed=seed) as fleet:
        strikes = plan(seed, kills=amount.kills, freezes=amount.freezes, actors=fleet.actors, batches=amount.batches)
        for strike in strikes:
            fleet.strike(strike)
        goal = fleet.version + amount.batches[0]
        fleet.wait(lambda: fleet.version >= goal, "the last batches")
        # Once more while the run ends.
        fleet.finish(Strike(batches=4 * CHECKPOINT_EVERY, seconds=0.3, roles=strikes[0].roles))
        return _outcome(folder, kills=fleet.kills, freezes=fleet.freezes)


def run_flood(amount: Amount, seed: int) -> tuple[Outcome, Flood]:
    """A run without kills, whose queue gets malformed frames as fast as it takes them. Raises ChaosError."""
    with _run_folder(seed) as folder, open_fleet(folder, actors=1, seed=seed) as fleet:
        before = _pace(fleet, amount.quiet_seconds)
        queue = psutil.Process(fleet.pid(QUEUE))
        _flood(fleet, seed, amount.frames // 10)
        warm, version, start = queue.memory_info().rss, fleet.version, time.monotonic()
        _flood(fleet, seed + 1, amount.frames - amount.frames // 10)
        seconds = time.monotonic() - start
        flood = Flood(
            frames=amount.frames,
            seconds=seconds,
            grown=(queue.memory_info().rss - warm) / 1e6,
            share=(fleet.version - version) / seconds / before,
        )
        fleet.finish()
        return _outcome(folder), flood


def _pace(fleet: Fleet, seconds: float) -> float:
    """Batches a second."""
    version, start = fleet.version, time.monotonic()
    time.sleep(seconds)
    return (fleet.version - version) / (time.monotonic() - start)


def _flood(fleet: Fleet, seed: int, frames: int) -> None:
    """Returns when the queue has gone through all of them."""
    command = [sys.executable, "-m", "lachesis_bench.chaos_frames", fleet.address, str(seed), str(frames)]
    process = subprocess.Popen(command)
    try:
        fleet.wait(lambda: process.poll() is not None, f"{frames} frames", seconds=60.0 + frames / 1000)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise ChaosError(f"{fleet.folder}: the sender of malformed frames ended with {process.returncode}")


@contextmanager
def _run_folder(seed: int) -> Iterator[Path]:
    """A folder that is removed at the end, unless something was broken in it."""
    folder = Path(tempfile.mkdtemp(prefix="lachesis-chaos-"))
    try:
        yield folder
    except BaseException:
        print(f"chaos: {folder} stays (seed {seed})", file=sys.stderr)
        raise
    if broken := _outcome(folder).broken:
        print(f"chaos: {folder} stays (seed {seed}): {broken}", file=sys.stderr)
    else:
        shutil.rmtree(folder)


def _outcome(folder: Path, *, kills: int = 0, freezes: int = 0) -> Outcome:
    history = read_history(folder)
    return Outcome(
        verdict=judge(history, staleness_max=STALENESS_MAX),
        counted_violations=json.loads((folder / STATISTICS).read_text())["bound_violations"],
        kills=kills,
        freezes=freezes,
        batches=len({t.batch for t in history.batches}),
        returns=history.learners - 1,
        folder=folder,
    )


def _figures(*outcomes: Outcome) -> list[Figure]:
    """The first outcome is that of the run with kills; what should not be is counted over all."""
    killed = outcomes[0]
    acknowledged, dropped = len(killed.verdict.acknowledged), len(killed.verdict.dropped)
    where = "".join(f"; see {o.folder}" for o in outcomes if o.broken)

    def count(name: str, value: int, unit: str, of: str) -> Figure:
        return Figure(figure=f"chaos.{name}", value=value, unit=unit, against=of)

    def broken(name: str, unit: str, of: str, *fields: str) -> Figure:
        found = sum(len(getattr(o.verdict, field)) for o in outcomes for field in fields)
        return count(name, found, unit, of + where if found else of)

    groups = sum(len(o.verdict.acknowledged) for o in outcomes)
    violations = broken("bound_violations", "groups", f"trained at a staleness above {STALENESS_MAX}", "violations")
    figures = [
        count("kills", killed.kills, "kills", f"of queue, learner and actors, in {killed.batches} batches"),
        count("freezes", killed.freezes, "freezes", "longer than the heartbeat"),
        broken("lost", "groups", f"of {groups} acknowledged, or altered, or not known again", *LOST),
        broken("duplicated", "groups", "twice in the weights, or trained and dropped", "duplicated"),
        replace(violations, value=violations.value + sum(o.counted_violations for o in outcomes)),
        Figure(
            figure="chaos.dropped_share",
            value=dropped / acknowledged,
            unit="share",
            against=f"{dropped} of {acknowledged} acknowledged groups, a learner that came back each "
            f"{killed.batches / max(1, killed.returns):.0f} batches; batches of {BATCH_GROUPS}, staleness up to "
            f"{STALENESS_MAX}, a checkpoint each {CHECKPOINT_EVERY} versions",
        ),
    ]
    if killed.verdict.items_done is not None:
        done = sum(o.verdict.items_done or 0 for o in outcomes)
        figures.append(broken("items", "items", f"skipped or doubled, {done} done", "items_skipped", "items_doubled"))
    return figures


def _flood_figures(flood: Flood) -> list[Figure]:
    rate = f"{flood.frames / flood.seconds:.0f} a second"

    def figure(name: str, value: float, unit: str, of: str) -> Figure:
        return Figure(figure=f"chaos.{name}", value=value, unit=unit, against=of)

    return [
        figure("frames", flood.frames, "frames", f"malformed, gone through at {rate}; the queue lives"),
        figure("frames_memory", flood.grown, "MB", "growth of the queue after the first tenth"),
        figure("frames_share", flood.share, "share", "batches a second during the flood to those before"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """One run with kills; 1 when it broke a promise."""
    parser = argparse.ArgumentParser(
        prog="python -m lachesis_bench.chaos", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--kills", type=int, default=AMOUNT["normal"].kills)
    options = parser.parse_args(arguments)
    outcome = run_chaos(replace(AMOUNT["normal"], kills=options.kills), options.seed)
    fields: dict[str, Any] = {f.figure: f.value for f in _figures(outcome)}
    print(json.dumps(fields))
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
