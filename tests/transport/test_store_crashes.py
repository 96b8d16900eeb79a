"""The database over kill -9, a full disk and a look from outside."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from lachesis_transport.event_log import EventLog
from lachesis_transport.sqlite_store import SqliteStore, peek
from lachesis_transport.store import Event, StoreError, Writing

SAVER = Path(__file__).with_name("endless_saver.py")
_spec = importlib.util.spec_from_file_location("endless_saver", SAVER)
saver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(saver)

MOMENTS = ["before append", "in append", "after append"]


def open_store(folder: Path) -> SqliteStore:
    return SqliteStore(folder / "queue.db", EventLog(folder / "events.jsonl"))


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def run_and_kill(folder: Path, moment: str, seconds: float) -> int:
    """Let the saver run until it kills itself or `seconds` after its first save; returns the last save it told of."""
    with subprocess.Popen([sys.executable, SAVER, folder, moment], stdout=subprocess.PIPE) as process:
        told = process.stdout.readline()
        if moment == "never":
            time.sleep(seconds)  # a kill at a random moment, nothing is waited for
            process.kill()
        told += process.stdout.read()
    assert process.returncode == -9
    return int(told[: told.rindex(b"\n")].split()[-1])


async def check(folder: Path, told: int) -> int:
    """Everything up to the last save is there, once; returns that save."""
    store = open_store(folder)
    rows = store.load()
    last = rows["state"]["last"]
    assert told <= last <= told + 1
    kept = range(max(1, last - saver.KEPT + 1), last + 1)
    assert rows["t"] == {n: {"n": n} for n in kept}
    assert await store.read([str(n) for n in kept]) == [saver.content(n) for n in kept]
    await store.close()
    assert list(peek(folder / "queue.db").contents) == sorted(map(str, kept))
    assert [(e["n"], e["part"]) for e in events(folder)] == [
        (n, part) for n in range(1, last + 1) for part in range(saver.EVENTS)
    ]
    assert [e["number"] for e in events(folder)] == list(range(1, last * saver.EVENTS + 1))
    return last


def test_nothing_that_was_saved_is_lost_by_a_kill(tmp_path):
    chance = random.Random(5)
    last = 0
    for kill in range(12):
        moment = MOMENTS[kill // 3] if kill % 3 == 2 and kill < 9 else "never"
        told = run_and_kill(tmp_path, moment, chance.uniform(0, 0.2))
        assert told > last
        last = trio.run(check, tmp_path, told)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_look_at_a_killed_queue_changes_nothing(tmp_path, moment):
    told = run_and_kill(tmp_path, moment, 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".db-shm"}
    seen = peek(tmp_path / "queue.db")
    assert seen.rows["state"]["last"] == told + 1
    assert seen.content(str(told)) == saver.content(told)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".db-shm"} == before
    trio.run(check, tmp_path, told)


@pytest.mark.trio
async def test_a_look_at_a_running_and_at_a_stopped_queue(tmp_path):
    store = open_store(tmp_path)
    for n in range(3):
        await store.save(Writing(rows={("t", n): n}, contents={str(n): b"x" * (n + 1)}))
        seen = peek(tmp_path / "queue.db")
        assert seen.rows == {"t": {m: m for m in range(n + 1)}}
        assert seen.contents == {str(m): m + 1 for m in range(n + 1)}
        assert seen.queue_id == store.queue_id
    await store.close()
    files = sorted(tmp_path.iterdir())
    seen = peek(tmp_path / "queue.db")
    assert seen.content("2") == b"xxx"
    with pytest.raises(KeyError, match="3"):
        seen.content("3")
    assert (
        sorted(tmp_path.iterdir())
        == files
        == [tmp_path / "events.jsonl", tmp_path / "queue.db", tmp_path / "queue.db.lock"]
    )
    with pytest.raises(StoreError, match=r"nowhere\.db: there is no such file"):
        peek(tmp_path / "nowhere.db")
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.trio
async def test_a_full_database_refuses_this_save_and_all_later_ones(tmp_path):
    store = open_store(tmp_path)
    await store.save(Writing(rows={("t", 1): 1}, events=[Event("one")]))
    store._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(StoreError, match=r"queue\.db: saving failed: database or disk is full"):
        await store.save(
            Writing(rows={("t", 1): None, ("t", 2): 2}, contents={"1:0": b"x" * 1_000_000}, events=[Event("two")])
        )
    with pytest.raises(StoreError, match=r"nothing is saved any more, since: .*is full"):
        await store.save(Writing(rows={("t", 3): 3}))
    assert store.load() == {"t": {1: 1}}
    await store.close()
    store = open_store(tmp_path)
    assert store.load() == {"t": {1: 1}}
    await store.save(Writing(events=[Event("three")]))
    await store.close()
    assert [(e["number"], e["kind"]) for e in events(tmp_path)] == [(1, "one"), (2, "three")]


@pytest.mark.trio
async def test_a_disk_that_fails_below_the_database(tmp_path):
    store = open_store(tmp_path)
    await store.save(Writing(contents={"1:0": b"x"}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))  # a write beyond fails with EFBIG
    try:
        with pytest.raises(StoreError, match=r"queue\.db: saving failed: "):
            await store.save(Writing(contents={"1:0": None, "2:0": os.urandom(1_000_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert await store.read(["1:0"]) == [b"x"]
    await store.close()
    assert peek(tmp_path / "queue.db").contents == {"1:0": 1}


@pytest.mark.trio
async def test_an_event_log_that_cannot_be_written_is_mended_when_it_can(tmp_path):
    store = open_store(tmp_path)
    await store.save(Writing(rows={("t", 1): 1}, events=[Event("one")]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    await store.save(Writing(rows={("t", n): "x" * 1000 for n in range(300)}, events=[Event("two")]))
    size = (tmp_path / "events.jsonl").stat().st_size
    os.truncate(tmp_path / "events.jsonl", 5_000_000)  # past the limit, while the database is not
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_010, before[1]))
    try:
        with pytest.raises(StoreError, match=r"saving failed: .*File too large"):
            await store.save(Writing(rows={("t", 1): 2}, events=[Event("three")]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    await store.close()
    store = open_store(tmp_path)
    assert store.load()["t"][1] == 2
    await store.close()
    assert size < 5_000_000
    assert [(e["number"], e["kind"]) for e in events(tmp_path)] == [(1, "one"), (2, "two"), (3, "three")]


@pytest.mark.trio
async def test_a_cancelled_save_is_finished(tmp_path):
    store = open_store(tmp_path)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.save(Writing(rows={("t", 1): 1}, events=[Event("one")]))
    await store.save(Writing(rows={("t", 2): 2}))
    assert store.load() == {"t": {1: 1, 2: 2}}
    await store.close()


@pytest.mark.trio
async def test_the_files_stay_as_large_as_what_they_held(tmp_path):
    store = open_store(tmp_path)
    sizes = []
    for n in range(600):
        await store.save(Writing(contents={str(n): bytes(300_000), str(n - 20): None}))
        if n % 200 == 199:
            sizes.append((tmp_path / "queue.db").stat().st_size)
            assert (tmp_path / "queue.db-wal").stat().st_size < 64 << 20
    assert sizes[-1] == sizes[-2] < 12_000_000
    await store.close()
