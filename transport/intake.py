"""The side of the queue's state machine that actors see: who is there, tickets, and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lachesis_transport.batching import places
from lachesis_transport.decisions import Fenced, Finished, Grant, PutResult, ReplayError, Wait
from lachesis_transport.messages import MAX_MESSAGE_BYTES, Group, MessageError, Scores, content_id
from lachesis_transport.pacing import first_broken
from lachesis_transport.presence import Role
from lachesis_transport.records import OVERHEAD_BYTES, Entry, Ticket, uses_to_come
from lachesis_transport.state import State
from lachesis_transport.store import Event, Refused

FENCED = 256
"""Replaced incarnations of the learner that are remembered."""

QUARANTINED = 64
"""Refused messages of one commit that are kept; further ones are only counted."""


class Intake(State):
    """Clients come and go, tickets are issued, groups are taken in."""

    # ------------------------------------------------------------------ clients

    def is_live(self, role: Role, name: str, incarnation: str) -> bool:
        """Whether this very client is live."""
        known = self._presence.find(role, name)
        return known is not None and known.incarnation == incarnation

    def join(self, *, role: Role, name: str, incarnation: str, now: float) -> None:
        """A client says hello. Raises NameTaken while another incarnation lives under its name (or as the learner), and
        Fenced for a learner that was replaced."""
        if role == "learner" and incarnation in self._fenced:
            raise Fenced(f"incarnation: {incarnation!r} of learner {name!r} was replaced by a later one; it has to end")
        if not self._presence.join(role=role, name=name, incarnation=incarnation, now=now):
            return
        self._ledger.note("joined", role=role, name=name, incarnation=incarnation)
        if role == "learner":
            if self._learner not in (None, incarnation):
                assert self._learner is not None
                self._fenced = [*self._fenced, self._learner][-FENCED:]
                self._resuming = True
                self._return_lease()
            self._learner = incarnation

    def heard(self, *, role: Role, name: str, incarnation: str, now: float, version: int | None = None) -> None:
        """A client is alive; an actor says which version it serves. Raises NotJoined."""
        client = self._presence.require(role, name, incarnation)
        client.heard = now
        if version is not None and version != client.version:
            client.version = version
            self._presence.clients.touch(client.key)

    def report(self, *, role: Role, name: str, number: int, events: Sequence[Event]) -> None:
        """Take lines for the event log from a client, once for each `number`. Raises NotJoined."""
        client = self._presence.require(role, name)
        if number <= client.report_number:
            return
        if events:
            client.report_number = number
            self._presence.clients.touch(client.key)
        for event in events:
            self._ledger.report(event)

    def leave(self, *, role: Role, name: str, reason: Literal["left", "expired"] = "left") -> None:
        """A client is gone: an actor's open tickets are voided. A second time does nothing."""
        if self._presence.remove(role, name) is None:
            return
        for ticket in [t for t in self._tickets.values() if role == "actor" and t.actor == name]:
            self._void(ticket, f"actor_{reason}")
        self._ledger.note("parted", role=role, name=name, reason=reason)

    def expire(self, now: float) -> None:
        """Let go of the clients that were silent for too long."""
        for client in self._presence.silent(now):
            self.leave(role=client.role, name=client.name, reason="expired")

    def count(self, what: str, number: int = 1) -> None:
        """Count something that the process around saw."""
        self._ledger.counts[what] += number

    def quarantine(self, refused: Refused) -> None:
        """Keep a message that was refused."""
        if len(self._refused) < QUARANTINED:
            self._refused.append(refused)

    # ------------------------------------------------------------------ tickets and groups

    def ticket(
        self,
        *,
        actor: str,
        ask: int,
        version: int,
        environment: str,
        now: float,
        kept: list[int] | None = None,
        waiting: int = 1,
    ) -> Grant | Wait | Finished:
        """Issue a ticket if everything in progress can still meet its deadline with it.

        `ask` numbers the actor's requests: repeating one returns the ticket that it already has. `kept` is shared by a
        round of requests, in the order of their turns: when an actor with `waiting` of them is refused because it does
        not serve the newest version yet, places are kept for it there, and later requests have to fit beside them.
        Raises NotJoined, and ReplayError for a version that was never published or an ask that was cancelled.
        """
        client = self._presence.require("actor", actor)
        if ask in client.cancelled:
            raise ReplayError(f"ask: {ask} was cancelled")
        known = self._asks.get((actor, ask))
        if known is not None:
            return _grant(known)
        if self.final is not None:
            return Finished()
        self._require_published(version)
        first, due = self.next_depth, self._due(version)
        if due < first:
            return Wait(f"version {version} is too old for batch {first}: waiting for the actor's next version")
        ticket = Ticket(
            number=self._next_ticket,
            version=version,
            actor=actor,
            environment=environment,
            ask=ask,
            item=-1,
            deadline=due,
        )
        kept = [] if kept is None else kept
        if not self._fits(ticket, kept):
            kept += self._places_to_keep(ticket, waiting)
            return Wait(f"{self.in_progress} groups in progress are enough for the batches from {first} on")
        ticket.item, ticket.attempts = self.items.take(environment)
        self._next_ticket += 1
        self._tickets[ticket.number] = self._asks[actor, ask] = ticket
        self._open[actor] += 1
        self._ledger.counts["tickets_issued"] += 1
        self._progress(now)
        self._ledger.note(
            "issued",
            ticket=ticket.number,
            version=version,
            deadline=due,
            actor=actor,
            environment=environment,
            item=ticket.item,
        )
        return _grant(ticket)

    def turn(self, actor: str, environment: str) -> tuple[float, int]:
        """Whose request for a ticket goes first: the lowest. By environment and weight, then the actor with the fewest
        open tickets."""
        return self.items.clock(environment), self._open[actor]

    def _places_to_keep(self, refused: Ticket, waiting: int) -> list[int]:
        """What an actor that is a little behind would take at the newest version: its share of a batch, at most.

        Without this the actor that is first to serve a version takes all places that a batch frees. Nothing is kept
        while less than a batch is in progress: the next one has to come about without those that are behind.
        """
        newest = self.next_depth + self.rules.staleness_max
        if refused.deadline >= newest or self.in_progress < self.rules.batch_groups:
            return []
        share = min(waiting, max(1, self.rules.batch_groups // len(self.actors)))
        return list(uses_to_come(newest, self.rules.reuse)) * share

    def _fits(self, extra: Ticket | Entry, kept: Sequence[int] = ()) -> bool:
        first = self.next_depth
        last = first + self.rules.steps - self.step - 1
        due = self.deadlines(last=last) + places(extra, self.rules, first, last=last)
        due += (min(deadline, last) for deadline in kept)
        return first_broken(due, first=first, size=self.rules.batch_groups) is None

    def cancel(self, *, actor: str, ask: int, now: float) -> None:
        """The actor does not wait for `ask` any more: its ticket, if it got one, is voided, and it will get none."""
        client = self._presence.require("actor", actor)
        client.cancel(ask)
        ticket = self._asks.get((actor, ask))
        if ticket is not None:
            self._progress(now)
            self._void(ticket, "cancelled")

    def void(self, *, actor: str, ticket: int, reason: str, scores: Scores | None, now: float) -> None:
        """No (further) group of this ticket will come; `scores` of one that was scored and has nothing to train.

        A second time does nothing. Raises ReplayError.
        """
        held = self._tickets.get(ticket)
        if held is None:
            if not 0 <= ticket < self._next_ticket:
                raise ReplayError(f"ticket: {ticket} was never issued by this queue")
            return
        if held.actor != actor:
            raise ReplayError(f"ticket: {ticket} belongs to actor {held.actor!r}, not to {actor!r}")
        self._forget_ask(held)
        if scores is not None:
            self._scores += scores
            held.used = True
        self._progress(now)
        if held.groups:
            self._close(held, "its last group has come")
        else:
            self._void(held, reason)

    def put(self, group: Group, content: bytes, *, actor: str, final: bool, now: float) -> PutResult:
        """Take a group in, `content` being its packed form; `final` closes its ticket.

        A group without a ticket needs a place as if it took one now. Repeating a put is answered `duplicate` (or
        `stale` again).
        """
        name, fate = group.group_id, self._fate(group.group_id)
        if fate is not None:
            known = self._tickets.get(-1 if group.ticket is None else group.ticket)
            if final and known is not None and known.actor == actor and name.startswith(f"{known.number}:"):
                self._close(known, "its last group has come")
            if fate == "stale":
                return PutResult("stale", "it was dropped before")
            self._ledger.counts["groups_duplicate"] += 1
            return PutResult("duplicate")
        try:
            ticket, order, versions = self._check(group, actor, nbytes=len(content))
        except MessageError as error:
            self._ledger.counts["groups_invalid"] += 1
            return PutResult("invalid", str(error))
        if ticket is not None:
            self._forget_ask(ticket)
        if ticket is None and group.ticket is not None:
            return PutResult("stale", f"ticket {group.ticket} has ended: {self._ledger.ticket_fate(group.ticket)}")
        if self.final is not None:
            return PutResult("stale", f"the run has finished with version {self.final}")
        entry = Entry(
            group_id=name,
            order=order,
            versions=versions,
            nbytes=len(content) + OVERHEAD_BYTES,
            actor=actor,
            environment=group.environment,
            item=ticket.item if ticket is not None and not ticket.used else None,
        )
        entry.deadline = self._due_first(entry)
        stale = self._too_old(entry)
        if not stale and not self._room(ticket):
            self._ledger.counts["puts_refused_full"] += 1
            return PutResult("full", f"{self.bytes_held} bytes held, at most {self.rules.max_bytes}", 1.0)
        if not stale and ticket is None and not self._fits(entry):
            self._ledger.counts["puts_refused_full"] += 1
            return PutResult("full", f"{len(self._ready)} groups are ready already", 1.0)
        self._progress(now)
        self._scores += Scores.of([t.score for t in group.trajectories])
        if stale:
            self._ledger.dropped["stale"] += 1
            self._ledger.end_group(name, "stale")
            self._ledger.note("dropped", group=name, reason="stale")
        else:
            self._take_in(entry, content, actor, now)
        if ticket is None:
            self._next_ticket += 1
        else:
            ticket.groups += 1
            ticket.used = ticket.used or not stale
            self._tickets.touch(ticket.number)
            if final:
                self._close(ticket, "its last group has come")
        if stale:
            return PutResult("stale", f"its tokens were sampled more than {self.rules.staleness_max} versions ago")
        return PutResult("accepted")

    def _take_in(self, entry: Entry, content: bytes, actor: str, now: float) -> None:
        self._entries[entry.group_id] = self._ready[entry.group_id] = entry
        self._contents[entry.group_id] = content
        self._ledger.counts["groups_accepted"] += 1
        self._ledger.note("accepted", group=entry.group_id, ticket=entry.order[0], actor=actor, item=entry.item)
        client = self._presence.find("actor", actor)
        if client is not None:
            client.accepted += 1
            client.rate.count(now)
            self._presence.clients.touch(client.key)

    def _forget_ask(self, ticket: Ticket) -> None:
        """Its actor uses the ticket, so it has the answer: a copy of the request, still on its way, gets no other."""
        client = self._presence.find("actor", ticket.actor)
        if client is not None:
            client.cancel(ticket.ask)

    def _check(
        self, group: Group, actor: str, *, nbytes: int
    ) -> tuple[Ticket | None, tuple[int, int], tuple[int, ...]]:
        """Its ticket while that is open, its place in the order of age, and the versions of its trained tokens."""
        if group.actor != actor:
            raise MessageError(f"actor: {group.actor!r}, expected {actor!r}, which sends it")
        # A batch travels as one message.
        limit = (MAX_MESSAGE_BYTES - (1 << 20)) // self.rules.batch_groups
        if nbytes > limit:
            raise MessageError(f"group: {nbytes} bytes, expected at most {limit} for a group of a batch")
        group.validate()
        versions = group.versions
        for version in versions:
            try:
                self._require_published(version)
            except ReplayError as error:
                raise MessageError(f"versions: {error}") from None
        if group.ticket is None:
            expected = content_id(group.trajectories)
            if group.group_id != expected:
                raise MessageError(f"group_id: {group.group_id!r}, expected {expected!r}: a group without a ticket")
            return None, (self._next_ticket, 0), versions
        number, _, index = group.group_id.partition(":")
        if number != str(group.ticket) or not index.isascii() or not index.isdigit() or index != str(int(index[:9])):
            raise MessageError(f"group_id: {group.group_id!r}, expected '{group.ticket}:' and an index")
        ticket = self._tickets.get(group.ticket)
        if ticket is None and not 0 <= group.ticket < self._next_ticket:
            raise MessageError(f"ticket: {group.ticket} was never issued by this queue")
        if ticket is not None and ticket.actor != actor:
            raise MessageError(f"ticket: {ticket.number} belongs to actor {ticket.actor!r}, not to {actor!r}")
        if ticket is not None and ticket.environment != group.environment:
            raise MessageError(
                f"environment: {group.environment!r}, expected that of its ticket, {ticket.environment!r}"
            )
        return ticket, (group.ticket, int(index)), versions

    def _require_published(self, version: int) -> None:
        if not self.lineage.is_published(version):
            newest = "none yet" if self.lineage.current is None else f"up to {self.lineage.current}"
            raise ReplayError(f"version: {version}, expected one that the learner has published ({newest})")

    def _room(self, ticket: Ticket | None) -> bool:
        """Whether bytes are left. What the batch to come may wait for always gets in: `full` must not block it."""
        if self.bytes_held < self.rules.max_bytes or len(self._ready) < self.rules.batch_groups:
            return True
        return ticket is not None and ticket is min(self._tickets.values(), key=lambda t: (t.deadline, t.number))

    def _fate(self, name: str) -> str | None:
        """What became of a group that was put before; None for a new one."""
        return "held" if name in self._entries else self._ledger.group_fate(name)


def _grant(ticket: Ticket) -> Grant:
    return Grant(ticket=ticket.number, version=ticket.version, deadline=ticket.deadline, item=ticket.item)
