"""What a run did, in numbers: summary.json from what its roles wrote.

Everything here is computed from the records themselves. Where a record is missing the value is None, never a guess.
That no group was lost or trained twice is shown by set arithmetic over the ids that the queue accepted and the learner
trained, not taken from anybody's counter.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lachesis_deploy.audit import audit, lasting
from lachesis_deploy.intervals import Interval, intersection, length, union
from lachesis_deploy.records import Record, number, numbers, of_kind

WAITING = frozenset({"wait", "publish_wait"})
"""Phases of the learner in which it does not compute."""

BREAK_SECONDS = 2.0
"""A learner that goes on is faster than this from one step to the next; one that comes back is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The fields of summary.json."""

    steps: int
    """Batches trained."""
    seconds: float | None
    """From the first record to the last."""
    reward_first: float | None
    """Mean reward of all groups that ended, over the first tenth of the steps (at least one)."""
    reward_last: float | None
    """The same over the last tenth."""
    eval_before: float | None
    """Greedy accuracy on held-out items, first evaluation. The environment is the first one that was evaluated."""
    eval_before_version: int | None
    """Version of that evaluation."""
    eval_after: float | None
    """Last evaluation; None when no second version was evaluated."""
    eval_after_version: int | None
    """Version of that evaluation."""
    staleness_bound: int | None
    """S of the configuration."""
    staleness_max: int | None
    """Largest staleness of a trained token."""
    staleness_mean: float | None
    """Mean over steps of the mean staleness of trained tokens."""
    bound_violations: int | None
    """Steps with a token above the bound, or the queue's own count where that is larger."""
    groups_trained: int
    """Groups in trained batches."""
    groups_lost: int | None
    """Groups that the queue accepted and that were neither trained nor dropped nor left over; None before the end."""
    groups_duplicated: int
    """Groups that were trained more often than `staleness.reuse`. What a learner lost when it died, and trained again,
    counts once."""
    groups_unknown: int | None
    """Groups that were trained without having been accepted."""
    groups_left: int | None
    """Groups that were ready when the run ended and did not fit into its last batch."""
    groups_dropped: dict[str, int] | None
    """Groups that the queue dropped, by reason."""
    tickets_voided: dict[str, int] | None
    """Tickets that were given back or expired, by reason."""
    delta_bytes_mean: float | None
    """Bytes of a published weight delta."""
    full_bytes: int | None
    """Bytes of all weights."""
    checksum_mismatches: int | None
    """Activations whose weights were not bitwise the learner's."""
    weight_files_damaged: int | None
    """Files of the version log that no learner could go on from: torn, damaged or of another model."""
    pause_seconds_mean: float | None
    """Pause of generation for an activation, the first one of an actor, before it generates, left out."""
    learner_tokens_per_second: float | None
    """Trained tokens by the time from the first lease to the end of training."""
    actor_tokens_per_second: float | None
    """Sampled tokens in that time by it, all actors together."""
    learner_idle_share: float | None
    """Share of that time in which the learner waited."""
    actor_idle_share: float | None
    """Share of the actors' recorded time in it in which nothing was generated."""
    overlap_share: float | None
    """Share of that time in which the learner computed and an actor generated at once."""
    mismatch_kl: float | None
    """Mean over steps of the divergence between the actors' and the learner's log-probs at staleness 0."""
    stale_tokens_trained: int | None
    """Trained tokens with a staleness above 0."""
    evaluations: list[dict[str, Any]]
    """Every evaluation: time, environment, version, metrics."""

    def to_json(self) -> str:
        """The text of summary.json."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    def rows(self) -> Iterator[tuple[str, str]]:
        """What the closing table shows: name and value."""
        yield "steps", f"{self.steps} in {_shown(self.seconds, '.0f')} s"
        yield "reward", f"{_shown(self.reward_first, '.3f')} -> {_shown(self.reward_last, '.3f')}"
        yield (
            "held-out accuracy",
            f"{_shown(self.eval_before, '.3f')} (version {_shown(self.eval_before_version)}) -> "
            f"{_shown(self.eval_after, '.3f')} (version {_shown(self.eval_after_version)})",
        )
        yield (
            "staleness",
            f"max {_shown(self.staleness_max)}, mean {_shown(self.staleness_mean, '.2f')}, "
            f"bound {_shown(self.staleness_bound)}, violations {_shown(self.bound_violations)}",
        )
        yield (
            "groups",
            f"{self.groups_trained} trained, {_shown(self.groups_lost)} lost, {self.groups_duplicated} duplicated, "
            f"dropped {_shown(self.groups_dropped)}",
        )
        ratio = self.full_bytes / self.delta_bytes_mean if self.full_bytes and self.delta_bytes_mean else None
        yield (
            "weight delta",
            f"{_megabytes(self.delta_bytes_mean)} of {_megabytes(self.full_bytes)} MB (1/{_shown(ratio, '.0f')}), "
            f"checksum mismatches {_shown(self.checksum_mismatches)}"
            + (f", damaged files {self.weight_files_damaged}" if self.weight_files_damaged else ""),
        )
        yield "pause", f"{_shown(self.pause_seconds_mean, '.3f')} s"
        yield (
            "tokens/s",
            f"learner {_shown(self.learner_tokens_per_second, '.0f')}, "
            f"actors {_shown(self.actor_tokens_per_second, '.0f')}",
        )
        yield (
            "idle",
            f"learner {_shown(self.learner_idle_share, '.0%')}, actors {_shown(self.actor_idle_share, '.0%')}, "
            f"both at work {_shown(self.overlap_share, '.0%')}",
        )

    def print(self) -> None:
        """Print the closing table."""
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in self.rows():
            table.add_row(name, value)
        # A pipe has no width: whole lines there.
        Console(width=None if sys.stdout.isatty() else 240, highlight=False).print(table)


def summarise(
    metrics: list[Record],
    events: list[Record],
    queue: Record | None,
    *,
    staleness_bound: int | None,
    reuse: int = 1,
) -> Summary:
    """The summary of a run.

    Args:
        metrics: lines of metrics.jsonl; those that `lasting` leaves out do not count.
        events: lines of events.jsonl.
        queue: queue.json.
        staleness_bound: S of the configuration.
        reuse: R of the configuration.
    """
    metrics = lasting(metrics)
    rewards = numbers(metrics, "reward_mean")
    tenth = max(1, len(rewards) // 10)
    staleness = numbers(metrics, "staleness_max")
    activations = of_kind(events, "activation")
    times = numbers(metrics, "time") + numbers(events, "time")
    before, after = _first_and_last_evaluation(events)
    return Summary(
        steps=len(metrics),
        seconds=max(times) - min(times) if times else None,
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        eval_before=before[1],
        eval_before_version=before[0],
        eval_after=after[1],
        eval_after_version=after[0],
        staleness_bound=staleness_bound,
        staleness_max=int(max(staleness)) if staleness else None,
        staleness_mean=_mean(numbers(metrics, "staleness_mean")),
        bound_violations=_violations(staleness, queue, staleness_bound),
        **audit(metrics, events, reuse=reuse),
        groups_dropped=_counts(of_kind(events, "dropped"), queue, "groups_dropped"),
        tickets_voided=_counts(of_kind(events, "voided"), queue, "tickets_voided"),
        delta_bytes_mean=_mean(numbers(metrics, "delta_bytes")),
        full_bytes=_last_int(metrics, "full_bytes"),
        checksum_mismatches=len(of_kind(events, "checksum_mismatch")) if activations else None,
        weight_files_damaged=_damaged(events),
        pause_seconds_mean=_mean(numbers(_pauses(events), "pause_seconds")),
        **_time_shares(metrics, events),
        mismatch_kl=_mean(numbers(metrics, "mismatch_kl")),
        stale_tokens_trained=_stale_tokens(metrics),
        evaluations=[
            {key: event.get(key) for key in ("time", "environment", "version", "metrics")}
            for event in of_kind(events, "evaluation")
        ],
    )


def learner_phases(metrics: list[Record]) -> list[tuple[str, float, float]]:
    """(name, start, end) of every phase of the learner, in Unix seconds."""
    return [
        (str(name), float(start), float(end))
        for record in metrics
        for name, start, end in record.get("phases") or []
        if start is not None and end is not None
    ]


def actor_intervals(events: list[Record]) -> dict[str, list[tuple[str, float, float]]]:
    """For every actor (name, start, end) of what it was doing, in Unix seconds."""
    actors: dict[str, list[tuple[str, float, float]]] = {}
    for event in of_kind(events, "activity"):
        rows = actors.setdefault(str(event.get("source")), [])
        rows.extend((str(name), float(start), float(end)) for name, start, end in event.get("intervals") or [])
    return actors


def training_windows(metrics: list[Record]) -> list[Interval]:
    """From the moment the first batch was leased to the end of the last phase; one for each time that a learner ran."""
    parts: list[list[Record]] = []
    end = -math.inf
    for record in metrics:
        phases = learner_phases([record])
        if not phases:
            continue
        if phases[0][1] > end + BREAK_SECONDS:
            parts.append([])
        parts[-1].append(record)
        end = max(number(record, "time") or 0.0, *(until for _, _, until in phases))
    return [window for part in parts if (window := _window(part))[1] > window[0]]


def _window(metrics: list[Record]) -> Interval:
    first = learner_phases(metrics[:1])
    leased = [end for name, _, end in first if name == "wait"] or [start for _, start, _ in first]
    return min(leased), max(end for _, _, end in learner_phases(metrics))


def evaluation_points(events: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """For every environment (version, accuracy), mean over the actors that evaluated a version, by version."""
    found: dict[str, dict[int, list[float]]] = {}
    for event in of_kind(events, "evaluation"):
        version, accuracy = number(event, "version"), number(event.get("metrics") or {}, "accuracy")
        if version is not None and accuracy is not None:
            found.setdefault(str(event.get("environment")), {}).setdefault(int(version), []).append(accuracy)
    return {
        environment: [(version, sum(values) / len(values)) for version, values in sorted(versions.items())]
        for environment, versions in found.items()
    }


def _first_and_last_evaluation(
    events: list[Record],
) -> tuple[tuple[int | None, float | None], tuple[int | None, float | None]]:
    points = next(iter(evaluation_points(events).values()), [])
    none = (None, None)
    return points[0] if points else none, points[-1] if len(points) > 1 else none


def _violations(staleness: list[float], queue: Record | None, bound: int | None) -> int | None:
    seen = sum(s > bound for s in staleness) if bound is not None and staleness else None
    counted = number(queue or {}, "bound_violations")
    known = [int(n) for n in (seen, counted) if n is not None]
    return max(known) if known else None


def _counts(records: list[Record], queue: Record | None, key: str) -> dict[str, int] | None:
    """Records by reason; what the queue counted where its records are not there (None without either)."""
    if records:
        return dict(sorted(Counter(str(record.get("reason")) for record in records).items()))
    counted = (queue or {}).get(key)
    return {str(k): int(v) for k, v in counted.items()} if isinstance(counted, dict) else None


def _time_shares(metrics: list[Record], events: list[Record]) -> dict[str, Any]:
    """Rates and shares over the training windows."""
    names = (
        "learner_tokens_per_second",
        "actor_tokens_per_second",
        "learner_idle_share",
        "actor_idle_share",
        "overlap_share",
    )
    shares: dict[str, Any] = dict.fromkeys(names)
    windows = training_windows(metrics)
    if not windows:
        return shares
    seconds = length(windows)
    trained = numbers(metrics, "tokens")
    computing = _within(windows, ((s, e) for name, s, e in learner_phases(metrics) if name not in WAITING))
    if trained:
        shares["learner_tokens_per_second"] = sum(trained) / seconds
    shares["learner_idle_share"] = 1 - length(computing) / seconds
    actors = actor_intervals(events)
    if not actors:
        return shares
    known = generating = 0.0
    for rows in actors.values():
        known += length(_within(windows, ((s, e) for _, s, e in rows)))
        generating += length(_within(windows, ((s, e) for name, s, e in rows if name == "generating")))
    any_generating = _within(
        windows, ((s, e) for rows in actors.values() for name, s, e in rows if name == "generating")
    )
    shares["actor_tokens_per_second"] = _tokens_sampled(events, windows) / seconds
    shares["actor_idle_share"] = 1 - generating / known if known else None
    shares["overlap_share"] = length(intersection(computing, any_generating)) / seconds
    return shares


def _within(windows: list[Interval], intervals: Iterable[Interval]) -> list[Interval]:
    return intersection(windows, union(intervals))


def _tokens_sampled(events: list[Record], windows: list[Interval]) -> float:
    """Tokens in the windows; a report that straddles an edge counts by its share of time inside."""
    tokens = 0.0
    for event in of_kind(events, "activity"):
        start, end, sampled = number(event, "start"), number(event, "end"), number(event, "tokens")
        if start is None or end is None or sampled is None or end <= start:
            continue
        tokens += sampled * length(intersection(windows, [(start, end)])) / (end - start)
    return tokens


def _damaged(events: list[Record]) -> int | None:
    found = numbers(of_kind(events, "weights_restored"), "damaged")
    return int(sum(found)) if found else None


def _pauses(events: list[Record]) -> list[Record]:
    """Activations in an engine that had served a version before."""
    pauses, serving = [], set()
    for event in events:
        source = event.get("source")
        if event.get("kind") == "started":
            serving.discard(source)
        elif event.get("kind") == "activation":
            if source in serving:
                pauses.append(event)
            serving.add(source)
    return pauses


def _stale_tokens(metrics: list[Record]) -> int | None:
    histograms = [record["staleness_histogram"] for record in metrics if record.get("staleness_histogram") is not None]
    return sum(int(sum(histogram[1:])) for histogram in histograms) if histograms else None


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _last_int(records: list[Record], key: str) -> int | None:
    values = numbers(records, key)
    return int(values[-1]) if values else None


def _shown(value: Any, form: str = "") -> str:
    if value is None:
        return "?"
    if isinstance(value, dict):
        return ", ".join(f"{n} {reason}" for reason, n in value.items()) or "0"
    return format(value, form)


def _megabytes(value: float | None) -> str:
    return _shown(None if value is None else value / 1e6, ".3g")
