from __future__ import annotations

import importlib.util
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_transport.broker import serve_queue
from lachesis_transport.client import queue_status
from lachesis_transport.consumer import open_consumer
from lachesis_transport.decisions import Rules
from lachesis_transport.ledger import COUNTED
from lachesis_transport.metrics import FALLING, HELP, PREFIX, QueueMetrics, serve_metrics
from lachesis_transport.producer import open_producer
from lachesis_transport.replay import Replay

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)

SECONDS = 20


def scrape(address: str) -> dict:
    """(name, labels) -> value of every sample at HOST:PORT."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(s.name.removeprefix(PREFIX), tuple(sorted(s.labels.items()))): s.value for s in samples}
    assert len(found) == len(samples)
    assert all(s.name.startswith(PREFIX) for s in samples)
    return found


def value(samples: dict, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def metrics():
    return QueueMetrics(address="127.0.0.1:0", run_name="test", queue_id="q")


def queue() -> Replay:
    replay = Replay(Rules(batch_groups=2, staleness_max=1, steps=9))
    for role, name in (("actor", "a"), ("actor", "b"), ("learner", "l")):
        replay.join(role=role, name=name, incarnation="1", now=0.0)
    replay.published(replay.reserve(parent=None, key="k"))
    replay.heard(role="actor", name="a", incarnation="1", now=1.0, version=0)
    for ask in range(3):
        number = replay.ticket(actor="a", ask=ask, version=0, environment="sums", now=1.0).ticket
        group = groups.group(number, [0])
        assert replay.put(group, group.pack(), actor="a", final=True, now=1.0).status == "accepted"
    number = replay.ticket(actor="b", ask=1, version=0, environment='w"o\nrds', now=1.0).ticket
    replay.void(actor="b", ticket=number, reason="no_variance", scores=None, now=1.0)
    replay.ticket(actor="b", ask=2, version=0, environment="sums", now=1.0)
    replay.lease(version=0, now=1.0)
    replay.trained(version=0)
    replay.count("frames_refused", 4)
    return replay


def test_a_scrape_says_what_the_statistics_say(metrics):
    replay = queue()
    metrics.observe(replay, now=2.0)
    with serve_metrics(metrics):
        samples = scrape(metrics.address)
    statistics = replay.statistics()
    for name in COUNTED:
        assert value(samples, name if name in FALLING else f"{name}_total") == statistics[name], name
    assert value(samples, "groups_trained") == 2
    assert value(samples, "tickets_voided_total", reason="no_variance") == 1
    for name, key in (
        ("ready_groups", "ready"),
        ("leased_groups", "leased"),
        ("held_bytes", "bytes_held"),
        ("uncommitted_bytes", "bytes_uncommitted"),
        ("staleness_trained_versions", "staleness_max"),
        ("steps_trained", "step"),
        ("version", "current"),
    ):
        assert value(samples, name) == statistics[key], name
    assert value(samples, "uncommitted_groups") == 2
    assert value(samples, "open_tickets") == 1
    assert (value(samples, "live_actors"), value(samples, "live_learners"), value(samples, "finished")) == (2, 1, 0)
    assert value(samples, "held_limit_bytes") == replay.rules.max_bytes
    assert [value(samples, "ready_groups_by_staleness", staleness=s) for s in ("0", "1", "older")] == [0, 1, 0]
    assert value(samples, "actor_groups_accepted_total", actor="a") == 3
    assert value(samples, "actor_groups_per_second", actor="a") == pytest.approx(3 / 60, rel=0.05)
    assert value(samples, "actor_silence_seconds", actor="a") == 1
    assert value(samples, "actor_open_tickets", actor="b") == 1
    assert value(samples, "actor_version", actor="a") == 0
    assert ("actor_version", (("actor", "b"),)) not in samples
    assert value(samples, "environment_next_item", environment="sums") == 4
    assert value(samples, "environment_returned_items", environment='w"o\nrds') == 1
    assert value(samples, "run_info", run="test", queue="q") == 1


def test_every_count_has_a_text():
    assert set(HELP) == set(COUNTED)


def test_a_snapshot_stays_what_it_was(metrics):
    replay = queue()
    metrics.observe(replay, now=2.0)
    with serve_metrics(metrics):
        before = scrape(metrics.address)
        replay.count("frames_refused")
        replay.leave(role="actor", name="a")
        assert scrape(metrics.address) == before
        metrics.observe(replay, now=2.0)
        after = scrape(metrics.address)
    assert value(after, "frames_refused_total") == value(before, "frames_refused_total") + 1
    assert value(after, "live_actors") == 1


def test_before_the_first_snapshot_only_the_name_is_known(metrics):
    with serve_metrics(metrics):
        assert list(scrape(metrics.address)) == [("run_info", (("queue", "q"), ("run", "test")))]


def test_an_address_in_use_is_an_error_that_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        metrics = QueueMetrics(address=address, run_name="test", queue_id="q")
        with pytest.raises(ConfigError) as error, serve_metrics(metrics):
            pass
    assert list(error.value.lines) == [f"queue.metrics_address: value '{address}' is in use, expected a free port"]


def test_a_client_that_says_nothing_holds_nobody_up(metrics):
    with serve_metrics(metrics):
        host, _, port = metrics.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            assert scrape(metrics.address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(serve_forever)")]


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "192.168.0.7:9464", "example.org:9464", "127.0.0.1:65536", "9464"])
def test_only_loopback_is_allowed(address):
    with pytest.raises(ValueError, match="metrics_address"):
        Config.model_validate({"queue": {"metrics_address": address}})


@pytest.mark.trio
async def test_a_queue_is_scraped_while_it_serves(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = Config.model_validate({"queue": {"address": "tcp://127.0.0.1:0", "metrics_address": address}})
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            queue_address = await nursery.start(serve_queue, config, tmp_path)
            async with (
                open_consumer(queue_address, "learner", "l1") as consumer,
                open_producer(queue_address, "actor-0", "a1") as producer,
            ):
                await consumer.published(await consumer.reserve(None))
                ticket = await producer.ticket(version=0, environment="sums")
                assert (await producer.put(groups.group(ticket.ticket, [0], actor="actor-0"))).status == "accepted"
                statistics = await queue_status(queue_address)
                while True:
                    samples = await trio.to_thread.run_sync(scrape, address)
                    if samples.get(("ready_groups", ())):
                        break
                    await trio.sleep(0.05)
                assert value(samples, "groups_accepted_total") == statistics["groups_accepted"] == 1
                assert value(samples, "actor_groups_accepted_total", actor="actor-0") == 1
            nursery.cancel_scope.cancel()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.partition(":")[0], int(address.partition(":")[2])))
