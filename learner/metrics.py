"""metrics.jsonl, one line a step, and the same numbers as TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lachesis_transport.messages import Batch, Scores

if TYPE_CHECKING:
    from lachesis_learner.trainer import Trained

METRICS = "metrics.jsonl"
ABANDONED = "metrics.abandoned.jsonl"
TENSORBOARD = "tensorboard"

PHASES = ("wait", "proximal", "forward_backward", "step", "encode", "publish_wait", "checkpoint")
"""What a learner does, by the names that `Phases` gets."""


class MetricsWriter:
    """Writes one line a step to FOLDER/metrics.jsonl and its numbers to FOLDER/tensorboard.

    Args:
        folder: the run folder.
        step: steps that the run has done already. Lines of later steps, which a learner trained that did not live to
            its next checkpoint, move to metrics.abandoned.jsonl, and TensorBoard hides their events.
    """

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        self.path = folder / METRICS
        _abandon_after(self.path, folder / ABANDONED, step)
        self._file = self.path.open("a", encoding="utf-8")
        # Slow to import, and only rank 0 of a learner has a use for it.
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1 if step else None, flush_secs=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append one step, durably: a checkpoint that comes later holds no step without a line. Returns the line.

        `line` needs an int `step`. NaN and infinite numbers become null, as JSON has none. Numbers, also those in maps
        (as NAME/KEY), become TensorBoard scalars.
        """
        clean = {key: _plain(value) for key, value in line.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        for key, value in clean.items():
            for name, number in _scalars(key, value):
                self._events.add_scalar(name, number, clean["step"])
        return clean


def step_line(
    batch: Batch, trained: Trained, phases: Phases, blobs: Sequence[bytes], *, step: int, published: int
) -> dict[str, Any]:
    """The line of one step.

    Args:
        batch: what was trained.
        trained: what came of it.
        phases: since the line before.
        blobs: what was published, one a rank; none without a publication.
        step: batches trained, this one included.
        published: version of the new weights.
    """
    from lachesis_learner.shards import ShardBlob

    parts = [ShardBlob.from_wire(blob) for blob in blobs]
    total = sum(part.total for part in parts)
    elapsed = phases.elapsed
    metrics = trained.sums.finalise()
    own = Scores()
    for group in batch.groups:
        own += Scores.of([t.score for t in group.trajectories])
    return {
        "step": step,
        "version": batch.version,
        "published": published,
        "time": time.time(),
        "reward_mean": batch.scores.mean,
        "reward_std": batch.scores.std,
        "reward_groups": batch.scores.groups,
        "trained_reward_mean": own.mean,
        "groups": len(batch.groups),
        "group_ids": [group.group_id for group in batch.groups],
        **metrics,
        "tokens_processed": trained.tokens,
        "padding_share": trained.padding / (trained.tokens + trained.padding),
        "grad_norm": trained.grad_norm,
        "lr": trained.lr,
        **{f"seconds_{name}": phases.seconds(name) for name in PHASES},
        "seconds_total": elapsed,
        "tokens_per_second": metrics["tokens"] / elapsed,
        "delta_bytes": sum(len(part.payload) for part in parts) if parts else None,
        "full_bytes": 2 * total if parts else None,
        "changed_share": sum(part.changed for part in parts) / total if parts else None,
        "dropped": batch.dropped,
        "phases": phases.intervals,
    }


class Phases:
    """Where the wall-clock time of one step goes: named, non-overlapping intervals."""

    def __init__(self) -> None:
        self.intervals: list[tuple[str, float, float]] = []
        """(name, start, end), unix seconds, in order."""
        self.started = time.time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under `name`, also when it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.intervals.append((name, start, time.time()))

    def seconds(self, name: str) -> float:
        """Total of all intervals of that name."""
        return sum(end - start for each, start, end in self.intervals if each == name)

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return time.time() - self.started


def _abandon_after(path: Path, abandoned: Path, step: int) -> None:
    if not path.exists():
        return
    kept: list[str] = []
    gone: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (kept if _step_of(line) <= step else gone).append(line if line.endswith("\n") else line + "\n")
    if not gone:
        return
    with abandoned.open("a", encoding="utf-8") as file:
        file.writelines(gone)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the line that was being written when its learner died
        return math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _scalars(f"{name}/{key}", item)
