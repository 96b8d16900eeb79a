"""A stop that a signal asks for."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("lachesis.learner")


class Stopped(Exception):
    """A signal asked the learner to stop while it was waiting."""


class Stop:
    """Whether and when SIGTERM or SIGINT came."""

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0
        """time.monotonic() of the signal."""


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note SIGTERM and SIGINT within the block instead of ending at them. To be used on the main thread."""
    stop = Stop()

    def request(number: int, _: object) -> None:
        if not stop.requested:
            stop.requested, stop.since = True, time.monotonic()
            logger.info("%s: stopping at the end of this batch", signal.Signals(number).name)

    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
