from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis_learner.checkpoint import (
    CheckpointError,
    Record,
    begin_checkpoint,
    complete_checkpoint,
    newest_checkpoint,
)


def _record(version: int) -> Record:
    return Record(version=version, parent=version - 1, step=version, run="demo", queue="a1b2", ranks=2)


def _write(run: Path, version: int, *, keep: int = 2) -> Path:
    part = begin_checkpoint(run, version=version)
    (part / "deepspeed").mkdir()
    (part / "deepspeed" / "rank-0").write_bytes(b"state")
    (part / "model.safetensors").write_bytes(b"weights")
    return complete_checkpoint(part, _record(version), keep=keep).path


def _names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_a_complete_checkpoint_is_found_with_its_record(tmp_path: Path) -> None:
    path = _write(tmp_path, 7)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.record) == (path, _record(7))
    assert json.loads((path / "record.json").read_text()) == {
        "schema": 2,
        "version": 7,
        "parent": 6,
        "step": 7,
        "run": "demo",
        "queue": "a1b2",
        "ranks": 2,
    }
    assert (path / "deepspeed" / "rank-0").read_bytes() == b"state"


def test_a_half_written_one_is_ignored_and_cleared_away(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    part = begin_checkpoint(tmp_path, version=4)
    (part / "model.safetensors").write_bytes(b"wei")
    half = tmp_path / "checkpoints" / "00000005"  # one whose removal was cut short
    half.mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.record.version == 3
    assert begin_checkpoint(tmp_path, version=6).name == ".00000006.part"
    assert _names(tmp_path) == [".00000006.part", "00000003", "00000005"]


def test_the_newest_are_kept_by_version_not_by_name(tmp_path: Path) -> None:
    for version in (1, 2, 99_999_999, 100_000_000):
        _write(tmp_path, version)
    assert _names(tmp_path) == ["100000000", "99999999"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.record.version == 100_000_000


def test_a_version_is_written_once(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    with pytest.raises(FileExistsError, match="no checkpoint of version 3 yet"):
        _write(tmp_path, 3)
    with pytest.raises(ValueError, match="keep: 0"):
        _write(tmp_path, 4, keep=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "record.json: not JSON"),
        ("[]", r"schema: version \[\], this learner reads version 2"),
        ('{"schema": 1}', "schema: version 1, this learner reads version 2; .* start a new run"),
        ('{"schema": 2, "version": "7"}', "version: '7', expected int"),
        ('{"schema": 2, "version": 7, "parent": null, "step": true}', "step: True, expected int"),
        ('{"schema": 2, "version": 7, "parent": 6, "step": 7, "run": "x", "queue": 3}', "queue: 3, expected str"),
    ],
)
def test_a_malformed_record_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (_write(tmp_path, 1) / "record.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        newest_checkpoint(tmp_path)
