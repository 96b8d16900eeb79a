"""The queue's numbers for Prometheus: an HTTP listener beside it, at `queue.metrics_address`.

The queue's tick hands over a snapshot, which is replaced and never changed; a scrape, in a thread of the listener's,
reads the newest one. Nothing of the queue's state is touched from there.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_transport.inspection import first_reasons, ready_ages
from lachesis_transport.ledger import COUNTED
from lachesis_transport.replay import Replay

log = logging.getLogger("lachesis.queue")

PREFIX = "lachesis_queue_"

REQUEST_SECONDS = 5.0
"""Silence after which a scraper is given up."""

FALLING = {"groups_trained"}
"""Counts that fall when a learner goes back to its checkpoint: gauges, since a counter never does."""

HELP = {
    "tickets_issued": "Tickets issued",
    "groups_accepted": "Groups taken in",
    "groups_duplicate": "Puts of a group that the queue had already",
    "groups_invalid": "Groups refused for good",
    "groups_trained": "Groups that the weights are trained with; falls when a learner goes back to its checkpoint",
    "groups_returned": "Groups that were leased or trained and became ready again",
    "groups_committed": "Groups whose effect is in a durable checkpoint",
    "groups_left": "Groups that were ready when the run finished",
    "uses_forgone": "Uses of groups that were planned (staleness.reuse) and did not come",
    "items_skipped": "Prompts given up since several tickets failed over them",
    "puts_refused_full": "Puts answered full: too many bytes held, or no batch has room for a group without a ticket",
    "bound_violations": "Groups trained beyond the staleness bound",
    "frames_refused": "Malformed messages",
    "reports_refused": "Malformed lines for the event log",
    "replies_lost": "Answers that could not be sent; their clients ask again",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue's numbers at one moment. Whoever gets one must not change it."""

    statistics: Mapping[str, Any]
    """`Replay.statistics()`."""
    gauges: Mapping[str, tuple[str, float]]
    """Name -> help and value."""
    ready: Mapping[int | None, int]
    """`ready_ages`."""
    actors: Mapping[str, Mapping[str, float]]
    """Name -> what is known of the actor."""
    environments: Mapping[str, tuple[int, int]]
    """Name -> next item, returned items."""


def snapshot(replay: Replay, *, now: float) -> Snapshot:
    """The numbers of `replay` at `now`."""
    statistics, rules, leased, uncommitted = replay.statistics(), replay.rules, replay.leased, replay.uncommitted
    held = Counter(ticket.actor for ticket in replay.tickets)
    gauges = {
        "open_tickets": ("Tickets whose groups are yet to come", len(replay.tickets)),
        "ready_groups": ("Groups that a batch may take", len(replay.ready)),
        "leased_groups": ("Groups that the learner has at hand", len(leased.groups) if leased else 0),
        "uncommitted_groups": (
            "Groups trained, a use each, and in no checkpoint",
            sum(len(lease.groups) for lease in uncommitted),
        ),
        "held_bytes": ("Bytes of ready and leased groups", replay.bytes_held),
        "held_limit_bytes": ("queue.max_bytes: from there on puts are answered full", rules.max_bytes),
        "uncommitted_bytes": ("Bytes of trained groups that no checkpoint holds", replay.bytes_uncommitted),
        "uncommitted_limit_bytes": ("queue.max_uncommitted_bytes", rules.max_uncommitted_bytes),
        "batch_groups": ("B: groups a batch", rules.batch_groups),
        "live_actors": ("Actors that are heard", len(replay.actors)),
        "live_learners": ("Learners that are heard: 0 or 1", int(replay.learner is not None)),
        "steps_trained": ("Batches trained; falls when a learner goes back to its checkpoint", replay.step),
        "steps": ("Batches of the run", rules.steps),
        "finished": ("1 once the run has finished", int(replay.final is not None)),
        "staleness_bound_versions": ("S: versions that a trained token may be old at most", rules.staleness_max),
        "staleness_trained_versions": ("Largest staleness of a trained token", statistics["staleness_max"]),
    }
    current = replay.lineage.current
    if current is not None:
        gauges["version"] = ("Newest published policy version", current)
        gauges["version_depth"] = ("Its depth in the lineage tree", replay.lineage.depth(current))
    actors: dict[str, dict[str, float]] = {}
    for name, actor in replay.actors.items():
        actors[name] = {
            "groups_accepted": actor.accepted,
            "groups_per_second": actor.rate.a_second(now),
            "silence_seconds": max(0.0, now - actor.heard),
            "open_tickets": held[name],
        }
        if actor.version is not None:
            actors[name]["version"] = actor.version
    streams = {name: (stream.next, len(stream.returned)) for name, stream in replay.items.streams.items()}
    return Snapshot(statistics, gauges, ready_ages(replay), actors, streams)


