"""Checkpoints: folders in Hugging Face format that also hold the optimizer's state, complete or not there at all.

    RUN/checkpoints/00000012/
        config.json, model.safetensors, tokenizer...   the policy in bf16: AutoModelForCausalLM.from_pretrained reads it
        deepspeed/                                     DeepSpeed's own state, one file a rank
        record.json                                    written last: version, parent, step, run, queue

A checkpoint is written under a hidden name, synced to disk and then renamed, so a crash at any moment leaves the older
ones as they were. Rank 0 begins and completes it; in between all ranks write into it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 2
"""Version of the layout. An unknown one is refused."""

FOLDER = "checkpoints"
RECORD = "record.json"
STATE = "deepspeed"


class CheckpointError(ValueError):
    """A checkpoint can't be used. The text names it, the field and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a checkpoint is a checkpoint of."""

    version: int
    """Policy version of the weights."""
    parent: int | None
    """The version that it was trained from."""
    step: int
    """Batches trained until then."""
    run: str
    """Name of the run."""
    queue: str | None
    """Id of the queue whose versions these are; None when the groups came from a file."""
    ranks: int
    """Learner ranks that wrote it: the optimizer's state loads only under as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    record: Record


def newest_checkpoint(run_folder: Path) -> Checkpoint | None:
    """The complete checkpoint of the highest version, or None. Raises CheckpointError when its record is malformed."""
    complete = _complete(run_folder / FOLDER)
    return Checkpoint(path=complete[-1], record=_read_record(complete[-1])) if complete else None


def begin_checkpoint(run_folder: Path, *, version: int) -> Path:
    """An empty folder for all ranks to write the checkpoint of `version` into. Removes what crashed writers left."""
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.part"):
        shutil.rmtree(left)
    part = folder / f".{version:08d}.part"
    part.mkdir()
    return part


def complete_checkpoint(part: Path, record: Record, *, keep: int) -> Checkpoint:
    """Make what was written into `part` durable and visible, then remove all but the newest `keep` checkpoints.

    Raises FileExistsError when there is a checkpoint of that version already.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep}, expected 1 or more")
    path = part.with_name(f"{record.version:08d}")
    if path.exists():
        raise FileExistsError(f"{path} exists, expected no checkpoint of version {record.version} yet")
    (part / RECORD).write_text(json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1) + "\n", encoding="utf-8")
    for each in _everything_in(part):
        _sync(each)
    part.rename(path)
    _sync(path.parent)
    for old in _complete(path.parent)[:-keep]:
        # Without its record it is no checkpoint any more, should the rest of the removal not happen.
        (old / RECORD).unlink()
        shutil.rmtree(old)
    return Checkpoint(path=path, record=record)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, ascending by version."""
    if not folder.is_dir():
        return []
    return sorted(
        (p for p in folder.iterdir() if p.name.isdecimal() and (p / RECORD).is_file()), key=lambda p: int(p.name)
    )


def _read_record(path: Path) -> Record:
    where = path / RECORD
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else raw
        raise CheckpointError(
            f"{where}: schema: version {found!r}, this learner reads version {SCHEMA}; the weights beside it can still "
            "start a new run (model.path)"
        )
    return Record(
        version=_field(where, raw, "version", int),
        parent=None if raw.get("parent") is None else _field(where, raw, "parent", int),
        step=_field(where, raw, "step", int),
        run=_field(where, raw, "run", str),
        queue=None if raw.get("queue") is None else _field(where, raw, "queue", str),
        ranks=_field(where, raw, "ranks", int),
    )


def _field(where: Path, raw: dict[str, Any], key: str, kind: type) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {key}: {value!r}, expected {kind.__name__}")
    return value


def _everything_in(folder: Path) -> Iterator[Path]:
    for parent, _, files in os.walk(folder):
        yield from (Path(parent) / name for name in files)
        yield Path(parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
