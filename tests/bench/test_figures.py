from __future__ import annotations

import json
import sys
import types

import pytest

from lachesis_bench import figures
from lachesis_bench.figures import Figure, bench_names, run_benches

FAST = Figure(
    figure="transport.throughput_1mb",
    value=2000.0,
    unit="MB/s",
    against="raw ZeroMQ, same sizes, same run",
    reference=2400.0,
    ratio=2000 / 2400,
    runs=5,
    spread=0.02,
)
PLAIN = Figure(figure="transport.codec_2048", value=2.5, unit="us")


@pytest.fixture
def bench(monkeypatch):
    module = types.ModuleType("lachesis_bench.transport")
    lengths = []
    module.run = lambda length: lengths.append(length) or [FAST, PLAIN]
    monkeypatch.setitem(sys.modules, "lachesis_bench.transport", module)
    monkeypatch.setattr(figures, "bench_names", lambda: ["transport"])
    return lengths


def test_one_json_object_a_line(bench, capsys):
    assert run_benches("transport", length="short", as_json=True) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert bench == ["short"]
    assert first == {
        "figure": "transport.throughput_1mb",
        "value": 2000.0,
        "unit": "MB/s",
        "against": "raw ZeroMQ, same sizes, same run",
        "reference": 2400.0,
        "ratio": 2000 / 2400,
        "runs": 5,
        "spread": 0.02,
    }
    assert second["ratio"] is None


def test_a_table_for_people(bench, capsys):
    assert run_benches("all", length="normal", as_json=False) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "throughput" in line)
    assert "2000  MB/s" in line
    assert "0.833" in line
    assert "2400 MB/s, raw ZeroMQ, same sizes, same run" in line
    assert "2%" in line


def test_an_unknown_name_is_one_line(bench, capsys):
    assert run_benches("speed", length="short", as_json=True) == 2
    assert capsys.readouterr().err == "lachesis bench: NAME: value 'speed', expected one of transport, all\n"


def test_only_benches_that_exist_are_named():
    assert set(bench_names()) <= set(figures.BENCHES)
