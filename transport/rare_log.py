"""A log that a flood of like events cannot fill.

refusals = RareLog(log)
refusals.warning("refused a message: %s", error)        # the first, then one a minute
refusals.count                                          # all of them
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

SECONDS = 60.0


class RareLog:
    """Logs the first events of one kind, and then few; a line says how many were left out since the one before.

    Args:
        logger: where lines go.
        lines: in `seconds`, at most.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        lines: int = 1,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        """Events so far, with those that were left out."""
        self._logger = logger
        self._lines, self._seconds, self._clock = lines, seconds, clock
        self._begun = -math.inf
        self._shown = self._left_out = 0

    def warning(self, text: str, *arguments: object) -> None:
        """Count an event, and log it when it's time."""
        self._log(logging.WARNING, text, arguments)

    def info(self, text: str, *arguments: object) -> None:
        """The same for what is no trouble."""
        self._log(logging.INFO, text, arguments)

    def _log(self, level: int, text: str, arguments: tuple[object, ...]) -> None:
        self.count += 1
        now = self._clock()
        if now - self._begun >= self._seconds:
            self._begun, self._shown = now, 0
        if self._shown == self._lines:
            self._left_out += 1
            return
        self._shown += 1
        if self._left_out:
            text, arguments = f"{text} (and %d like it before)", (*arguments, self._left_out)
            self._left_out = 0
        self._logger.log(level, text, *arguments)
