from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from history import LAYOUT, History, fold, payloads

from lachesis_transport.weights import log_files
from lachesis_transport.weights.checksum import mirror_checksum
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.version_log import Entry, VersionLog, entry_of


def keep(files: LogFiles, log: VersionLog) -> list[tuple[str, int]]:
    """Write whatever there is to write; what was written."""
    written = []
    while entry := files.next(log):
        files.write(entry, log.mirror)
        written.append(("anchor" if entry.parent is None else "delta", entry.version))
    return written


def run(folder: Path, history: History, versions: range, *, limit: int = 16) -> tuple[LogFiles, VersionLog]:
    files, log = LogFiles(folder, LAYOUT), VersionLog(LAYOUT, limit=limit)
    files.restore(shards=history.ranks)
    for version in versions:
        log.append(history.entry(version, anchor=version == versions[0]))
        keep(files, log)
        fold(log)
        keep(files, log)
    return files, log


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_versions_are_there_again_after_a_restart(tmp_path: Path) -> None:
    history = History()
    run(tmp_path, history, range(6))
    assert names(tmp_path) == ["00000000.anchor", *(f"0000000{v}.delta" for v in range(1, 6))]
    kept = LogFiles(tmp_path, LAYOUT).restore(shards=2)
    assert kept is not None
    assert kept.newest.version == 5
    assert [e.version for e in kept.deltas] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(kept.mirror.bits, history.weights[5])
    log = VersionLog(LAYOUT, kept=kept)
    for held in range(6):
        plan = log.plan("r", checksum=mirror_checksum(LAYOUT, history.weights[held], shards=2), now=0.0)
        assert plan is not None
        assert (plan.held, [s.version for s in plan.steps]) == (held, list(range(held + 1, 6)))


def test_a_restarted_log_goes_on_where_the_files_end(tmp_path: Path) -> None:
    history = History()
    run(tmp_path, history, range(4))
    files = LogFiles(tmp_path, LAYOUT)
    log = VersionLog(LAYOUT, kept=files.restore(shards=2))
    assert keep(files, log) == []
    old, new = history.weights[3], history.weights[1].copy()  # back to a checkpoint of version 1, as version 7
    new[5] ^= 1
    log.append(
        entry_of(
            version=7,
            parent=3,
            checksum=mirror_checksum(LAYOUT, new, shards=2),
            payloads=payloads(old, new, ranks=2),
        )
    )
    assert keep(files, log) == [("delta", 7)]
    fold(log)
    again = LogFiles(tmp_path, LAYOUT).restore(shards=2)
    assert again is not None
    assert again.newest.version == 7
    np.testing.assert_array_equal(again.mirror.bits, new)


