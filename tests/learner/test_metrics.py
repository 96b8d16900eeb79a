from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lachesis_learner.metrics import MetricsWriter, Phases


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_and_its_numbers_are_events(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        written = metrics.write(
            {
                "step": 1,
                "loss": 0.5,
                "mismatch_kl": None,
                "reward_mean": math.nan,
                "kl_by_staleness": {"0": 0.25, "1": math.inf},
                "staleness_histogram": [3, 0, 1],
                "phases": [("wait", 1.0, 2.0)],
            }
        )
    assert written == _lines(tmp_path / "metrics.jsonl")[0]
    assert written == {
        "step": 1,
        "loss": 0.5,
        "mismatch_kl": None,
        "reward_mean": None,
        "kl_by_staleness": {"0": 0.25, "1": None},
        "staleness_histogram": [3, 0, 1],
        "phases": [["wait", 1.0, 2.0]],
    }
    assert _events(tmp_path) == {"step": [(1, 1.0)], "loss": [(1, 0.5)], "kl_by_staleness/0": [(1, 0.25)]}


def test_a_resumed_run_moves_the_steps_away_that_it_repeats(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(1, 5):
            metrics.write({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    with MetricsWriter(tmp_path, step=2) as metrics:
        metrics.write({"step": 3, "loss": 30.0})
    assert [(line["step"], line["loss"]) for line in _lines(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]
    abandoned = (tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()
    assert abandoned == ['{"step": 3, "loss": 3.0}', '{"step": 4, "loss": 4.0}', '{"step": 5, "lo']
    assert _events(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_phases_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lachesis_learner.metrics.time.time", lambda: now[0])
    phases = Phases()
    for name, seconds in (("wait", 1.0), ("step", 2.0), ("step", 4.0)):
        with phases.phase(name):
            now[0] += seconds
    assert phases.intervals == [("wait", 100.0, 101.0), ("step", 101.0, 103.0), ("step", 103.0, 107.0)]
    assert (phases.seconds("step"), phases.seconds("encode"), phases.elapsed) == (6.0, 0, 7.0)
