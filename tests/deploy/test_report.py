from __future__ import annotations

import base64
import re

from lachesis_deploy.report import render_report
from lachesis_deploy.summary import summarise

SECTIONS = 6


def run(steps):
    metrics, events = [], []
    for n in range(1, steps + 1):
        t = 10.0 * n
        phases = [["wait", t, t + 2], ["forward_backward", t + 2, t + 8], ["step", t + 8, t + 9]]
        metrics.append(
            {
                "step": n,
                "published": n,
                "time": t,
                "reward_mean": n / steps,
                "trained_reward_mean": n / steps,
                "staleness_histogram": [50, 30, 5],
                "staleness_mean": 0.5,
                "staleness_p95": 1,
                "staleness_max": 2,
                "ratio_mean": 1.0,
                "ratio_max": 1.5,
                "clip_fraction_positive": 0.01,
                "clip_fraction_negative": 0.02,
                "kl_by_staleness": {"0": 0.001, "1": 0.002},
                "entropy": 1.0,
                "grad_norm": 0.5,
                "delta_bytes": 1e6,
                "full_bytes": 2.7e8,
                "changed_share": 0.02,
                "phases": phases,
            }
        )
        intervals = [["generating", t, t + 7], ["paused", t + 7, t + 7.2], ["idle", t + 7.2, t + 10]]
        events.append({"kind": "activity", "source": "actor-0", "start": t, "end": t + 10, "intervals": intervals})
    events.append({"kind": "evaluation", "environment": "<sums>", "version": 0, "metrics": {"accuracy": 0.2}})
    events.append({"kind": "evaluation", "environment": "<sums>", "version": steps, "metrics": {"accuracy": 0.8}})
    return metrics, events


def test_one_file_with_every_picture_inside():
    metrics, events = run(12)
    text = render_report("a <run>", summarise(metrics, events, None, staleness_bound=2), metrics, events)
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == SECTIONS
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert "a &lt;run&gt;" in text
    assert "<run>" not in text
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_a_run_that_has_just_begun_has_a_report():
    text = render_report("run", summarise([], [], None, staleness_bound=None), [], [])
    assert text.count("No records.") == SECTIONS
    one, _ = run(1)
    text = render_report("run", summarise(one, [], None, staleness_bound=2), one, [])
    assert text.count("<img") == SECTIONS


def test_missing_values_leave_gaps():
    metrics, events = run(3)
    metrics[1] = {"step": 2}
    metrics[2].update(ratio_mean=None, kl_by_staleness=None, phases=None, staleness_histogram=None)
    text = render_report("run", summarise(metrics, events, None, staleness_bound=2), metrics, events)
    assert text.count("<img") == SECTIONS
