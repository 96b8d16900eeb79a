"""Figures: what a benchmark measures, how it is printed, and which benchmarks there are.

A benchmark is a module of this package with `run(length) -> list[Figure]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Length = Literal["short", "normal", "long"]
"""How much is measured: for seconds, for a quiet figure, for minutes."""

BENCHES = ("transport", "queue", "chaos", "delta", "publish", "activation", "learner")
"""Modules of this package that may exist, in the order in which `all` runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure, beside the limit that was measured in the same run."""

    figure: str
    """Name, BENCH.WHAT."""
    value: float
    """Median over the runs."""
    unit: str
    """Unit of value and reference."""
    against: str | None = None
    """What the reference is; without one, what the value is of."""
    reference: float | None = None
    """The limit, measured in the same run; None where the figure is a plain value."""
    ratio: float | None = None
    """Value to reference, so that more is better; None without one."""
    runs: int = 1
    """Measurements behind the value."""
    spread: float | None = None
    """Half the distance between the quartiles, relative to the value; None with fewer than 2 runs."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def bench_names() -> list[str]:
    """Benchmarks that exist."""
    return [name for name in BENCHES if importlib.util.find_spec(f"{__package__}.{name}") is not None]


def run_benches(name: str, *, length: Length, as_json: bool) -> int:
    """Run the benchmark `name`, or `all`, and print its figures; returns the exit code (2 for an unknown name)."""
    existing = bench_names()
    if name != "all" and name not in existing:
        print(f"lachesis bench: NAME: value {name!r}, expected one of {', '.join(existing)}, all", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for figure in measured(existing if name == "all" else [name], length=length):
        figures.append(figure)
        if as_json:
            print(figure.to_json(), flush=True)
    if not as_json:
        print_table(figures)
    return 0


def measured(names: Sequence[str], *, length: Length) -> Iterator[Figure]:
    """The figures of the named benchmarks, as they come."""
    for name in names:
        yield from importlib.import_module(f"{__package__}.{name}").run(length)


def print_table(figures: Sequence[Figure]) -> None:
    """Print figures for people."""
    table = Table(box=None, pad_edge=False)
    for title, justify in (
        ("figure", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("ratio", "right"),
        ("to", "left"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title in ("runs", "spread"):
        table.add_column(title, justify="right")
    for f in figures:
        ratio = "" if f.ratio is None else f"{f.ratio:.3g}"
        limit = f.against or "" if f.reference is None else f"{f.reference:.4g} {f.unit}, {f.against}"
        spread = "" if f.spread is None else f"{f.spread:.0%}"
        table.add_row(f.figure, f"{f.value:.4g}", f.unit, ratio, limit, str(f.runs), spread)
    # A pipe has no width: whole lines there.
    Console(width=None if sys.stdout.isatty() else 240, highlight=False).print(table)
