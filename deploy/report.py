"""report.html: one self-contained file that shows what a run did."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lachesis_deploy.records import Record, number, numbers
from lachesis_deploy.summary import (
    Summary,
    actor_intervals,
    evaluation_points,
    learner_phases,
    training_windows,
)

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#2f6db3", "#d9822b", "#3a9a6b", "#c4483f", "#7a5ab5", "#9aa3ad"
SERIES = (BLUE, ORANGE, GREEN, VIOLET, RED, GREY)

PHASE_COLOURS = {
    "wait": "#d8dde3",
    "publish_wait": "#c3cad2",
    "proximal": VIOLET,
    "forward_backward": BLUE,
    "step": GREEN,
    "encode": ORANGE,
    "checkpoint": RED,
    "generating": "#45a5a0",
    "paused": "#d978a5",
    "idle": "#d8dde3",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 2rem auto; max-width: 66rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td:first-child { color: #52606d; white-space: nowrap; } p { color: #52606d; margin: .2rem 0 .6rem; }
img { max-width: 100%; height: auto; } details { margin-top: 2rem; } pre { overflow-x: auto; font-size: 12px; }
"""

STYLE_RC = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3ad",
    "axes.grid": True,
    "grid.color": "#e8ebee",
    "axes.axisbelow": True,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "axes.labelcolor": "#52606d",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.framealpha": 0.8,
    "legend.edgecolor": "none",
    "lines.linewidth": 1.6,
}


def render_report(name: str, summary: Summary, metrics: list[Record], events: list[Record]) -> str:
    """The HTML text of a run's report, with all pictures inside it.

    Args:
        name: title.
        summary: of the same records.
        metrics: lines of metrics.jsonl.
        events: lines of events.jsonl.
    """
    sections: list[tuple[str, str, Callable[[list[Record], list[Record]], Figure | None]]] = [
        ("Reward", "Mean over all groups that ended; dots are evaluations on held-out items.", _reward),
        ("Staleness", f"Of trained tokens, in versions. The bound is {summary.staleness_bound}.", _staleness),
        ("Off-policy correction", "Importance ratios and the share of tokens that were clipped.", _correction),
        ("Optimisation", "Divergence between actors and learner, entropy, gradient norm.", _optimisation),
        ("Who waited for whom", "What learner and actors did; below, a few steps in detail.", _timeline),
        ("Weight deltas", "Bytes that one publication sent, beside the size of all weights.", _deltas),
    ]
    body = [f"<h1>{html.escape(name)}</h1>", _table(summary)]
    with matplotlib.rc_context(STYLE_RC):
        for title, text, draw in sections:
            figure = draw(metrics, events)
            picture = _image(figure, title) if figure is not None else "<p>No records.</p>"
            body.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{picture}")
    raw = html.escape(json.dumps(asdict(summary), indent=2))
    body.append(f"<details><summary>summary.json</summary><pre>{raw}</pre></details>")
    head = f'<meta charset="utf-8"><title>{html.escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _table(summary: Summary) -> str:
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in summary.rows())
    return f"<table>{rows}</table>"


def _image(figure: Figure, title: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def _axes(titles: list[str], *, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """A row of plots against the step."""
    figure = Figure(figsize=(10.5, height), layout="constrained")
    axes = [figure.add_subplot(1, len(titles), i + 1) for i in range(len(titles))]
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title)
        each.set_xlabel("step")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _curve(axes: Axes, metrics: list[Record], key: str, colour: str, label: str | None = None) -> None:
    points = [(x, y) for r in metrics if (x := number(r, "step")) is not None and (y := number(r, key)) is not None]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, label=label, marker="." if len(points) < 40 else None)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _reward(metrics: list[Record], events: list[Record]) -> Figure | None:
    points = evaluation_points(events)
    if not metrics and not points:
        return None
    figure, (axes,) = _axes(["reward and held-out accuracy"])
    _curve(axes, metrics, "reward_mean", BLUE, "reward, all groups")
    _curve(axes, metrics, "trained_reward_mean", GREY, "reward, trained groups")
    # A version has its own number; the step that published it is where it belongs on this axis.
    step_of = {number(r, "published"): number(r, "step") for r in metrics}
    for (environment, values), colour in zip(points.items(), SERIES[1:], strict=False):
        at = [(step_of.get(version, 0 if version == 0 else None), accuracy) for version, accuracy in values]
        shown = [(x, y) for x, y in at if x is not None]
        if shown:
            xs, ys = zip(*shown, strict=True)
            axes.plot(xs, ys, "o", color=colour, markersize=7, label=f"accuracy, {environment}")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _legend(axes)
    return figure


