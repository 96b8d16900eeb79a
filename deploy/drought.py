"""Noticing that groups end, but none of them gives the learner anything to train on."""

from __future__ import annotations

import time
from typing import Any

from lachesis_deploy.records import Record, number

LEAST_GROUPS, LEAST_SECONDS = 16, 30.0
"""Groups that end one after another without one to train on, and the time that this takes, before it is worth a line: a
policy that has nearly learned its task makes a few dozen of them now and then."""
REMIND_SECONDS = 60.0
"""Time between two lines at least."""

_WORDS = {
    "no_variance": "with equal scores throughout, so without advantages",
    "dropped_by_environment": "dropped by their environment",
    "failed": "failed in their environment",
}
_ENDED_FROM_OUTSIDE = {"cancelled", "client_gone", "late", "no_item", "released"}
"""Reasons that say nothing about the group; with those that name an actor's end."""


class Drought:
    """Follows the queue's statistics.

    `groups`: how many have to end in a row, none of them accepted by the queue. Twice a batch is a good number, and at
    least LEAST_GROUPS count.
    """

    def __init__(self, *, groups: int) -> None:
        self.groups = max(groups, LEAST_GROUPS)
        self.text: str | None = None
        """What is going on, None while groups are accepted."""
        self._accepted: float | None = None
        self._before: dict[str, int] = {}
        self._since = 0.0
        self._said: float | None = None

    def look(self, statistics: Record, *, now: float) -> str | None:
        """Take queue.json at Unix time `now`; returns a line when there is something to say again."""
        accepted, voided = number(statistics, "groups_accepted"), _voided(statistics)
        if accepted is None:
            return None
        if accepted != self._accepted:
            self._accepted, self._before, self._since, self.text = accepted, voided, now, None
            return None
        lost = {reason: n for reason, count in voided.items() if (n := count - self._before.get(reason, 0)) > 0}
        if sum(lost.values()) < self.groups or now - self._since < LEAST_SECONDS:
            return None
        counts = ", ".join(f"{n} {_WORDS.get(reason, f'ended as {reason}')}" for reason, n in lost.items())
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        self.text = f"no group to train on since {since}: {counts}"
        if self._said is not None and now - self._said < REMIND_SECONDS:
            return None
        self._said = now
        return self.text


def _voided(statistics: Record) -> dict[str, int]:
    reasons: Any = statistics.get("tickets_voided")
    if not isinstance(reasons, dict):
        return {}
    return {
        reason: int(count)
        for reason in reasons
        if reason not in _ENDED_FROM_OUTSIDE
        and not reason.startswith("actor_")
        and (count := number(reasons, reason)) is not None
    }
