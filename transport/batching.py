"""Which ready groups make a batch, and whether it has to wait for others first. Pure; docs/queue.md has the proof."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from lachesis_transport.decisions import Rules
from lachesis_transport.pacing import first_broken
from lachesis_transport.records import Entry, Ticket, uses_to_come


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups of a batch."""

    chosen: list[Entry]


@dataclass(frozen=True, slots=True)
class Missing:
    """A batch that is not complete, or would leave something behind."""

    straggler: bool
    """Whether enough groups are ready, but a ticket that is due would be left behind."""
    late: list[Ticket]
    """The tickets that it waits for, most urgent first."""
    ready: int


def choose(
    ready: Iterable[Entry], tickets: Iterable[Ticket], *, rules: Rules, depth: int, version: int
) -> Choice | Missing:
    """The batch that trains `version` at `depth`."""
    entries, size = list(ready), rules.batch_groups
    urgent = sorted(tickets, key=urgency)
    if len(entries) < size:
        return Missing(straggler=False, late=urgent, ready=len(entries))
    if rules.order == "uniform":
        # The same groups in the same order give the same batch, whatever process asks.
        entries.sort(key=lambda entry: entry.order)
        return Choice(random.Random(f"{rules.seed}/{version}").sample(entries, size))
    if rules.order == "freshest":
        return Choice(sorted(entries, key=lambda entry: (-entry.deadline, entry.order))[:size])
    # In the run's last batches planned uses may not come any more: what was never trained goes first.
    entries.sort(key=lambda entry: (next_use(entry, rules, depth), entry.uses, entry.order))
    chosen = entries[:size]
    if rules.late == "mask_tokens":
        return Choice(chosen)
    left = [due for ticket in urgent for due in places(ticket, rules, depth)]
    for at, entry in enumerate(entries):
        left += places(entry, rules, depth)[at < size :]
    broken = first_broken(left, first=depth + 1, size=size)
    late = [] if broken is None else [ticket for ticket in urgent if next_use(ticket, rules, depth) <= broken]
    return Missing(straggler=True, late=late, ready=len(entries)) if late else Choice(chosen)


def places(item: Ticket | Entry, rules: Rules, depth: int, *, last: int | None = None) -> list[int]:
    """Deadlines of the batches that are still to take it, from the one at `depth` on.

    Of those beyond `last`, the depth at which the run ends, only the first use of all counts, which must still fit.
    """
    used = item.uses if isinstance(item, Entry) else 0
    uses, deadline = rules.reuse - used, max(item.deadline, depth)
    if isinstance(item, Ticket):
        # Its group may bring younger tokens than it promised: all its places are kept, from the first one on.
        deadline = max(deadline, depth + uses - 1)
    # A group that is behind is used less often, never too late.
    due = uses_to_come(deadline, min(uses, deadline - depth + 1))
    if last is None:
        return list(due)
    return [d for d in due if d <= last] or ([] if used else [last])


def next_use(item: Ticket | Entry, rules: Rules, depth: int) -> int:
    """The first of `places`."""
    return places(item, rules, depth)[0]


def urgency(ticket: Ticket) -> tuple[int, int]:
    """Earlier deadlines first, then older tickets."""
    return ticket.deadline, ticket.number