def _staleness(metrics: list[Record], events: list[Record]) -> Figure | None:
    histograms = [r["staleness_histogram"] for r in metrics if r.get("staleness_histogram")]
    if not histograms:
        return None
    figure, (bars, curve) = _axes(["trained tokens by staleness", "by step"])
    total = [sum(h[s] for h in histograms if s < len(h)) for s in range(max(len(h) for h in histograms))]
    bars.bar(range(len(total)), total, color=BLUE, width=0.7)
    bars.set_xticks(range(len(total)))
    bars.set_xlabel("staleness")
    _curve(curve, metrics, "staleness_mean", BLUE, "mean")
    _curve(curve, metrics, "staleness_p95", ORANGE, "95th percentile")
    _curve(curve, metrics, "staleness_max", RED, "largest")
    curve.set_ylim(bottom=0)
    _legend(curve)
    return figure


def _correction(metrics: list[Record], events: list[Record]) -> Figure | None:
    if not metrics:
        return None
    figure, (ratio, largest, clip) = _axes(["ratio, mean", "ratio, largest", "clipped share"])
    _curve(ratio, metrics, "ratio_mean", BLUE)
    _curve(largest, metrics, "ratio_max", BLUE)
    _curve(clip, metrics, "clip_fraction_positive", BLUE, "positive advantage")
    _curve(clip, metrics, "clip_fraction_negative", ORANGE, "negative advantage")
    clip.set_ylim(bottom=0)
    _legend(clip)
    return figure


def _optimisation(metrics: list[Record], events: list[Record]) -> Figure | None:
    if not metrics:
        return None
    figure, (kl, entropy, norm) = _axes(["divergence (KL) by staleness", "entropy", "gradient norm"])
    staleness = sorted({key for r in metrics for key in r.get("kl_by_staleness") or {}}, key=lambda key: float(key))
    for key, colour in zip(staleness, SERIES, strict=False):
        by_key = [{"step": r.get("step"), "kl": (r.get("kl_by_staleness") or {}).get(key)} for r in metrics]
        _curve(kl, by_key, "kl", colour, f"staleness {key}")
    if not staleness:
        _curve(kl, metrics, "mismatch_kl", BLUE, "staleness 0")
    _curve(entropy, metrics, "entropy", BLUE)
    _curve(norm, metrics, "grad_norm", BLUE)
    _legend(kl)
    return figure


def _timeline(metrics: list[Record], events: list[Record]) -> Figure | None:
    actors = actor_intervals(events)
    rows = [("learner", learner_phases(metrics)), *sorted(actors.items())]
    if not training_windows(metrics):
        return None
    begin = min(start for _, intervals in rows for _, start, _ in intervals)
    finish = max(end for _, intervals in rows for _, _, end in intervals)
    parts = [(begin, finish)]
    if len(metrics) > 8:
        middle = metrics[len(metrics) // 2 - 2 : len(metrics) // 2 + 2]
        spans = learner_phases(middle)
        if spans:
            parts.append((min(start for _, start, _ in spans), max(end for _, _, end in spans)))
    figure = Figure(figsize=(10.5, len(parts) * (1.0 + 0.42 * len(rows))), layout="constrained")
    used: dict[str, Any] = {}
    for i, (start, end) in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, i + 1)
        for y, (_, intervals) in enumerate(rows):
            by_name: dict[str, list[tuple[float, float]]] = {}
            for name, since, until in intervals:
                if until > start and since < end:
                    since, until = max(since, start), min(until, end)
                    by_name.setdefault(name, []).append((since - begin, until - since))
            for name, bars in by_name.items():
                colour = PHASE_COLOURS.get(name, GREY)
                used[name] = axes.broken_barh(bars, (y - 0.35, 0.7), facecolors=colour, label=name)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_xlim(start - begin, end - begin)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds")
    figure.legend(used.values(), used.keys(), loc="outside lower center", ncols=min(9, max(1, len(used))))
    return figure


def _deltas(metrics: list[Record], events: list[Record]) -> Figure | None:
    if not numbers(metrics, "delta_bytes"):
        return None
    figure, (size, share) = _axes(["delta, MB", "share of weights that changed, %"])
    megabytes = [{"step": r.get("step"), "mb": (number(r, "delta_bytes") or 0.0) / 1e6} for r in metrics]
    _curve(size, megabytes, "mb", BLUE)
    full = numbers(metrics, "full_bytes")
    if full:
        size.set_title(f"delta, MB (all weights: {full[-1] / 1e6:,.1f} MB)")
    size.set_ylim(bottom=0)
    percent = [
        {"step": r.get("step"), "percent": 100 * value}
        for r in metrics
        if (value := number(r, "changed_share")) is not None
    ]
    _curve(share, percent, "percent", BLUE)
    share.set_ylim(bottom=0)
    return figure
