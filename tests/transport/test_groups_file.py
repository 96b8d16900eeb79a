from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lachesis_transport.groups_file import read_groups, write_groups
from lachesis_transport.messages import Group, MessageError, SchemaError, Trajectory


def _group(number: int, *, length: int = 6) -> Group:
    mask = np.array([0, 0] + [1] * (length - 2), dtype=np.uint8)
    return Group(
        group_id=f"{number}:0",
        ticket=number,
        actor="actor-0",
        environment="sums",
        trajectories=(
            Trajectory(
                tokens=np.arange(length, dtype=np.int32),
                mask=mask,
                logprobs=np.where(mask, -0.5 - number, 0).astype(np.float32),
                versions=np.where(mask, number, -1).astype(np.int32),
                advantages=np.where(mask, 1.5, 0).astype(np.float32),
                score=float(number),
            ),
        ),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "groups.bin"
    assert write_groups(path, (_group(i) for i in range(3))) == 3
    return path


def test_what_was_written_is_read_in_order(path: Path) -> None:
    assert list(read_groups(path)) == [_group(0), _group(1), _group(2)]
    assert [p.name for p in path.parent.iterdir()] == ["groups.bin"]


def test_an_empty_file_of_groups(tmp_path: Path) -> None:
    assert write_groups(tmp_path / "none", []) == 0
    assert list(read_groups(tmp_path / "none")) == []


def test_a_malformed_group_leaves_the_old_file(path: Path) -> None:
    bad = _group(3)
    bad = Group(group_id="3:0", ticket=3, actor="a", environment="e", trajectories=(_with_nan(bad.trajectories[0]),))
    with pytest.raises(MessageError, match=r"trajectories\[0\]\.advantages\[2\]: nan"):
        write_groups(path, [_group(9), bad])
    assert [g.group_id for g in read_groups(path)] == ["0:0", "1:0", "2:0"]
    assert [p.name for p in path.parent.iterdir()] == ["groups.bin"]


def _with_nan(t: Trajectory) -> Trajectory:
    advantages = t.advantages.copy()
    advantages[2] = np.nan
    return Trajectory(
        tokens=t.tokens, mask=t.mask, logprobs=t.logprobs, versions=t.versions, advantages=advantages, score=t.score
    )


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_a_file_cut_short_names_the_group(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    groups = read_groups(path)
    assert [next(groups).group_id, next(groups).group_id] == ["0:0", "1:0"]
    with pytest.raises(MessageError, match=r"groups.bin: group 2: frame: \d+ bytes, expected \d+: the file was cut"):
        next(groups)


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x08\x00\x00\x00PK\x03\x04nothing")
    with pytest.raises(MessageError, match=r"model.safetensors: not a file of groups: frame: not msgpack"):
        list(read_groups(other))
    other.write_bytes(b"")
    with pytest.raises(MessageError, match=r"not a file of groups: frame: not msgpack"):
        list(read_groups(other))
    other.write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(MessageError, match="not a file of groups: frame: 4294967295 bytes, expected at most"):
        list(read_groups(other))


def test_another_schema_is_refused_with_both_versions(path: Path) -> None:
    raw = path.read_bytes().replace(b"\xa6schema\x02", b"\xa6schema\x01")
    path.write_bytes(raw)
    with pytest.raises(SchemaError, match="schema: version 1, this process speaks version 2"):
        list(read_groups(path))
