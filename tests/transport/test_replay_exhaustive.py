"""Every history of the queue, for small numbers: exploration.py visits the states; here is which ones, and that it
finds faults that are planted."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lachesis_transport import batching, items, lineage, pacing, tables

sys.path.insert(0, str(Path(__file__).parent))
from exploration import Broken, Scope, explore

ROLLING = [Scope(s, b, r) for s in range(3) for b in (1, 2) for r in range(1, s + 2)]
QUICK = [
    *ROLLING,
    *(Scope(s, b, late="drop") for s in (0, 1) for b in (1, 2)),
    *(Scope(s, b, order=order) for s in (0, 1) for b in (1, 2) for order in ("freshest", "uniform")),
    Scope(2, 1, 2, order="freshest"),
    Scope(0, 2, late="mask_tokens"),
    Scope(1, 1, 2, late="mask_tokens"),
    Scope(1, 1, actors="ab", failures=True),
    Scope(1, 2, steps=3),
    Scope(2, 2, 2, steps=4),
    Scope(0, 2, late="drop", restarts=2, versions=4),
    Scope(1, 1, several=True),
    Scope(1, 1, 2, restarts=1, versions=4),
]
SAMPLED = [Scope(1, 1, late="mask_tokens"), Scope(1, 1, restarts=1, versions=3)]
"""Too many states for all of them: the first ones."""

LARGE = [
    Scope(3, 2, 2),
    Scope(2, 3),
    Scope(2, 2, order="freshest"),
    Scope(2, 2, 2, order="uniform"),
    Scope(1, 2, actors="ab"),
    Scope(1, 1, restarts=1, versions=4),
    Scope(2, 1, 2, restarts=1, versions=4),
]
LARGE_SAMPLED = [
    Scope(2, 2, 2, late="mask_tokens"),
    Scope(1, 1, late="mask_tokens", restarts=1, versions=3),
    Scope(1, 2, 2, restarts=1, versions=4),
    Scope(1, 2, order="freshest", restarts=1, versions=4),
    Scope(1, 2, 2, several=True),
    Scope(1, 1, actors="ab", failures=True, several=True, restarts=1, versions=3),
]


def test_every_history_of_a_small_queue_keeps_the_promises():
    assert explore(QUICK) + explore(SAMPLED, limit=1500) >= 9000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_history_of_a_larger_queue_keeps_the_promises():
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as cores:
        whole = cores.map(explore, [[scope] for scope in LARGE])
        sampled = cores.map(partial(explore, limit=5000), [[scope] for scope in LARGE_SAMPLED])
        assert sum(whole) + sum(sampled) >= 70000


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Break the queue in one place."""

    def everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        for module in [m for name, m in sys.modules.items() if name.startswith("lachesis_transport.")]:
            if vars(module).get(function.__name__) is function:
                monkeypatch.setattr(module, function.__name__, replacement)

    def rows_lost(table: str, gone: bool) -> None:
        drain = tables.Table.drain

        def forgetful(self: tables.Table) -> Iterator[Any]:
            for (name, key), row in drain(self):
                if name != table or (row is None) != gone:
                    yield (name, key), row

        monkeypatch.setattr(tables.Table, "drain", forgetful)

    if fault == "a ticket too many":
        first_broken = pacing.first_broken
        everywhere(first_broken, lambda due, *, first, size: first_broken(sorted(due)[1:], first=first, size=size))
    elif fault == "stragglers are overtaken":
        monkeypatch.setattr(batching, "first_broken", lambda due, *, first, size: None)
    elif fault == "a place too few":
        places = batching.places
        everywhere(places, lambda *args, **kwargs: places(*args, **kwargs)[:1])
    elif fault == "youngest first":
        monkeypatch.setattr(batching, "next_use", lambda item, rules, depth: -batching.places(item, rules, depth)[0])
    elif fault == "an edge is not counted":
        distance = lineage.Lineage.distance

        def shorter(self: lineage.Lineage, a: int, b: int, *, limit: int) -> int | None:
            edges = distance(self, a, b, limit=limit + 1)
            return edges and edges - 1

        monkeypatch.setattr(lineage.Lineage, "distance", shorter)
    elif fault == "an item is lost":
        monkeypatch.setattr(items.Items, "give_back", lambda *args, **kwargs: True)
    elif fault == "everything counts as committed":
        monkeypatch.setattr(lineage.Lineage, "descends", lambda *args: True)
    elif fault == "a settled batch is not recognised":
        monkeypatch.setattr(lineage.Lineage, "descends", lambda *args: False)
    else:
        what, table = fault.split(": ")
        rows_lost(table, gone=what == "not deleted")


@pytest.mark.parametrize(
    "fault",
    [
        "a ticket too many",
        "stragglers are overtaken",
        "a place too few",
        "youngest first",
        "an edge is not counted",
        "an item is lost",
        "everything counts as committed",
        "a settled batch is not recognised",
        *(f"not saved: {table}" for table in ("ticket", "group", "batch", "stream", "published", "client")),
        *(f"not deleted: {table}" for table in ("ticket", "group", "batch")),
    ],
)
def test_the_check_finds_a_planted_fault(monkeypatch, fault):
    plant(monkeypatch, fault)
    with pytest.raises(Broken, match=r"after \['start'"):
        explore([Scope(1, 2), Scope(2, 2, 2), Scope(1, 1, 2, restarts=1, versions=3)], limit=500)