def test_another_number_of_ranks_knows_the_same_weights(tmp_path: Path) -> None:
    history = History(ranks=2)
    run(tmp_path, history, range(4))
    kept = LogFiles(tmp_path, LAYOUT).restore(shards=3)
    assert kept is not None
    log = VersionLog(LAYOUT, kept=kept)
    for held in range(4):
        for shards in (2, 3):
            plan = log.plan("r", checksum=mirror_checksum(LAYOUT, history.weights[held], shards=shards), now=0.0)
            assert plan is not None
            assert plan.held == held
            assert all(step.shards == 2 for step in plan.steps)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew the anchor after 8 deltas and keep 4 of those before it, as is done with 64 and 16 of larger weights."""
    monkeypatch.setattr(log_files, "EVERY", 8)
    monkeypatch.setattr(log_files, "LIMIT", 4)


@pytest.mark.usefixtures("short")
def test_the_anchor_is_renewed_and_what_lies_before_it_is_bounded(tmp_path: Path) -> None:
    history = History(share=0.0)
    files, _ = run(tmp_path, history, range(8 + 3))
    expected = ["00000007.delta", "00000008.anchor", "00000008.delta", "00000009.delta", "00000010.delta"]
    assert names(tmp_path) == expected
    kept = LogFiles(tmp_path, LAYOUT).restore(shards=2)
    assert kept is not None
    assert kept.newest.version == 10
    assert [e.version for e in kept.deltas] == [7, 8, 9, 10]
    assert files.nbytes <= 4 * LAYOUT.total


def test_deltas_together_are_never_larger_than_the_weights(tmp_path: Path) -> None:
    history = History(share=0.9)
    files, log = LogFiles(tmp_path, LAYOUT), VersionLog(LAYOUT)
    largest = 0
    for version in range(12):
        log.append(history.entry(version))
        keep(files, log)
        fold(log)
        keep(files, log)
        largest = max(largest, files.nbytes)
        kept = LogFiles(tmp_path, LAYOUT).restore(shards=2)
        assert kept is not None
        np.testing.assert_array_equal(kept.mirror.bits, history.weights[version])
    assert largest <= 4 * LAYOUT.total


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "newest", "damaged"),
    [
        (lambda f: flip(f / "00000003.delta", -5), 2, 1),
        (lambda f: flip(f / "00000003.delta", 30), 2, 1),
        (lambda f: cut(f / "00000005.delta", -1), 4, 1),
        (lambda f: cut(f / "00000005.delta", 9), 4, 1),
        (lambda f: cut(f / "00000005.delta", 0), 4, 1),
        (lambda f: (f / "00000004.delta").unlink(), 3, 0),
        (lambda f: (f / ".00000006.delta.part").write_bytes(b"half"), 5, 0),
        (lambda f: flip(f / "00000000.anchor", -5), None, 1),
        (lambda f: flip(f / "00000000.anchor", 3), None, 1),
        (lambda f: (f / "00000000.anchor").unlink(), None, 0),
        (lambda f: [p.unlink() for p in f.iterdir()], None, 0),
    ],
)
def test_damage_costs_versions_and_never_correctness(
    tmp_path: Path, damage: Callable[[Path], object], newest: int | None, damaged: int
) -> None:
    history = History()
    run(tmp_path, history, range(6))
    damage(tmp_path)
    files = LogFiles(tmp_path, LAYOUT)
    kept = files.restore(shards=2)
    assert files.damaged == damaged
    assert (kept and kept.newest.version) == newest
    assert files.head == newest
    if kept is None:
        assert names(tmp_path) == []
    else:
        assert kept.mirror.checksum(shards=2) == mirror_checksum(LAYOUT, history.weights[kept.newest.version], shards=2)
        np.testing.assert_array_equal(kept.mirror.bits, history.weights[kept.newest.version])
    again = LogFiles(tmp_path, LAYOUT)  # what was of no use is gone
    again.restore(shards=2)
    assert (again.damaged, again.head) == (0, newest)


def refuse(method: Any, which: Path, number: int) -> Any:
    """The method of Path, which fails for one of them."""

    def refusing(path: Path, *arguments: Any, **fields: Any) -> Any:
        if path == which:
            raise OSError(number, os.strerror(number))
        return method(path, *arguments, **fields)

    return refusing


class BadSectors(io.FileIO):
    """A file that can be opened and not read beyond its header."""

    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, size: int = -1) -> bytes:
        if self.tell() > 100:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


@pytest.mark.parametrize(("name", "newest"), [("00000003.delta", 2), ("00000000.anchor", None)])
@pytest.mark.parametrize("where", ["header", "content"])
def test_what_cannot_be_read_counts_as_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    newest: int,
    where: str,
) -> None:
    run(tmp_path, History(), range(6))
    opened = Path.open
    bad = refuse(opened, tmp_path / name, errno.EIO) if where == "header" else None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", bad or (lambda p, *a, **f: BadSectors(p) if p.name == name else opened(p, *a, **f)))
        files = LogFiles(tmp_path, LAYOUT)
        kept = files.restore(shards=2)
    assert (kept and kept.newest.version) == newest
    assert files.damaged == 1
    assert f"{tmp_path / name}: Input/output error; not used" in caplog.text


def test_what_cannot_be_removed_stays_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history = History()
    run(tmp_path, history, range(6))
    flip(tmp_path / "00000003.delta", -5)
    stays = tmp_path / "00000004.delta"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse(Path.unlink, stays, errno.EROFS))
        files = LogFiles(tmp_path, LAYOUT)
        kept = files.restore(shards=2)
    assert kept is not None
    assert kept.newest.version == 2
    assert names(tmp_path) == ["00000000.anchor", "00000001.delta", "00000002.delta", "00000004.delta"]
    assert "Read-only file system; it stays" in caplog.text
    log = VersionLog(LAYOUT, kept=kept)
    log.append(history.entry(3))
    assert keep(files, log) == [("delta", 3)]


def test_without_a_folder_that_can_be_used_nothing_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "weights"
    folder.write_text("a file")
    files = LogFiles(folder, LAYOUT)
    assert files.restore(shards=2) is None
    assert "Not a directory" in caplog.text
    log = VersionLog(LAYOUT)
    log.append(History().entry(0))
    fold(log)
    with pytest.raises(OSError, match="File exists"):
        keep(files, log)
    folder.unlink()
    assert keep(files, log) == [("anchor", 0)]


@pytest.mark.usefixtures("short")
def test_damage_before_the_anchor_only_shortens_what_laggards_get(tmp_path: Path) -> None:
    run(tmp_path, History(share=0.0), range(8 + 3))
    flip(tmp_path / "00000007.delta", -1)
    files = LogFiles(tmp_path, LAYOUT)
    kept = files.restore(shards=2)
    assert kept is not None
    assert [e.version for e in kept.deltas] == [8, 9, 10]
    assert files.damaged == 1


def test_a_wrong_result_is_noticed_though_every_file_is_whole(tmp_path: Path) -> None:
    history = History()
    files, log = run(tmp_path, history, range(3))
    entry = history.entry(3)
    log.append(Entry(version=3, parent=2, checksum="0" * 32, sizes=entry.sizes, payload=entry.payload))
    assert keep(files, log) == [("delta", 3)]
    again = LogFiles(tmp_path, LAYOUT)
    assert again.restore(shards=2) is None
    assert again.damaged == 1
    assert names(tmp_path) == []


def test_another_model_is_not_used(tmp_path: Path) -> None:
    run(tmp_path, History(), range(3))
    files = LogFiles(tmp_path, Layout.of([("a", 37), ("b", 999)]))
    assert files.restore(shards=2) is None
    assert files.damaged == 3
    assert names(tmp_path) == []


def test_a_new_anchor_replaces_what_it_does_not_follow(tmp_path: Path) -> None:
    history = History()
    run(tmp_path, history, range(3))
    files = LogFiles(tmp_path, LAYOUT)
    assert files.restore(shards=2) is not None
    log = VersionLog(LAYOUT)  # a learner that starts with an anchor all the same
    log.append(history.entry(5, anchor=True))
    assert files.next(log) is None  # the mirror has to hold it first
    fold(log)
    log.append(history.entry(6))
    assert keep(files, log) == [("anchor", 5), ("delta", 6)]
    assert names(tmp_path) == ["00000005.anchor", "00000006.delta"]


def test_a_writer_that_fell_behind_starts_from_an_anchor(tmp_path: Path) -> None:
    history = History()
    files, log = LogFiles(tmp_path, LAYOUT), VersionLog(LAYOUT, limit=4)
    for version in range(20):
        log.append(history.entry(version))
        fold(log)
        if version == 2:
            keep(files, log)
    assert keep(files, log) == [("anchor", 19)]
    assert names(tmp_path) == ["00000019.anchor"]
    kept = LogFiles(tmp_path, LAYOUT).restore(shards=2)
    assert kept is not None
    np.testing.assert_array_equal(kept.mirror.bits, history.weights[19])


@pytest.mark.parametrize("pieces", [1, 3, 99])
def test_an_anchor_whose_mirror_is_taken_away_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    history = History()
    files, log = run(tmp_path, history, range(2))
    before = names(tmp_path)
    size = 2 * LAYOUT.total
    monkeypatch.setattr(log_files, "PIECE_BYTES", -(-size // pieces))
    asked = 0

    def until_the_last_piece() -> bool:
        nonlocal asked
        asked += 1
        return asked < pieces

    assert log.base is not None
    anchor = replace(log.base, parent=None, payload=b"")
    assert not files.write(anchor, log.mirror, held=until_the_last_piece)
    assert asked == pieces
    assert (names(tmp_path), files.head) == (before, 1)
    assert files.write(anchor, log.mirror)
    assert names(tmp_path) == ["00000001.anchor", "00000001.delta"]


def test_what_could_not_be_written_leaves_no_room_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    files, log = run(tmp_path, history, range(2))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_files.os, "fsync", full)
        for version in range(2, 5):
            log.append(history.entry(version))
            with pytest.raises(OSError, match="No space left"):
                keep(files, log)
            fold(log)
            assert names(tmp_path) == ["00000000.anchor", "00000001.delta"]
    keep(files, log)
    kept = LogFiles(tmp_path, LAYOUT).restore(shards=history.ranks)
    assert kept is not None
    assert kept.newest.version == 4
    np.testing.assert_array_equal(kept.mirror.bits, history.weights[4])
