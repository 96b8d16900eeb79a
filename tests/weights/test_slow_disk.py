"""A disk that hangs or is full, beside a real publisher: versions go on, memory does not grow, and somebody says so."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))

from fleet import joined, serving, until
from model import Learner, write_model

from lachesis_learner import log_writer
from lachesis_transport.weights import log_files
from lachesis_transport.weights.log_files import LogFiles


class Disk:
    """Stands before fsync, which hangs while it is frozen."""

    def __init__(self) -> None:
        self.frozen = threading.Event()
        self.works = threading.Event()
        self.works.set()
        self.full = False

    def freeze(self) -> None:
        self.works.clear()

    def fsync(self, descriptor: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not self.works.is_set():
            self.frozen.set()
        self.works.wait()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(log_files.os, "fsync", disk.fsync)
    monkeypatch.setattr(log_writer, "BEHIND_SECONDS", 0.0)
    yield disk
    disk.works.set()


async def frozen(disk: Disk) -> None:
    await until(disk.frozen.is_set)


@pytest.mark.trio
async def test_versions_go_on_while_the_disk_hangs_and_it_catches_up(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(write_model(tmp_path / "model"), ranks=1)
    files = LogFiles(tmp_path / "weights", learner.layout)
    disk.freeze()
    async with serving(learner, files=files) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        await frozen(disk)  # with the anchor, of which it has read all
        async with joined(publisher, tmp_path / "model") as member:
            for version in range(1, 41):
                learner.step()
                report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                assert (report.members, report.removed) == (("actor-0",), {})
                assert report.unkept == version + 1
                await until(lambda: len(publisher._log._deltas) <= 16)
            await until(lambda: member.active[-1] == 40)
            member.assert_serves(learner)
        assert publisher._log.base is not None
        assert publisher._log.base.version > 40 - 8
        assert files.head is None
        assert [r.getMessage() for r in caplog.records if "disk" in r.getMessage()] == [
            "the disk is behind: version 0 has been written for 0 s, and 2 versions are not kept yet"
        ]
        disk.works.set()
        await until(lambda: files.head == 40)
        learner.step()
        assert (await publisher.publish(version=41, parent=40, blobs=learner.blobs())).unkept <= 1
        await until(lambda: files.head == 41)
    kept = LogFiles(tmp_path / "weights", learner.layout).restore(shards=1)
    assert kept is not None
    assert kept.newest.version == 41


@pytest.mark.trio
async def test_a_disk_that_hangs_holds_up_no_end(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "CLOSE_SECONDS", 0.2)
    learner = Learner(write_model(tmp_path / "model"), ranks=1)
    disk.freeze()
    with trio.fail_after(15):
        async with serving(learner, files=LogFiles(tmp_path / "weights", learner.layout)) as publisher:
            await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
            await frozen(disk)


@pytest.mark.trio
async def test_an_end_leaves_the_disk_the_time_for_the_newest_version(tmp_path: Path) -> None:
    learner = Learner(write_model(tmp_path / "model", scale=50), ranks=1)
    files = LogFiles(tmp_path / "weights", learner.layout)
    async with serving(learner, files=files) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        await until(lambda: files.head == 0)
        learner.step()
        await publisher.publish(version=1, parent=0, blobs=learner.blobs())
    assert files.head == 1


@pytest.mark.trio
async def test_a_full_disk_costs_files_and_few_lines_in_the_log(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(write_model(tmp_path / "model"), ranks=1)
    files = LogFiles(tmp_path / "weights", learner.layout)
    async with serving(learner, files=files) as publisher:
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        await until(lambda: files.head == 0)
        disk.full = True
        for version in range(1, 30):
            learner.step()
            report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
            assert report.unkept == version
        await until(lambda: "No space left on device" in caplog.text)
        [line] = [r.getMessage() for r in caplog.records if "disk" in r.getMessage()]
        assert re.fullmatch(
            r"the disk does not take version (\d+) \(\1 are not kept\): .* No space left on device", line
        )
        disk.full = False
        learner.step()
        await publisher.publish(version=30, parent=29, blobs=learner.blobs())
        await until(lambda: files.head == 30)
