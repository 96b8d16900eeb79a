"""Stores: what is saved comes back, all of it or nothing, once; and nothing else may write beside it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_transport.event_log import EventLog
from lachesis_transport.sqlite_store import SqliteStore, peek
from lachesis_transport.store import Event, MemoryStore, Refused, StoreError, Writing


def sqlite_store(folder: Path) -> SqliteStore:
    return SqliteStore(folder / "queue.db", EventLog(folder / "events.jsonl"))


def memory_store(folder: Path) -> MemoryStore:
    return MemoryStore(EventLog(folder / "events.jsonl"))


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


both = pytest.mark.parametrize("make", [sqlite_store, memory_store])


@both
@pytest.mark.trio
async def test_what_was_saved_is_there(tmp_path, make):
    store = make(tmp_path)
    await store.save(
        Writing(
            rows={("ticket", 10): [1, "a"], ("ticket", 2): {3: b"x"}, ("ticket", "2"): 0.5, ("state", "now"): False},
            contents={"1:0": b"first", "2:0": b"second"},
            events=[Event("issued", {"ticket": 10}), Event("accepted", {"group": "1:0"}, source="actor-0")],
        )
    )
    await store.save(Writing(rows={("ticket", 10): None, ("ticket", 2): 7}, contents={"1:0": None}))
    assert store.load() == {"ticket": {2: 7, "2": 0.5}, "state": {"now": False}}
    assert await store.read(["2:0"]) == [b"second"]
    with pytest.raises(KeyError, match="1:0"):
        await store.read(["2:0", "1:0"])
    await store.close()
    await store.close()
    assert [(e["number"], e["kind"], e["source"]) for e in events(tmp_path)] == [
        (1, "issued", "queue"),
        (2, "accepted", "actor-0"),
    ]


@both
@pytest.mark.trio
async def test_rows_come_back_in_the_order_of_their_keys(tmp_path, make):
    store = make(tmp_path)
    await store.save(Writing(rows={("t", key): 1 for key in ["b", 10, "a", 9, -1, "B"]}))
    assert list(store.load()["t"]) == [-1, 9, 10, "B", "a", "b"]
    await store.close()


@both
@pytest.mark.trio
async def test_the_quarantine_keeps_the_newest_and_their_beginnings(tmp_path, make):
    store = make(tmp_path)
    for first in (0, 50, 100):
        await store.save(
            Writing(refused=[Refused("a", f"reason {n}", b"x" * 100_000, float(n)) for n in range(first, first + 50)])
        )
    kept = store.quarantine()
    assert [refused.time for refused in kept] == [float(n) for n in range(86, 150)]
    assert {len(refused.frame) for refused in kept} == {1 << 16}
    await store.save(Writing(refused=[Refused("b", "r" * 5000, b"", float(n)) for n in range(100)]))
    assert [refused.time for refused in store.quarantine()] == [float(n) for n in range(36, 100)]
    assert len(store.quarantine()[0].reason) == 1024
    if make is sqlite_store:
        assert peek(tmp_path / "queue.db").quarantine == store.quarantine()
    await store.close()
    if make is sqlite_store:
        again = sqlite_store(tmp_path)
        assert again.quarantine() == store.quarantine()
        await again.close()


plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.tuples(st.sampled_from(["tickets", "groups"]), st.integers(-3, 12) | st.sampled_from(["1", "1:0", "é\0x"]))
writings = st.builds(
    Writing,
    rows=st.dictionaries(keys, st.none() | plain, max_size=6),
    contents=st.dictionaries(st.sampled_from(["1:0", "1:1", "é"]), st.none() | st.binary(max_size=40_000), max_size=3),
    events=st.lists(st.builds(Event, st.sampled_from(["issued", "voided"]), st.dictionaries(st.text(), st.integers()))),
)


@settings(max_examples=30, deadline=None)
@given(lives=st.lists(st.lists(writings, max_size=4), min_size=1, max_size=3))
def test_a_reopened_database_is_what_a_dictionary_would_be(tmp_path_factory, lives):
    folder = tmp_path_factory.mktemp("store")
    rows, contents, said = {}, {}, 0

    async def live(life):
        store = sqlite_store(folder)
        loaded = store.load()
        assert {(table, key): value for table, kept in loaded.items() for key, value in kept.items()} == rows
        assert await store.read(list(contents)) == list(contents.values())
        assert {type(key) for kept in loaded.values() for key in kept} <= {int, str}
        for writing in life:
            await store.save(writing)
        await store.close()
        return store.queue_id

    names = set()
    for life in [*lives, []]:
        names.add(trio.run(live, life))
        for writing in life:
            rows.update(writing.rows)
            contents.update(writing.contents)
            said += len(writing.events)
        rows = {key: value for key, value in rows.items() if value is not None}
        contents = {key: value for key, value in contents.items() if value is not None}
    assert len(names) == 1
    assert [event["number"] for event in events(folder)] == list(range(1, said + 1))


@pytest.mark.trio
async def test_a_second_process_is_refused_until_the_first_closes(tmp_path):
    store = sqlite_store(tmp_path)
    with pytest.raises(StoreError, match=r"queue\.db: another process"):
        sqlite_store(tmp_path)
    code = (
        "import sys; from pathlib import Path; from lachesis_transport.sqlite_store import SqliteStore;"
        "from lachesis_transport.event_log import EventLog;"
        "SqliteStore(Path(sys.argv[1]), EventLog(Path(sys.argv[2])))"
    )
    args = [sys.executable, "-c", code, str(tmp_path / "queue.db"), str(tmp_path / "events.jsonl")]
    other = subprocess.run(args, capture_output=True, text=True)
    assert "queue.db: another process" in other.stderr
    await store.close()
    await sqlite_store(tmp_path).close()


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    path = tmp_path / "queue.db"
    path.write_bytes(content)
    for _ in range(2):  # the lock is let go
        with pytest.raises(StoreError, match=r"queue\.db: opening failed: "):
            sqlite_store(tmp_path)
    with pytest.raises(StoreError, match=r"queue\.db: "):
        peek(path)
    assert path.read_bytes() == content


@pytest.mark.trio
async def test_a_damaged_database_is_refused(tmp_path):
    store = sqlite_store(tmp_path)
    await store.save(Writing(rows={("t", n): "x" * 400 for n in range(1000)}))
    await store.close()
    path = tmp_path / "queue.db"
    content = path.read_bytes()
    roots = 8 << 14
    assert len(content) > 2 * roots
    path.write_bytes(content[:roots] + b"\xa5" * (len(content) - roots))
    store = sqlite_store(tmp_path)
    with pytest.raises(StoreError, match=r"queue\.db: loading failed: "):
        store.load()
    await store.close()


@pytest.mark.parametrize("lost", ["queue.db", "queue.db-wal"])
@pytest.mark.trio
async def test_a_database_that_is_older_than_its_events_is_refused(tmp_path, lost):
    store = sqlite_store(tmp_path)
    await store.save(Writing(events=[Event("issued"), Event("issued")]))
    await store.save(Writing(events=[Event("accepted")]))
    if lost == "queue.db":
        await store.close()
    killed = tmp_path / "killed"
    killed.mkdir()
    for path in sorted(tmp_path.glob("*.*")):
        if path.name != lost:
            shutil.copy(path, killed)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"queue\.db: 3 events in .*events\.jsonl \(up to number 3\) are not in"):
            sqlite_store(killed)
    assert [event["number"] for event in events(killed)] == [1, 2, 3]
    (killed / "events.jsonl").rename(killed / "events.old")
    await sqlite_store(killed).close()
    await store.close()


@pytest.mark.parametrize("name", ["queue.db", "queue.db-wal", "queue.db.lock", "events.jsonl"])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.trio
async def test_files_that_are_removed_under_a_queue_end_it(tmp_path, name, replaced, monkeypatch):
    monkeypatch.setattr("lachesis_transport.sqlite_store.CHECK_SECONDS", 0.0)
    store = sqlite_store(tmp_path)
    await store.save(Writing(events=[Event("issued")]))
    store.check()
    (tmp_path / name).rename(tmp_path / "away")
    if replaced:
        shutil.copy(tmp_path / "away", tmp_path / name)
    with pytest.raises(StoreError, match=f"/{name}: was removed or replaced"):
        store.check()
    with pytest.raises(StoreError, match=r"nothing is saved any more, since: .* was removed or replaced"):
        await store.save(Writing(events=[Event("issued")]))
    await store.close()


@pytest.mark.parametrize("value", [b"\xc1", b"", b"\x01\x02", "text", None])
@pytest.mark.trio
async def test_a_row_that_cannot_be_read_is_named(tmp_path, value):
    store = sqlite_store(tmp_path)
    await store.save(Writing(rows={("group", "3:0"): 1}))
    await store.close()
    with sqlite3.connect(tmp_path / "queue.db") as db:
        db.execute("UPDATE rows SET value = ?", (value,))
    db.close()
    store = sqlite_store(tmp_path)
    with pytest.raises(StoreError, match=r"queue\.db: row group '3:0' is damaged"):
        store.load()
    await store.close()


@pytest.mark.trio
async def test_a_group_that_is_not_as_it_was_saved_is_named(tmp_path):
    store = sqlite_store(tmp_path)
    await store.save(Writing(contents={"1:0": bytes(30_000) + b"here" + bytes(30_000), "2:0": b"whole"}))
    await store.close()
    path = tmp_path / "queue.db"
    path.write_bytes(path.read_bytes().replace(b"here", b"Here"))
    for _ in range(2):
        store = sqlite_store(tmp_path)
        assert await store.read(["2:0"]) == [b"whole"]
        with pytest.raises(StoreError, match=r"queue\.db: group 1:0 is damaged"):
            await store.read(["2:0", "1:0"])
        await store.close()
    assert peek(path).content("2:0") == b"whole"
    with pytest.raises(StoreError, match=r"queue\.db: group 1:0 is damaged"):
        peek(path).content("1:0")


@pytest.mark.trio
async def test_other_schemas_and_other_databases_are_refused(tmp_path):
    await sqlite_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "queue.db") as db:
        db.execute("UPDATE meta SET value = 7 WHERE key = 'schema'")
    db.close()
    for look in (lambda: sqlite_store(tmp_path), lambda: peek(tmp_path / "queue.db")):
        with pytest.raises(StoreError, match=r"queue\.db: schema 7, expected 2"):
            look()
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "queue.db") as db:
        db.execute("CREATE TABLE songs (name)")
    db.close()
    with pytest.raises(StoreError, match=r"queue\.db: a database of something else"):
        sqlite_store(tmp_path / "other")
