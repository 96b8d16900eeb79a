from __future__ import annotations

import logging

import pytest

from lachesis_transport.rare_log import RareLog

LOGGER = logging.getLogger("lachesis.test")


@pytest.mark.parametrize("lines", [1, 3])
def test_a_flood_leaves_few_lines_and_all_are_counted(caplog: pytest.LogCaptureFixture, lines: int) -> None:
    now = 0.0
    rare = RareLog(LOGGER, lines=lines, seconds=60.0, clock=lambda: now)
    for i in range(6000):
        now = i / 50
        rare.warning("refused: %s", i)
    first = [f"refused: {i}" for i in range(lines)]
    second = [f"refused: 3000 (and {3000 - lines} like it before)", *(f"refused: {3000 + i}" for i in range(1, lines))]
    assert [record.getMessage() for record in caplog.records] == first + second
    assert rare.count == 6000


def test_rare_events_are_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    rare = RareLog(LOGGER, clock=lambda: now)
    for i in range(3):
        now = 60.0 * i
        rare.info("joined: 100%")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "joined: 100%")] * 3
