"""The event log: numbered lines, exactly once, whatever the end of the file looks like."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lachesis_transport.event_log import MAX_CHARACTERS, Event, EventLog


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(path: Path, outbox=()) -> EventLog:
    log = EventLog(path)
    log.open(outbox)
    return log


def written(path: Path, count: int):
    """A log with `count` events; returns their lines."""
    log = opened(path)
    lines = log.lines([Event("voided", {"ticket": n, "reason": "late"}) for n in range(count)], time=12.5)
    log.append(lines)
    log.close()
    return lines


def test_lines_are_numbered_on_from_the_end_of_the_file(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, 2)
    log = opened(path)
    log.append(log.lines([Event("evaluated", {"score": 0.5}, source="learner")], time=13.0))
    assert log.unsynced == 1
    assert log.sync() == 3
    assert log.unsynced == 0
    log.close()
    assert read(path) == [
        {"number": 1, "time": 12.5, "source": "queue", "kind": "voided", "ticket": 0, "reason": "late"},
        {"number": 2, "time": 12.5, "source": "queue", "kind": "voided", "ticket": 1, "reason": "late"},
        {"number": 3, "time": 13.0, "source": "learner", "kind": "evaluated", "score": 0.5},
    ]


@pytest.mark.parametrize("kept_from", [1, 3, 5])
@pytest.mark.parametrize("damage", ["none", "torn", "missing", "zeros", "garbage line", "hole"])
def test_the_outbox_mends_the_end_of_the_file(tmp_path, kept_from, damage):
    path = tmp_path / "events.jsonl"
    lines = written(path, 5)
    whole = path.read_bytes()
    starts = [0, *(n + 1 for n, byte in enumerate(whole) if byte == 10)]
    first = starts[kept_from - 1]
    path.write_bytes(
        {
            "none": whole,
            "torn": whole[: first + 7],
            "missing": whole[:first],
            "zeros": whole[:first] + bytes(5000),
            "garbage line": whole[:first] + b"\xff\n" + whole[first:],
            "hole": whole[:first] + bytes(9) + whole[first + 9 :],
        }[damage]
    )
    log = opened(path, lines[kept_from - 1 :])
    assert path.read_bytes() == whole
    assert log.lines([Event("finished")], time=0.0)[0][0] == 6
    log.close()


def test_without_an_outbox_only_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"number": 4, "ti')
    opened(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"not ours\n" + b"torn")
    log = opened(path)
    assert path.read_bytes() == whole + b"not ours\n"
    assert log.lines([Event("finished")], time=0.0)[0][0] == 4
    log.close()


def test_a_file_ahead_of_its_database_is_left_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = written(path, 5)
    whole = path.read_bytes()
    log = opened(path, lines[1:3])
    assert path.read_bytes() == whole
    assert log.lines([Event("finished")], time=0.0)[0][0] == 6
    log.close()


def test_a_deleted_file_starts_with_the_outbox(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = written(path, 5)
    path.unlink()
    opened(path, lines[3:]).close()
    assert [event["number"] for event in read(path)] == [4, 5]


def test_lines_longer_than_what_is_read_at_once(tmp_path):
    path = tmp_path / "events.jsonl"
    log = opened(path)
    lines = log.lines([Event("note", {"text": "x" * size}) for size in (200_000, 65_536, 10, 131_000)], time=0.0)
    log.append(lines)
    log.close()
    whole = path.read_bytes()
    for cut in (1, 140_000, 131_200, 200_000, len(whole) - 3):
        path.write_bytes(whole[:-cut])
        opened(path, lines).close()
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-1])
    log = opened(path)
    assert log.lines([Event("finished")], time=0.0)[0][0] == 4
    log.close()


def test_lines_of_older_files_have_no_number(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "issued"}\n{"kind": "voided"}\n')
    log = opened(path)
    lines = log.lines([Event("finished")], time=0.0)
    log.append(lines)
    log.close()
    opened(path, lines).close()
    assert [event.get("number") for event in read(path)] == [None, None, 1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"score": math.nan}, "not JSON compliant"),
        ({"frame": b"x"}, "bytes is not JSON serializable"),
        ({"text": "x" * MAX_CHARACTERS}, "expected at most 262144"),
        ([1], "not a mapping"),
    ],
)
def test_what_cannot_be_a_line_is_said_to_be_unwritable(tmp_path, fields, reason):
    path = tmp_path / "events.jsonl"
    log = opened(path)
    log.append(log.lines([Event("report", fields, source="actor-0"), Event("finished")], time=1.0))
    log.close()
    unwritable, after = read(path)
    assert reason in unwritable.pop("reason")
    assert unwritable == {"number": 1, "time": 1.0, "source": "actor-0", "kind": "unwritable", "event": "report"}
    assert after["number"] == 2


def test_fields_cannot_pose_as_number_time_or_source(tmp_path):
    log = opened(tmp_path / "events.jsonl")
    ((_, line),) = log.lines([Event("note", {"number": 9, "time": 0, "source": "me", "a": 1}, "actor-1")], time=2.0)
    assert json.loads(line) == {"number": 1, "time": 2.0, "source": "actor-1", "kind": "note", "a": 1}
    log.close()
