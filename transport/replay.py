"""The replay queue as a state machine: tickets, deadlines, batches, versions. No sockets, no disk, no clock.

Every method takes what happened and, where it matters, the time; it returns the decision and leaves the changes in
`drain()`. docs/queue.md states the promises and proves the bound.

In progress is everything that still needs a place in a batch: open tickets, ready groups and the leased batch. Each has
a deadline, the depth in the lineage tree of the last version that it may train. With n the depth of the batch to come,
B groups a batch, the queue keeps, for every d,

    in progress and due by d  <=  (d - n + 1) * B

so that each batch can be made of groups that are young enough, without throwing any away. A leased group counts as due
by the batch that it is leased for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lachesis_transport.decisions import Finished, Grant, PutResult, ReplayError, Rules, Wait
from lachesis_transport.ledger import Ledger
from lachesis_transport.lineage import Lineage
from lachesis_transport.messages import MAX_MESSAGE_BYTES, Batch, Group, MessageError, Scores
from lachesis_transport.pacing import first_broken
from lachesis_transport.presence import Client, Presence, Role
from lachesis_transport.store import Event

OVERDUE = -1
"""Deadline of something too old for any batch to come."""


@dataclass(slots=True, kw_only=True)
class _Ticket:
    number: int
    version: int
    actor: str
    environment: str
    ask: int
    deadline: int
    groups: int = 0


@dataclass(slots=True)
class _Held:
    group: Group
    nbytes: int
    deadline: int
    order: tuple[int, int]


@dataclass(slots=True)
class _Lease:
    batch: Batch
    groups: list[_Held]


class Replay:
    """The queue's state. One instance a run; every change of it is an `Event`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.lineage = Lineage()
        self.step = 0
        """Batches trained, those undone by a rollback not counted."""
        self.final: int | None = None
        """The last version, once the learner has finished."""
        self._presence = Presence(heartbeat_seconds=rules.heartbeat_seconds)
        self._ledger = Ledger()
        self._learner_incarnation: str | None = None
        self._resuming = False
        self._reserved: tuple[str, int] | None = None
        self._tickets: dict[int, _Ticket] = {}
        self._asks: dict[tuple[str, int], int] = {}
        self._next_ticket = 0
        self._ready: dict[str, _Held] = {}
        self._lease: _Lease | None = None
        self._trained: list[_Lease] = []
        self._last_trained: int | None = None
        self._scores = Scores()
        self._waiting: str | None = None
        self._since = 0.0
        self._oldest = 0

    # ------------------------------------------------------------------ clients

    @property
    def actors(self) -> dict[str, Client]:
        """The live actors by name."""
        return self._presence.actors

    @property
    def learner(self) -> Client | None:
        """The live learner."""
        return self._presence.learner

    def join(self, *, role: Role, name: str, incarnation: str, now: float) -> None:
        """A client says hello. Raises NameTaken while another incarnation lives under its name (or as the learner)."""
        if not self._presence.join(role=role, name=name, incarnation=incarnation, now=now):
            return
        self._ledger.note("joined", role=role, name=name, incarnation=incarnation)
        if role == "learner":
            if self._learner_incarnation not in (None, incarnation):
                self._resuming = True
                self._return_lease()
            self._learner_incarnation = incarnation

    def heard(self, *, role: Role, name: str, incarnation: str, now: float, version: int | None = None) -> None:
        """A client is alive; an actor says which version it serves. Raises NotJoined."""
        client = self._presence.require(role, name, incarnation)
        client.heard = now
        if version is not None:
            client.version = version

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

    # ------------------------------------------------------------------ tickets and groups

    @property
    def next_depth(self) -> int:
        """Depth of the version that the batch to come trains."""
        if self._lease is not None:
            return self.lineage.depth(self._lease.batch.version)
        head = self.lineage.head
        if head is None:
            return 0
        # A version that is reserved is trained next, as soon as it is published.
        return self.lineage.depth(head) + (head == self._last_trained)

    def deadlines(self) -> list[int]:
        """Deadlines of everything in progress, ascending."""
        leased = [self.next_depth] * len(self._lease.groups) if self._lease else []
        return sorted(
            leased + [t.deadline for t in self._tickets.values()] + [h.deadline for h in self._ready.values()]
        )

    def ticket(self, *, actor: str, ask: int, version: int, environment: str, now: float) -> Grant | Wait | Finished:
        """Issue a ticket if everything in progress can still meet its deadline with it.

        `ask` numbers the actor's requests: repeating one returns the ticket that it already has.
        Raises NotJoined, and ReplayError for a version that was never reserved or an ask that was cancelled.
        """
        client = self._presence.require("actor", actor)
        if ask in client.cancelled:
            raise ReplayError(f"ask: {ask} was cancelled")
        if (actor, ask) in self._asks:
            known = self._tickets[self._asks[actor, ask]]
            return Grant(ticket=known.number, version=known.version, deadline=known.deadline)
        if self.final is not None:
            return Finished()
        if version not in self.lineage:
            raise ReplayError(
                f"version: {version}, expected one that this queue has reserved ({len(self.lineage)} so far)"
            )
        first, size, due = self.next_depth, self.rules.batch_groups, self._due(version)
        if due < first:
            return Wait(f"version {version} is too old for batch {first}: waiting for the actor's next version")
        deadlines = [*self.deadlines(), due]
        last = first + self.rules.steps - self.step - 1
        if first_broken((min(d, last) for d in deadlines), first=first, size=size) is not None:
            return Wait(f"{len(deadlines) - 1} groups in progress are enough for the batches from {first} on")
        ticket = _Ticket(
            number=self._next_ticket, version=version, actor=actor, environment=environment, ask=ask, deadline=due
        )
        self._next_ticket += 1
        self._tickets[ticket.number] = ticket
        self._asks[actor, ask] = ticket.number
        self._ledger.counts["tickets_issued"] += 1
        self._progress(now)
        self._ledger.note(
            "issued", ticket=ticket.number, version=version, deadline=due, actor=actor, environment=environment
        )
        return Grant(ticket=ticket.number, version=version, deadline=due)

    def cancel(self, *, actor: str, ask: int, now: float) -> None:
        """The actor does not wait for `ask` any more: its ticket, if it got one, is voided, and it will get none."""
        client = self._presence.require("actor", actor)
        client.cancel(ask)
        if (actor, ask) in self._asks:
            self._progress(now)
            self._void(self._tickets[self._asks[actor, ask]], "cancelled")

    def void(self, *, actor: str, ticket: int, reason: str, scores: Scores | None, now: float) -> None:
        """No (further) group of this ticket will come. A second time does nothing. Raises ReplayError."""
        held = self._tickets.get(ticket)
        if held is None:
            if not 0 <= ticket < self._next_ticket:
                raise ReplayError(f"ticket: {ticket} was never issued by this queue")
            return
        if held.actor != actor:
            raise ReplayError(f"ticket: {ticket} belongs to actor {held.actor!r}, not to {actor!r}")
        if scores is not None:
            self._scores += scores
        self._progress(now)
        if held.groups:
            self._close(held, "its last group has come")
        else:
            self._void(held, reason)

    def put(self, group: Group, *, actor: str, final: bool, now: float) -> PutResult:
        """Take a group in; `final` closes its ticket. Repeating a put is answered `duplicate` (or `stale` again)."""
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
            ticket, order = self._check(group, actor)
        except MessageError as error:
            self._ledger.counts["groups_invalid"] += 1
            return PutResult("invalid", str(error))
        if ticket is None:
            return PutResult("stale", f"ticket {order[0]} has ended: {self._ledger.ticket_fate(order[0])}")
        due = self._due_first(group)
        if due >= self.next_depth and not self._room(ticket):
            self._ledger.counts["puts_refused_full"] += 1
            return PutResult("full", f"{self.bytes_held} bytes held, at most {self.rules.max_bytes}", 1.0)
        self._progress(now)
        self._scores += Scores.of([t.score for t in group.trajectories])
        if due < self.next_depth:
            self._drop(group, "stale")
        else:
            self._ready[name] = _Held(group, group.nbytes, due, order)
            self._ledger.counts["groups_accepted"] += 1
            self._ledger.note("accepted", group, group=name, ticket=ticket.number, actor=actor)
        ticket.groups += 1
        if final:
            self._close(ticket, "its last group has come")
        if due < self.next_depth:
            return PutResult("stale", f"its oldest token was sampled more than {self.rules.staleness_max} versions ago")
        return PutResult("accepted")

    def _check(self, group: Group, actor: str) -> tuple[_Ticket | None, tuple[int, int]]:
        number, _, index = group.group_id.partition(":")
        if group.ticket is None:
            raise MessageError("ticket: null, expected the number of a ticket")
        if number != str(group.ticket) or not index.isascii() or not index.isdigit() or index != str(int(index[:9])):
            raise MessageError(f"group_id: {group.group_id!r}, expected '{group.ticket}:' and an index")
        if group.actor != actor:
            raise MessageError(f"actor: {group.actor!r}, expected {actor!r}, which sends it")
        # A batch travels as one message.
        limit = (MAX_MESSAGE_BYTES - (1 << 20)) // self.rules.batch_groups
        if group.nbytes > limit:
            raise MessageError(f"trajectories: {group.nbytes} bytes, expected at most {limit} for a group of a batch")
        group.validate()
        ticket = self._tickets.get(group.ticket)
        if ticket is None and not 0 <= group.ticket < self._next_ticket:
            raise MessageError(f"ticket: {group.ticket} was never issued by this queue")
        if ticket is not None and ticket.actor != actor:
            raise MessageError(f"ticket: {ticket.number} belongs to actor {ticket.actor!r}, not to {actor!r}")
        for version in group.versions:
            if version not in self.lineage:
                raise MessageError(f"versions: {version}, expected versions that this queue has reserved")
        return ticket, (group.ticket, int(index))

    def _room(self, ticket: _Ticket) -> bool:
        """Whether bytes are left. What the batch to come may wait for always gets in: `full` must not block it."""
        if self.bytes_held < self.rules.max_bytes or len(self._ready) < self.rules.batch_groups:
            return True
        return ticket is min(self._tickets.values(), key=_urgency)

    def _fate(self, name: str) -> str | None:
        """What became of a group that was put before; None for a new one."""
        if name in self._ready:
            return "ready"
        if self._lease is not None and any(held.group.group_id == name for held in self._lease.groups):
            return "leased"
        return self._ledger.group_fate(name)

    # ------------------------------------------------------------------ the learner

    def reserve(self, *, parent: int | None, key: str) -> int:
        """A new version trained from `parent`. Repeating a `key` returns the same version. Raises ReplayError.

        The first one of a new incarnation of the learner names the version of its checkpoint: what was trained beyond
        it is ready again.
        """
        if self._reserved is not None and self._reserved[0] == key:
            return self._reserved[1]
        if parent is not None and parent not in self.lineage:
            raise ReplayError(f"parent: {parent}, expected a version that this queue has reserved")
        previous = self.lineage.head
        version = self.lineage.reserve(parent)
        self._reserved = (key, version)
        self._ledger.note("reserved", version=version, parent=parent)
        if self._resuming:
            self._resuming = False
            if parent is not None:
                self._settle(parent)
            for lease in self._trained:
                self.step -= 1
                self._ledger.counts["groups_trained"] -= len(lease.groups)
                self._give_back(lease)
            self._trained.clear()
        if parent != previous:
            for ticket in self._tickets.values():
                ticket.deadline = self._due(ticket.version)
            for held in self._ready.values():
                held.deadline = self._due_first(held.group)
        return version

    def published(self, version: int) -> None:
        """Actors may sample from `version` from now on. Raises ReplayError."""
        if version not in self.lineage:
            raise ReplayError(f"version: {version}, expected one that this queue has reserved")
        if self.lineage.publish(version):
            self._ledger.note("published", version=version)

    def lease(self, *, version: int, now: float) -> Batch | Wait:
        """B groups to train `version` with: the earliest due, waiting for a straggler where the rule demands it.

        Repeating it returns the same batch until that is trained. Raises ReplayError.
        """
        if self._lease is not None and self._lease.batch.version == version:
            return self._lease.batch
        self._may_lease(version)
        first, size = self.lineage.depth(version), self.rules.batch_groups
        self._purge(version)
        while True:
            ordered = sorted(self._ready.values(), key=_eldest)
            chosen, late = ordered[:size], sorted(self._tickets.values(), key=_urgency)
            if len(chosen) == size:
                left = [*(h.deadline for h in ordered[size:]), *(t.deadline for t in late)]
                broken = first_broken(left, first=first + 1, size=size)
                late = [t for t in late if broken is not None and t.deadline <= broken]
                if not late:
                    break
                waiting, why = "straggler", f"ticket {late[0].number} of {late[0].actor}, which is due"
            else:
                waiting, why = "groups", f"{len(chosen)} of {size} groups ready, {len(late)} in progress"
                if lost := self._ledger.lost_since_mark():
                    why += "; came to nothing: " + ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
            if not late or not self._too_late(waiting, now):
                return Wait(f"batch {version}: {why}")
            self._void(late[0], "late")
        self._waiting = None
        for held in chosen:
            del self._ready[held.group.group_id]
        self._lease = _Lease(self._batch(version, [h.group for h in chosen]), chosen)
        self._scores = Scores()
        self._ledger.mark()
        self._ledger.note("leased", version=version, groups=[h.group.group_id for h in chosen])
        return self._lease.batch

    def _may_lease(self, version: int) -> None:
        if self._lease is not None:
            raise ReplayError(f"version: {version}, expected {self._lease.batch.version}, leased and not yet trained")
        if self.final is not None:
            raise ReplayError(f"version: {version}, but the run has finished with version {self.final}")
        if version != self.lineage.current:
            raise ReplayError(f"version: {version}, expected {self.lineage.current}, the newest published")
        if version == self._last_trained:
            raise ReplayError(f"version: {version} is trained already, expected the next")
        if self.step >= self.rules.steps:
            raise ReplayError(f"version: {version}, but all {self.rules.steps} batches of the run are trained")

    def _too_late(self, waiting: str, now: float) -> bool:
        """Whether the wait that just came up, or goes on, has lasted long enough to drop the most urgent ticket.

        Waiting for enough groups costs one ticket each time: slow generation must not lose everything at once.
        """
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        limit = 0.0 if waiting == "straggler" and self.rules.late == "drop" else self.rules.late_seconds
        if now - self._since < limit:
            return False
        if waiting == "groups":
            self._since = now
        return True

    def _progress(self, now: float) -> None:
        if self._waiting == "groups":
            self._since = now

    def _batch(self, version: int, groups: list[Group]) -> Batch:
        distances: dict[int, int] = {}
        for sampled in {v for g in groups for v in g.versions}:
            distance = self.lineage.distance(sampled, version, limit=self.rules.staleness_max)
            assert distance is not None  # _purge let no older one through
            distances[sampled] = distance
        return Batch(
            version=version,
            groups=tuple(groups),
            distances=distances,
            scores=self._scores,
            dropped=self._ledger.lost(),
        )

    def _purge(self, version: int) -> None:
        """The hard bound: drop what is too old to train `version`, token by token, in the lineage tree."""
        limit = self.rules.staleness_max
        for held in list(self._ready.values()):
            if any(self.lineage.distance(v, version, limit=limit) is None for v in held.group.versions):
                del self._ready[held.group.group_id]
                self._drop(held.group, "stale")
        for ticket in [t for t in self._tickets.values() if t.deadline < self.lineage.depth(version)]:
            self._void(ticket, "stale")

    def trained(self, *, version: int) -> None:
        """The batch leased for `version` has changed the weights. A second time does nothing. Raises ReplayError."""
        if version == self._last_trained:
            return
        if self._lease is None or self._lease.batch.version != version:
            raise ReplayError(f"version: {version}, expected one that is leased")
        lease, self._lease = self._lease, None
        self.step += 1
        self._last_trained = version
        ages = [self._measured_age(held.group, version) for held in lease.groups]
        self._ledger.counts["groups_trained"] += len(ages)
        self._ledger.counts["bound_violations"] += sum(age > self.rules.staleness_max for age in ages)
        self._oldest = max(self._oldest, *ages)
        for held in lease.groups:
            self._ledger.end_group(held.group.group_id, "trained")
        self._trained.append(lease)
        names = [held.group.group_id for held in lease.groups]
        self._ledger.note("trained", version=version, groups=names, staleness=ages)
        while self.bytes_uncommitted > self.rules.max_bytes and len(self._trained) > 1:
            forgotten = self._trained.pop(0)
            self._ledger.counts["groups_forgotten"] += len(forgotten.groups)
            self._ledger.note("forgotten", version=forgotten.batch.version, reason="no checkpoint came in time")

    def _measured_age(self, group: Group, version: int) -> int:
        """Staleness of a group from the recorded parents alone, in another way than the lease decides it."""
        reach = self.rules.staleness_max + 1

        def ancestors(start: int) -> dict[int, int]:
            found, at = {}, start
            for steps in range(reach + 1):
                found[at] = steps
                parent = self.lineage.parent(at)
                if parent is None:
                    break
                at = parent
            return found

        up = ancestors(version)
        ages = [min((up[a] + d for a, d in ancestors(v).items() if a in up), default=reach) for v in group.versions]
        return max(ages)

    def commit(self, *, version: int, checkpoint: str) -> None:
        """A durable checkpoint holds `version`: the groups that made it are done with. Raises ReplayError."""
        if version not in self.lineage:
            raise ReplayError(f"version: {version}, expected one that this queue has reserved")
        self._settle(version)
        self._ledger.note("committed", version=version, checkpoint=checkpoint)

    def _settle(self, version: int) -> None:
        """Let go of the batches that made `version`: all that were trained on its way from the root."""
        kept = [t for t in self._trained if not self.lineage.descends(version, t.batch.version)]
        self._ledger.counts["groups_committed"] += sum(len(t.groups) for t in self._trained if t not in kept)
        self._trained = kept

    @property
    def checkpoint_wanted(self) -> bool:
        """Whether trained groups that no checkpoint holds take more than half of their budget."""
        return 2 * self.bytes_uncommitted > self.rules.max_bytes

    def finish(self, *, version: int) -> None:
        """The run ends with `version`: no more tickets, what is left is counted. Raises ReplayError."""
        if version not in self.lineage:
            raise ReplayError(f"version: {version}, expected one that this queue has reserved")
        if self.final is not None:
            return
        self.final = version
        self._return_lease()
        for ticket in list(self._tickets.values()):
            self._void(ticket, "finished")
        for name in self._ready:
            self._ledger.counts["groups_left"] += 1
            self._ledger.end_group(name, "finished")
            self._ledger.note("left", group=name, reason="finished")
        self._ready.clear()
        self._ledger.note("finished", version=version)

    # ------------------------------------------------------------------ what others ask

    @property
    def bytes_held(self) -> int:
        """Bytes of the groups that are ready or leased."""
        leased = self._lease.groups if self._lease else []
        return sum(h.nbytes for h in (*self._ready.values(), *leased))

    @property
    def bytes_uncommitted(self) -> int:
        """Bytes of the groups that are trained and in no checkpoint yet."""
        return sum(h.nbytes for lease in self._trained for h in lease.groups)

    def state(self) -> dict[str, Any]:
        """What every heartbeat carries back."""
        finished = self.final is not None
        return {"current": self.lineage.current, "step": self.step, "finished": finished, "final": self.final}

    def statistics(self) -> dict[str, Any]:
        """Counts since the queue started, and what it holds now."""
        return {
            **self._ledger.statistics(),
            "staleness_max": self._oldest,
            "ready": len(self._ready),
            "leased": len(self._lease.groups) if self._lease else 0,
            "live_tickets": len(self.deadlines()),
            "bytes_held": self.bytes_held,
            "bytes_uncommitted": self.bytes_uncommitted,
            "actors": {a.name: {"version": a.version} for a in self.actors.values()},
            "learner": self.learner.name if self.learner else None,
            **self.state(),
        }

    def drain(self) -> list[Event]:
        """The changes since the last call, in order."""
        return self._ledger.drain()

    # ------------------------------------------------------------------ small steps

    def _due(self, version: int) -> int:
        """Depth of the last version that a token of `version` may train, on the way to the newest version."""
        head, bound = self.lineage.head, self.rules.staleness_max
        assert head is not None  # some version is known, so one was reserved
        distance = self.lineage.distance(version, head, limit=bound + 2)
        return OVERDUE if distance is None else self.lineage.depth(head) + bound - distance

    def _due_first(self, group: Group) -> int:
        return min(self._due(version) for version in group.versions)

    def _return_lease(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._give_back(lease)

    def _give_back(self, lease: _Lease) -> None:
        for held in lease.groups:
            self._ledger.revive_group(held.group.group_id)
            held.deadline = self._due_first(held.group)
            self._ready[held.group.group_id] = held
        self._scores += lease.batch.scores
        self._ledger.counts["groups_returned"] += len(lease.groups)
        self._ledger.note("returned", version=lease.batch.version, groups=[h.group.group_id for h in lease.groups])

    def _drop(self, group: Group, reason: str) -> None:
        self._ledger.dropped[reason] += 1
        self._ledger.end_group(group.group_id, reason)
        self._ledger.note("dropped", group=group.group_id, reason=reason)

    def _void(self, ticket: _Ticket, reason: str) -> None:
        self._close(ticket, reason)
        self._ledger.voided[reason] += 1
        self._ledger.note("voided", ticket=ticket.number, actor=ticket.actor, reason=reason)

    def _close(self, ticket: _Ticket, reason: str) -> None:
        del self._tickets[ticket.number]
        del self._asks[ticket.actor, ticket.ask]
        self._ledger.end_ticket(ticket.number, reason)


def _eldest(held: _Held) -> tuple[int, tuple[int, int]]:
    return held.deadline, held.order


def _urgency(ticket: _Ticket) -> tuple[int, int]:
    return ticket.deadline, ticket.number
