"""What became of every step and every group of a run, also when roles died and came back: set arithmetic over ids."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lachesis_deploy.records import Record, number, of_kind


def lasting(metrics: list[Record]) -> list[Record]:
    """The steps whose effect is in the newest policy, ascending: a line of step n undoes earlier ones from n on.

    A learner that dies loses the steps since its checkpoint, and the one that comes back trains them again.
    """
    kept: list[Record] = []
    for record in metrics:
        step = number(record, "step")
        if step is None:
            continue
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(record)
    return kept


def audit(metrics: list[Record], events: list[Record], *, reuse: int = 1) -> dict[str, Any]:
    """Where every group went: the fields groups_trained, _lost, _duplicated, _unknown and _left of a summary.

    Of the two records of what was trained, the learner's (`metrics`, only lasting steps) and the queue's, neither may
    show a group more than `reuse` times.
    """
    times_trained = Counter(group for record in metrics for group in record.get("group_ids") or [])
    duplicated = {g for counts in (times_trained, _given(events)) for g, times in counts.items() if times > reuse}
    accepted = {event.get("group") for event in of_kind(events, "accepted")}
    dropped = {event.get("group") for event in of_kind(events, "dropped")}
    left = {event.get("group") for event in of_kind(events, "left")}
    ended = _has_ended(events)
    return {
        "groups_trained": times_trained.total(),
        "groups_lost": len(accepted - dropped - left - times_trained.keys()) if ended else None,
        "groups_duplicated": len(duplicated),
        "groups_unknown": len(times_trained.keys() - accepted) if accepted else None,
        "groups_left": len(left) if ended else None,
    }


def _given(events: list[Record]) -> Counter[Any]:
    """How often the queue saw each group trained, in batches that it has not taken back from a learner that died."""
    batches: dict[Any, list[Any]] = {}
    for event in events:
        version, groups = event.get("version"), event.get("groups")
        if event.get("kind") == "returned":
            batches.pop(version, None)
        elif event.get("kind") == "trained" and isinstance(groups, list):
            batches.setdefault(version, []).extend(groups)
    return Counter(group for groups in batches.values() for group in groups)


def _has_ended(events: list[Record]) -> bool:
    """Whether the run has finished and was not continued, with more steps, since."""
    kinds = [event.get("kind") for event in events if event.get("kind") in ("finished", "reopened", "reserved")]
    return bool(kinds) and kinds[-1] == "finished"
