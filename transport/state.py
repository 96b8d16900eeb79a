"""What the queue's state machine keeps, how it is saved and restored, and what others may ask about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from lachesis_transport.batching import places
from lachesis_transport.decisions import Rules
from lachesis_transport.items import Items, Stream
from lachesis_transport.ledger import Ledger
from lachesis_transport.lineage import Lineage
from lachesis_transport.messages import Scores
from lachesis_transport.presence import Client, Presence
from lachesis_transport.records import Entry, Lease, Ready, Ticket
from lachesis_transport.store import Refused, Writing
from lachesis_transport.tables import Table

OVERDUE = -1
"""Deadline of something too old for any batch to come."""


class State:
    """The queue's state. `intake.Intake` and `replay.Replay` are what happens to it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.lineage = Lineage()
        self.step = 0
        """Batches trained, those undone by a rollback not counted."""
        self.final: int | None = None
        """The last version, once the learner has finished."""
        self.items = Items(rules.weights, credit=(rules.staleness_max + 1) * rules.batch_groups)
        self._presence = Presence(heartbeat_seconds=rules.heartbeat_seconds)
        self._ledger = Ledger()
        self._tickets: Table[int, Ticket] = Table("ticket", Ticket.to_row)
        self._entries: Table[str, Entry] = Table("group", Entry.to_row)
        self._batches: Table[int, Lease] = Table("batch", Lease.to_row)
        self._asks: dict[tuple[str, int], Ticket] = {}
        self._open: Counter[str] = Counter()
        self._ready = Ready()
        self._lease: Lease | None = None
        self._next_ticket = 0
        self._learner: str | None = None
        self._fenced: list[str] = []
        self._resuming = False
        self._reserved: tuple[str, int] | None = None
        self._last_trained: int | None = None
        self._scores = Scores()
        self._oldest = 0
        self._contents: dict[str, bytes | None] = {}
        self._refused: list[Refused] = []
        self._saved: dict[str, Any] = {}
        self._waiting: str | None = None
        self._since = 0.0

    # ------------------------------------------------------------------ depths and deadlines

    @property
    def next_depth(self) -> int:
        """Depth of the version that the batch to come trains."""
        if self._lease is not None:
            return self.lineage.depth(self._lease.version)
        head = self.lineage.head
        if head is None:
            return 0
        # A version that is reserved is trained next, as soon as it is published.
        return self.lineage.depth(head) + (head == self._last_trained)

    def deadlines(self, *, last: int | None = None) -> list[int]:
        """Deadlines of all places that are needed; those beyond `last`, where the run ends, only where they must be."""
        first, rules = self.next_depth, self.rules
        leased = self._lease.groups if self._lease else ()
        due = [first] * len(leased)
        for entry in leased:
            due += places(entry, rules, first, last=last)[1:]
        found: dict[tuple[int, int], list[int]] = {}  # few are different
        for entry in self._ready.values():
            alike = entry.deadline, entry.uses
            if alike not in found:
                found[alike] = places(entry, rules, first, last=last)
            due += found[alike]
        issued: dict[int, list[int]] = {}
        for ticket in self._tickets.values():
            if ticket.deadline not in issued:
                overdue = ticket.deadline < first and rules.late == "mask_tokens"  # no batch waits for it
                issued[ticket.deadline] = [] if overdue else places(ticket, rules, first, last=last)
            due += issued[ticket.deadline]
        return due

    def _due(self, version: int) -> int:
        """Depth of the last version that a token of `version` may train, on the way to the newest version."""
        head, bound = self.lineage.head, self.rules.staleness_max
        assert head is not None  # some version is known, so one was reserved
        distance = self.lineage.distance(version, head, limit=bound + 2)
        return OVERDUE if distance is None else self.lineage.depth(head) + bound - distance

    def _due_first(self, entry: Entry) -> int:
        return min(self._due(version) for version in entry.versions)

    def _find_deadlines(self) -> None:
        for ticket in self._tickets.values():
            ticket.deadline = self._due(ticket.version)
        for entry in self._entries.values():
            entry.deadline = self._due_first(entry)

    def _too_old(self, entry: Entry) -> bool:
        """Whether no batch to come may train it."""
        due = max if self.rules.late == "mask_tokens" else min
        return due(self._due(version) for version in entry.versions) < self.next_depth

    def _too_old_for(self, entry: Entry, version: int) -> bool:
        limit = self.rules.staleness_max
        too_old = [self.lineage.distance(v, version, limit=limit) is None for v in entry.versions]
        return all(too_old) if self.rules.late == "mask_tokens" else any(too_old)

    # ------------------------------------------------------------------ what others ask

    @property
    def actors(self) -> dict[str, Client]:
        """The live actors by name."""
        return self._presence.actors

    @property
    def learner(self) -> Client | None:
        """The live learner."""
        return self._presence.learner

    @property
    def tickets(self) -> Sequence[Ticket]:
        """The open tickets."""
        return list(self._tickets.values())

    @property
    def ready(self) -> Sequence[Entry]:
        """The groups that a batch may take."""
        return list(self._ready.values())

    @property
    def leased(self) -> Lease | None:
        """The batch that the learner has at hand."""
        return self._lease

    @property
    def uncommitted(self) -> Sequence[Lease]:
        """The batches that are trained and that no checkpoint holds."""
        return [lease for lease in self._batches.values() if lease.trained]

    @property
    def held(self) -> Sequence[str]:
        """Ids of all groups whose content is kept."""
        return list(self._entries)

    @property
    def bytes_held(self) -> int:
        """Bytes of the groups that are ready or leased."""
        return self._ready.nbytes + (self._lease.nbytes if self._lease else 0)

    @property
    def bytes_uncommitted(self) -> int:
        """Bytes of the groups that are trained and in no checkpoint yet."""
        return sum(lease.nbytes for lease in self._batches.values() if lease.trained)

    @property
    def in_progress(self) -> int:
        """Open tickets, and groups that are ready or leased."""
        return len(self._tickets) + len(self._ready) + (len(self._lease.groups) if self._lease else 0)

    def state(self) -> dict[str, Any]:
        """What every heartbeat carries back."""
        finished = self.final is not None
        return {"current": self.lineage.current, "step": self.step, "finished": finished, "final": self.final}

    def statistics(self) -> dict[str, Any]:
        """Counts since the run started, and what the queue holds now."""
        return {
            **self._ledger.statistics(),
            "staleness_max": self._oldest,
            "ready": len(self._ready),
            "leased": len(self._lease.groups) if self._lease else 0,
            "live_tickets": self.in_progress,
            "bytes_held": self.bytes_held,
            "bytes_uncommitted": self.bytes_uncommitted,
            "actors": {a.name: {"version": a.version} for a in self.actors.values()},
            "learner": self.learner.name if self.learner else None,
            **self.state(),
        }

    # ------------------------------------------------------------------ what is saved

    def drain(self) -> Writing:
        """What changed since the last call."""
        events, contents, refused = self._ledger.drain(), self._contents, self._refused
        self._contents, self._refused = {}, []
        rows: dict[tuple[str, str | int], Any] = {}
        for table in self._tables():
            rows.update(table.drain())
        state = self._state_row()
        if state != self._saved:
            rows["state", ""] = self._saved = state
        return Writing(rows=rows, contents=contents, events=events, refused=refused)

    @classmethod
    def restore(cls, rules: Rules, rows: dict[str, dict[Any, Any]], *, now: float) -> Self:
        """The queue that saved `rows` (table -> key -> row), under rules that may have changed since.

        Every client that was live has `heartbeat_seconds` to be heard. A finished run goes on when `steps` has grown.
        """
        state = cls(rules)
        if "state" in rows:
            state._restore(rows, now)
        return state

    def _tables(self) -> list[Table[Any, Any]]:
        return [
            self.lineage.parents,
            self.lineage.publications,
            self.items.streams,
            self._presence.clients,
            self._ledger.tickets,
            self._ledger.groups,
            self._tickets,
            self._entries,
            self._batches,
        ]

    def _state_row(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "final": self.final,
            "next_ticket": self._next_ticket,
            "learner": self._learner,
            "fenced": self._fenced,
            "resuming": self._resuming,
            "reserved": list(self._reserved) if self._reserved else None,
            "last_trained": self._last_trained,
            "scores": self._scores.to_wire(),
            "oldest": self._oldest,
            "counts": self._ledger.to_row(),
        }

    def _restore(self, rows: dict[str, dict[Any, Any]], now: float) -> None:
        state = self._saved = rows["state"][""]
        self.step, self.final, self._next_ticket = state["step"], state["final"], state["next_ticket"]
        self._learner, self._fenced, self._resuming = state["learner"], state["fenced"], state["resuming"]
        self._reserved = tuple(state["reserved"]) if state["reserved"] else None
        self._last_trained, self._oldest = state["last_trained"], state["oldest"]
        self._scores = Scores.from_wire(state["scores"])
        self._ledger.restore(state["counts"], rows.get("ticket_fate", {}), rows.get("group_fate", {}))
        self.lineage.restore(rows.get("version", {}), rows.get("published", {}))
        self.items.streams.restore(rows.get("stream", {}), Stream.from_row)
        self._presence.restore(rows.get("client", {}), now)
        self._tickets.restore(dict(sorted(rows.get("ticket", {}).items())), Ticket.from_row)
        self._entries.restore(rows.get("group", {}), Entry.from_row)
        self._batches.restore(
            dict(sorted(rows.get("batch", {}).items())), lambda v, row: Lease.from_row(v, row, self._entries)
        )
        for lease in self._batches.values():
            for entry in lease.groups:
                entry.holders += 1
            if not lease.trained:
                self._lease = lease
        self._asks = {(ticket.actor, ticket.ask): ticket for ticket in self._tickets.values()}
        self._open = Counter(ticket.actor for ticket in self._tickets.values())
        self._ready = Ready(entry for entry in self._entries.values() if entry.ready)
        self._find_deadlines()
        for entry in [entry for entry in self._ready.values() if entry.uses >= self.rules.reuse]:
            self._give_up_uses(entry)  # `reuse` was lowered
        if self._lease is not None and max(self._lease.distances.values()) > self.rules.staleness_max:
            self._return_lease()  # the bound was lowered
        if self.final is not None and self.step < self.rules.steps:
            self._ledger.note("reopened", version=self.final, steps=self.rules.steps)
            self.final = None

    # ------------------------------------------------------------------ endings

    def _progress(self, now: float) -> None:
        """Something came or went: whoever waits for enough groups may go on waiting."""
        if self._waiting == "groups":
            self._since = now

    def _return_lease(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        del self._batches[lease.version]
        for entry in lease.groups:
            entry.uses -= lease.trained
            entry.holders -= 1
            entry.ready = True
            entry.deadline = self._due_first(entry)
            self._ready[entry.group_id] = entry
            self._entries.touch(entry.group_id)
            if entry.uses >= self.rules.reuse:
                self._give_up_uses(entry)
        self._scores += lease.scores
        self._ledger.counts["groups_returned"] += len(lease.groups)
        self._ledger.note("returned", version=lease.version, groups=lease.names)

    def _take_out(self, entry: Entry) -> None:
        """No batch may take it from now on."""
        del self._ready[entry.group_id]
        entry.ready = False
        self._entries.touch(entry.group_id)

    def _give_up_uses(self, entry: Entry) -> None:
        """It is trained as often as it may be."""
        self._take_out(entry)
        self._forget_if_done(entry, "trained")

    def _drop(self, entry: Entry) -> None:
        """No batch takes it any more: it is too old."""
        self._take_out(entry)
        if not entry.uses:
            self._ledger.dropped["stale"] += 1
            self._ledger.note("dropped", group=entry.group_id, reason="stale")
            self._return_item(entry.environment, entry.item, 0, "stale")
        self._forget_if_done(entry, "trained" if entry.uses else "stale")

    def _forget_if_done(self, entry: Entry, fate: str) -> None:
        if not entry.ready and not entry.holders:
            if fate == "trained":
                self._ledger.counts["uses_forgone"] += max(0, self.rules.reuse - entry.uses)
            del self._entries[entry.group_id]
            self._contents[entry.group_id] = None
            self._ledger.end_group(entry.group_id, fate)

    def _void(self, ticket: Ticket, reason: str) -> None:
        self._close(ticket, reason)
        self._ledger.void(reason)
        self._ledger.note("voided", ticket=ticket.number, actor=ticket.actor, reason=reason, item=ticket.item)

    def _close(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.number]
        del self._asks[ticket.actor, ticket.ask]
        self._open[ticket.actor] -= 1
        if not self._open[ticket.actor]:
            del self._open[ticket.actor]
        self._ledger.end_ticket(ticket.number, reason)
        if not ticket.used:
            self._return_item(ticket.environment, ticket.item, ticket.attempts, "stale" if ticket.groups else reason)

    def _return_item(self, environment: str, item: int | None, attempts: int, reason: str) -> None:
        if item is not None and not self.items.give_back(environment, item, attempts=attempts, reason=reason):
            self._ledger.counts["items_skipped"] += 1
            self._ledger.note("skipped", environment=environment, item=item, reason=reason)
