"""What the engine was doing when: generating, idle or paused. Pure: time comes in as an argument, in unix seconds."""

from __future__ import annotations

from typing import Any, Literal

State = Literal["generating", "idle", "paused"]

MAX_INTERVALS = 512
"""Intervals kept between two reports; later ones then extend the last (a bound, not a measurement)."""


class Activity:
    """Intervals of the engine's states and tokens sampled since the last report."""

    def __init__(self, *, now: float) -> None:
        self._requests = 0
        self._paused = False
        self._tokens = 0
        self._start = now
        self._intervals: list[tuple[State, float, float]] = []
        self._since = now
        self._state: State = "idle"

    @property
    def requests(self) -> int:
        """Requests that the engine works on."""
        return self._requests

    def begin(self, *, now: float) -> None:
        """A request goes to the engine."""
        self._requests += 1
        self._change(now)

    def end(self, *, tokens: int, now: float) -> None:
        """A request ended, having sampled `tokens`."""
        self._requests -= 1
        self._tokens += tokens
        self._change(now)

    def pause(self, paused: bool, *, now: float) -> None:
        """The engine was paused or resumed."""
        self._paused = paused
        self._change(now)

    def _change(self, now: float) -> None:
        state: State = "paused" if self._paused else "generating" if self._requests else "idle"
        if state != self._state and len(self._intervals) < MAX_INTERVALS:
            self._close(now)
            self._state = state

    def _close(self, now: float) -> None:
        if now > self._since:
            self._intervals.append((self._state, self._since, now))
        self._since = now

    def drain(self, *, now: float) -> dict[str, Any]:
        """The report of the time since the last one: start, end, tokens, intervals [[state, start, end], ...]."""
        self._close(now)
        report = {
            "start": self._start,
            "end": now,
            "tokens": self._tokens,
            "intervals": [list(interval) for interval in self._intervals],
        }
        self._start, self._tokens, self._intervals = now, 0, []
        self._change(now)
        return report