class QueueMetrics(Collector):
    """Makes metrics of the newest snapshot; `observe` hands it over."""

    def __init__(self, *, address: str, run_name: str, queue_id: str) -> None:
        self.address = address
        """HOST:PORT to listen at; the real one while it is served."""
        self._info = {"run": run_name, "queue": queue_id}
        self._newest: Snapshot | None = None

    @classmethod
    def of(cls, config: Config, queue_id: str) -> QueueMetrics | None:
        """Those that a configuration asks for."""
        address = config.queue.metrics_address
        return None if address is None else cls(address=address, run_name=config.run.name, queue_id=queue_id)

    def observe(self, replay: Replay, *, now: float) -> None:
        """Show the numbers of `replay` from now on."""
        self._newest = snapshot(replay, now=now)

    def describe(self) -> list[Metric]:
        """No metrics yet: they are collected when they are asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric, of one snapshot."""
        newest = self._newest
        yield InfoMetricFamily(PREFIX + "run", "Which run and which queue this is", self._info)
        if newest is None:
            return
        for name in COUNTED:
            kind = GaugeMetricFamily if name in FALLING else CounterMetricFamily
            yield kind(PREFIX + name, HELP.get(name, name.replace("_", " ")), newest.statistics[name])
        yield _by_reason("tickets_voided", "Tickets voided, by reason", newest.statistics["tickets_voided"])
        yield _by_reason("groups_dropped", "Groups dropped, by reason", newest.statistics["groups_dropped"])
        for name, (text, value) in newest.gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        ages = "Ready groups by their staleness, in versions, in the next batch; older: beyond the bound"
        ready = GaugeMetricFamily(PREFIX + "ready_groups_by_staleness", ages, labels=["staleness"])
        for age, number in newest.ready.items():
            ready.add_metric(["older" if age is None else str(age)], number)
        yield ready
        yield from _of_actors(newest.actors)
        following = GaugeMetricFamily(
            PREFIX + "environment_next_item", "Lowest prompt number that was never issued", labels=["environment"]
        )
        returned = GaugeMetricFamily(
            PREFIX + "environment_returned_items", "Prompts given back, to be issued next", labels=["environment"]
        )
        for name, (number, back) in newest.environments.items():
            following.add_metric([name], number)
            returned.add_metric([name], back)
        yield following
        yield returned


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(PREFIX + name, text, labels=["reason"])
    for reason, number in first_reasons(counts).items():
        metric.add_metric([reason], number)
    return metric


def _of_actors(actors: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    accepted = CounterMetricFamily(
        PREFIX + "actor_groups_accepted", "Groups taken from an actor since it said hello", labels=["actor"]
    )
    gauges = {
        "groups_per_second": "Groups taken from an actor, a second, over about the last minute",
        "silence_seconds": "Seconds since an actor was heard",
        "open_tickets": "Open tickets of an actor",
        "version": "Policy version that an actor serves",
    }
    families = {key: GaugeMetricFamily(f"{PREFIX}actor_{key}", text, labels=["actor"]) for key, text in gauges.items()}
    for name, values in actors.items():
        accepted.add_metric([name], values["groups_accepted"])
        for key, family in families.items():
            if key in values:
                family.add_metric([name], values[key])
    yield accepted
    yield from families.values()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug("metrics: " + format, *arguments)


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a request from %s was broken off", client_address, exc_info=True)


@contextmanager
def serve_metrics(metrics: QueueMetrics | None) -> Iterator[None]:
    """Answer scrapes of `metrics`, if there are any, while the block runs. Raises ConfigError when it cannot listen."""
    if metrics is None:
        yield
        return
    host, _, port = metrics.address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server = make_server(host, int(port), make_wsgi_app(registry), _Server, handler_class=_Handler)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise ConfigError(
            [f"queue.metrics_address: value {metrics.address!r} {reason}, expected a free port"]
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        metrics.address = f"{host}:{server.server_port}"
        log.info("metrics for Prometheus are at http://%s/metrics", metrics.address)
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
