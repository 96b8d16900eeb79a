"""The live view of a run: a panel on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

import trio
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lachesis_configs.schema import Config
from lachesis_deploy.drought import Drought
from lachesis_deploy.folder import LOGS, METRICS
from lachesis_deploy.processes import tail
from lachesis_deploy.records import JsonLines, Record, number, numbers, read_json
from lachesis_transport.queue_files import EVENTS, STATISTICS

RECENT_STEPS = 8
"""Steps whose pace gives the estimate of what is left."""
RECENT_SECONDS = 30.0
"""Time over which the actors' tokens/s is taken."""


class Progress:
    """What is shown of a run. Records go in, text comes out; memory does not grow with the run."""

    def __init__(self, *, steps: int, staleness_bound: int, batch_groups: int) -> None:
        self.steps = steps
        self.drought = Drought(groups=2 * batch_groups)
        self.bound = staleness_bound
        self.queue: Record = {}
        self.evaluations: deque[str] = deque(maxlen=6)
        self._last: Record = {}
        self._times: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._pause: float | None = None
        self._activity: deque[Record] = deque(maxlen=256)

    def step(self, record: Record) -> str:
        """Take a line of metrics.jsonl; returns it as one line for people."""
        self._last = record
        if (at := number(record, "time")) is not None:
            self._times.append(at)
        return "  ".join(
            [
                f"step {_text(record, 'step', 'd')}/{self.steps}",
                f"reward {_text(record, 'reward_mean', '.3f')}",
                f"staleness {self.staleness}",
                f"loss {_text(record, 'loss', '.4f')}",
                f"learner {_text(record, 'tokens_per_second', '.0f')} tok/s",
                f"{_text(record, 'seconds_total', '.1f')} s",
                f"left {self.remaining}",
            ]
        )

    def earlier(self, record: Record) -> None:
        """Take a line of metrics.jsonl from before this part of the run, which tells where it goes on."""
        self._last = record

    def event(self, record: Record) -> str | None:
        """Take a line of events.jsonl; returns a line for people when it is one for them."""
        kind = record.get("kind")
        if kind == "activity":
            self._activity.append(record)
        elif kind == "activation":
            self._pause = number(record, "pause_seconds")
        elif kind == "evaluation":
            values = record.get("metrics") or {}
            shown = ", ".join(f"{name} {value:.3f}" for name in values if (value := number(values, name)) is not None)
            line = f"evaluation of {record.get('environment')} at version {record.get('version')}: {shown}"
            self.evaluations.append(line)
            return line
        elif kind == "checksum_mismatch":
            return f"{record.get('source')}: weights of version {record.get('version')} differ, healing"
        elif kind == "weights_restored" and record.get("damaged"):
            return f"{record.get('source')}: {record['damaged']} damaged files of weights were not used, see its log"
        return None

    @property
    def staleness(self) -> str:
        """Mean and largest staleness of the last batch, and the bound."""
        mean, most = _text(self._last, "staleness_mean", ".2f"), _text(self._last, "staleness_max", ".0f")
        return f"{mean} (max {most} of {self.bound})"

    @property
    def done(self) -> int:
        """Steps trained."""
        return int(number(self._last, "step") or 0)

    @property
    def remaining(self) -> str:
        """Estimate of the time that is left, from the pace of the last steps."""
        if len(self._times) < 2:
            return "?"
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return _clock(pace * max(0, self.steps - self.done))

    @property
    def actor_tokens_per_second(self) -> float | None:
        """All actors together, over the last reports; None before the first."""
        ends = numbers(list(self._activity), "end")
        if not ends:
            return None
        recent = [a for a in self._activity if (number(a, "end") or 0.0) > max(ends) - RECENT_SECONDS]
        starts = numbers(recent, "start")
        span = max(ends) - min(starts) if starts else 0.0
        return sum(numbers(recent, "tokens")) / span if span > 0 else None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what the panel shows."""
        pace = self.actor_tokens_per_second
        return [
            ("step", f"{self.done}/{self.steps}, left {self.remaining}"),
            ("reward", _text(self._last, "reward_mean", ".3f")),
            ("staleness", self.staleness),
            (
                "tokens/s",
                f"learner {_text(self._last, 'tokens_per_second', '.0f')}, "
                f"actors {'?' if pace is None else format(pace, '.0f')}",
            ),
            (
                "queue",
                f"{_text(self.queue, 'ready', '.0f')} groups ready, "
                f"{_text(self.queue, 'live_tickets', '.0f')} tickets live",
            ),
            ("last pause", "?" if self._pause is None else f"{self._pause:.3f} s"),
        ]


async def show_progress(config: Config, folder: Path, *, interval: float = 0.5) -> None:
    """Show the progress of the run in `folder` on stdout until cancelled; what is there already is not told again."""
    progress = Progress(
        steps=config.run.steps, staleness_bound=config.staleness.max, batch_groups=config.queue.batch_groups
    )
    metrics, events = JsonLines(folder / METRICS), JsonLines(folder / EVENTS, skip=True)
    started = time.time()
    told = 0.0
    for record in metrics.read():
        progress.earlier(record)
        told = number(record, "time") or told

    def take_step(record: Record) -> list[str]:
        nonlocal told
        at = number(record, "time")
        if at is not None and at <= told:  # a learner that came back has rewritten the file without what it lost
            progress.earlier(record)
            return []
        told = told if at is None else at
        return [progress.step(record)]

    def refresh() -> list[str]:
        lines = [line for record in metrics.read() for line in take_step(record)]
        lines += [line for record in events.read() if (line := progress.event(record))]
        progress.queue = read_json(folder / STATISTICS) or progress.queue
        if line := progress.drought.look(progress.queue, now=time.time()):
            lines.append(line)
        return lines

    if not sys.stdout.isatty():
        try:
            while True:
                await trio.sleep(interval)
                for line in refresh():
                    print(line, flush=True)
        finally:  # what came in since
            for line in refresh():
                print(line, flush=True)
    with Live(auto_refresh=False) as live:
        try:
            while True:
                refresh()
                live.update(_panel(progress, config, folder, time.time() - started), refresh=True)
                await trio.sleep(interval)
        finally:
            refresh()
            live.update(_panel(progress, config, folder, time.time() - started), refresh=True)


def _panel(progress: Progress, config: Config, folder: Path, seconds: float) -> Panel:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in progress.rows():
        table.add_row(name, Text(value))
    for line in [*list(progress.evaluations)[-2:], *([progress.drought.text] if progress.drought.text else [])]:
        table.add_row("", Text(line))
    logs = Table(show_header=False, box=None, pad_edge=False)
    logs.add_column(style="dim", no_wrap=True)
    logs.add_column(style="dim", no_wrap=True, overflow="ellipsis")
    for path in sorted((folder / LOGS).glob("*.log")):
        logs.add_row(path.stem, Text("".join(tail(path, 1, max_bytes=512))))
    bar = Table.grid(expand=True)
    bar.add_row(ProgressBar(total=progress.steps, completed=progress.done))
    return Panel(Group(bar, table, logs), title=f"{config.run.name}  {_clock(seconds)}", title_align="left")


def _text(record: Record, key: str, form: str) -> str:
    value = number(record, key)
    if value is None:
        return "?"
    return format(int(value) if form == "d" else value, form)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
