"""The queue as a user starts it: `lachesis queue`, asked by `lachesis status`, inspected, exported and imported."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import yaml

from lachesis_deploy import exchange
from lachesis_deploy.status import ask_status
from lachesis_transport.client import QueueError
from lachesis_transport.consumer import open_consumer
from lachesis_transport.groups_file import read_groups, read_queue_id, write_groups
from lachesis_transport.producer import open_producer

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).parents[1] / "transport" / "groups.py")
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)

LACHESIS = (sys.executable, "-m", "lachesis")


def write_config(path, folder, **queue):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    tree = {"run": {"folder": str(folder)}, "queue": {"address": address, "batch_groups": 4, **queue}}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "run.yaml", tmp_path / "run")


def address_of(config):
    return yaml.safe_load(config.read_text())["queue"]["address"]


def lachesis(*arguments):
    return subprocess.run([*LACHESIS, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_a_queue_answers_refuses_a_twin_and_ends_well(config, tmp_path):
    with (tmp_path / "log").open("w") as log:
        queue = subprocess.Popen([*LACHESIS, "queue", str(config)], stderr=log)
    try:
        deadline = time.monotonic() + 30
        while (answer := lachesis("status", config)).returncode:
            assert time.monotonic() < deadline, answer.stderr
        assert re.search(r"^ready +0$", answer.stdout, re.MULTILINE)
        twin = lachesis("queue", config)
        assert twin.returncode == 2
        assert re.search("queue.address: 'tcp://.*' cannot be bound: Address already in use", twin.stderr)
        assert len(twin.stderr.splitlines()) == 1
    finally:
        queue.terminate()
        assert queue.wait(30) == 0
    assert json.loads((tmp_path / "run" / "queue.json").read_text())["tickets_issued"] == 0
    assert "serves at tcp://127.0.0.1:" in (tmp_path / "log").read_text()


@contextmanager
def running(config, *, stop=signal.SIGTERM):
    """`lachesis queue CONFIG` in a process of its own, until the block ends."""
    log = config.with_suffix(".log")
    with log.open("a") as stderr:
        queue = subprocess.Popen([*LACHESIS, "queue", str(config)], stderr=stderr)
    try:
        assert ask_status(address_of(config), deadline_seconds=30) is not None, log.read_text()
        yield queue
    finally:
        queue.send_signal(stop)
        assert queue.wait(30) == (0 if stop == signal.SIGTERM else -stop)


def fill(config, *, ready=2, trained=True):
    """Have the queue hold 4 groups of a trained batch, unless `trained` is false, and `ready` ready ones."""

    async def work():
        async with (
            open_consumer(address_of(config), "learner", "l") as consumer,
            open_producer(address_of(config), "actor-0", "a") as producer,
        ):
            version = await consumer.reserve(None)
            await consumer.published(version)
            for number in range((4 if trained else 0) + ready):
                ticket = await producer.ticket(version=version, environment="sums")
                group = groups.group(ticket.ticket, [version], actor="actor-0", scores=(1.0, float(number)))
                assert (await producer.put(group)).status == "accepted"
            if trained:
                await consumer.lease(version)
                await consumer.trained(version)

    async def in_time():
        with trio.fail_after(30):
            await work()

    trio.run(in_time)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def inspection(config):
    answer = lachesis("queue", config, "--inspect", "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_a_queue_is_inspected_while_it_runs_and_afterwards(config, tmp_path):
    nothing = lachesis("queue", config, "--inspect")
    assert nothing.returncode == 2
    address, database = address_of(config), tmp_path / "run" / "queue.db"
    assert nothing.stderr == (
        f"lachesis queue: no queue answers at {address} within 2 s, and {database}: there is no such file, "
        f"expected a queue's database\n"
    )
    assert not (tmp_path / "run").exists()
    with running(config, stop=signal.SIGKILL):
        fill(config)
        alive = inspection(config)
        text = lachesis("queue", config, "--inspect").stdout
    assert (alive["source"], alive["address"], alive["run"]) == ("queue", address, "run")
    held = alive["groups"]
    assert (held["ready"], held["leased"], held["uncommitted"]) == (2, 0, 4)
    assert alive["ready_by_staleness"] == [[0, 0], [1, 2], [2, 0], [None, 0]]
    assert alive["counts"]["groups_accepted"] == 6
    assert text.startswith(f"The queue at {address} answered.\n")
    assert re.search(r"^ready +2 ", text, re.MULTILINE)
    assert re.search(r"^sums +6 +0 +0 +100.0% +50.0%$", text, re.MULTILINE)  # the configured environment has the rest
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if not path.name.endswith("-shm")}
    dead = inspection(config)
    text = lachesis("queue", config, "--inspect").stdout
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if not path.name.endswith("-shm")}
    assert after == before
    assert text.startswith(f"No queue answers at {address}: this is what {database} holds, written last at 20")
    assert dead["source"] == "database"
    for key in ("queue", "run", "groups", "versions", "ready_by_staleness", "environments", "uncommitted"):
        assert dead[key] == alive[key], key
    assert dead["counts"] == alive["counts"]


def test_groups_are_exported_and_imported_and_none_is_trained_twice(config, tmp_path):
    file, other = tmp_path / "groups.bin", write_config(tmp_path / "other.yaml", tmp_path / "other")
    assert lachesis("queue", config, "--export", file).returncode == 2
    with running(config):
        fill(config)
        before = inspection(config)
        first = lachesis("queue", config, "--export", file)
        assert first.returncode == 0, first.stderr
        assert first.stdout == f"{file}: 6 groups of queue {before['queue']}\n"
        again = lachesis("queue", config, "--import", file)
        assert again.returncode == 0, again.stderr
        told = "0 accepted, 6 duplicate, 0 stale, 0 invalid"
        assert again.stdout == f"{file}: 6 groups put into the queue at {address_of(config)}: {told}\n"
        after = inspection(config)
        assert after["groups"] == before["groups"]
    exported = list(read_groups(file))
    assert [group.group_id for group in exported] == [f"{number}:0" for number in range(6)]
    assert read_queue_id(file) == before["queue"]
    stopped = lachesis("queue", config, "--export", tmp_path / "stopped.bin")
    assert stopped.returncode == 0, stopped.stderr
    assert (tmp_path / "stopped.bin").read_bytes() == file.read_bytes()
    gone = lachesis("queue", config, "--import", file)
    assert (gone.returncode, "no queue answers at" in gone.stderr) == (2, True)

    with running(other):
        refused = lachesis("queue", other, "--import", file)
        assert refused.returncode == 1
        assert f"{file} comes from queue {before['queue']}: its versions are policies of that" in refused.stdout
        assert "0 accepted, 0 duplicate, 0 stale, 6 invalid\n" in refused.stdout
        assert "  6 invalid: versions: version: 0, expected one that the learner has published (none yet)\n" in (
            refused.stdout
        )
        fill(other, ready=0, trained=False)  # version 0 is published
        taken = lachesis("queue", other, "--import", file)
        assert (taken.returncode, "6 accepted, 0 duplicate" in taken.stdout) == (0, True), taken
        taken = lachesis("queue", other, "--import", file)
        assert (taken.returncode, "0 accepted, 6 duplicate" in taken.stdout) == (0, True), taken
        assert inspection(other)["groups"]["ready"] == 6
    lachesis("queue", other, "--export", tmp_path / "moved.bin")
    moved = list(read_groups(tmp_path / "moved.bin"))
    assert [group.ticket for group in moved] == [None] * 6
    assert [group.trajectories for group in moved] == [group.trajectories for group in exported]
    assert [group.origin for group in moved] == [(before["queue"], group.group_id) for group in exported]
    with running(config):
        back = lachesis("queue", config, "--import", tmp_path / "moved.bin")
        assert (back.returncode, "0 accepted, 6 duplicate" in back.stdout) == (0, True), back


def test_files_that_are_none_are_named(config, tmp_path):
    (tmp_path / "text").write_text("no groups here")
    with running(config):
        missing = lachesis("queue", config, "--import", tmp_path / "missing")
        assert (missing.returncode, missing.stderr.splitlines()[-1]) == (
            2,
            f"lachesis queue: {tmp_path / 'missing'}: No such file or directory",
        )
        other = lachesis("queue", config, "--import", tmp_path / "text")
        assert (other.returncode, other.stdout) == (2, "")
        assert (
            f"{tmp_path / 'text'}: not a file of groups, expected what `lachesis queue --export` writes (its "
            in other.stderr
        )
        fill(config, ready=2, trained=False)
        file = tmp_path / "groups.bin"
        write_groups(file, [groups.group(0, [0], actor="x", scores=(0.5, 0.25))])
        file.write_bytes(file.read_bytes() * 2)
        half = lachesis("queue", config, "--import", file)
        assert (half.returncode, "1 accepted" in half.stdout) == (2, True), half
        assert "group 1:" in half.stderr
    nowhere = lachesis("queue", config, "--export", tmp_path / "no" / "file")
    assert nowhere.stderr == f"lachesis queue: {tmp_path / 'no' / 'file'}: expected a path in a folder that exists\n"
    assert (nowhere.returncode, lachesis("queue", config, "--json").returncode) == (2, 2)


def test_an_import_waits_for_room_and_ends_with_the_queue(config, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(exchange, "AWAY_SECONDS", 1.0)
    monkeypatch.setattr(exchange, "WATCH_SECONDS", 0.1)
    file = tmp_path / "groups.bin"
    write_groups(file, [groups.group(0, [0], scores=(1.0, float(number))) for number in range(13)])
    counts = exchange.Counter()

    async def put(queue):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange._import, address_of(config), None, file, (None, "q"), counts)
            # (S + 1) * B = 12 are enough in progress; for the next one the queue has no room.
            while "waiting for room" not in caplog.text:
                await trio.sleep(0.05)
            queue.kill()

    async def in_time(queue):
        with trio.fail_after(60):
            await put(queue)

    with running(config, stop=signal.SIGKILL) as queue:
        fill(config, ready=0, trained=False)
        with pytest.raises(ExceptionGroup) as error:
            trio.run(in_time, queue)
    assert error.group_contains(QueueError, match="did not answer within 1 s")
    assert counts == {("accepted", ""): 12}
    assert "(the queue is full: 12 groups are ready already;" in caplog.text


def test_metrics_are_served_and_an_address_in_use_is_an_error(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = write_config(tmp_path / "run.yaml", tmp_path / "run", metrics_address=address)
    other = write_config(tmp_path / "other.yaml", tmp_path / "other", metrics_address=address)
    with running(config):
        fill(config)
        deadline = time.monotonic() + 20
        while "\nlachesis_queue_groups_accepted_total 6.0\n" not in scrape(address):
            assert time.monotonic() < deadline
        taken = lachesis("queue", other)
        assert taken.returncode == 2
        told = f"lachesis queue: queue.metrics_address: value '{address}' is in use, expected a free port"
        assert taken.stderr.splitlines()[-1] == told


def test_a_queue_with_keys_is_inspected_with_them_alone(config, tmp_path):
    for name in ("keys", "other"):
        assert lachesis("keys", tmp_path / name).returncode == 0
    tree = yaml.safe_load(config.read_text())
    told = {}
    for name in ("keys", "other"):
        config.write_text(yaml.safe_dump({**tree, "run": {**tree["run"], "keys": str(tmp_path / name)}}))
        told[name] = config.read_text()
    config.write_text(told["keys"])
    queue = subprocess.Popen([*LACHESIS, "queue", str(config)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while lachesis("status", config).returncode:
            assert time.monotonic() < deadline
        assert inspection(config)["source"] == "queue"
        config.write_text(told["other"])
        assert inspection(config)["source"] == "database"
    finally:
        queue.terminate()
        assert queue.wait(30) == 0
