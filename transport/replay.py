"""The replay queue as a state machine: tickets, deadlines, batches, versions. No sockets, no disk, no clock.

Every method takes what happened and, where it matters, the time; it returns the decision and leaves what has to be
saved before anyone learns of it in `drain()`. `Replay.restore` continues from what was saved. docs/queue.md states the
promises and proves the bound.

In progress is everything that still needs a place in a batch: open tickets, ready groups and the leased batch. Each has
a deadline, the depth in the lineage tree of the last version that it may train. With n the depth of the batch to come,
B groups a batch, the queue keeps, for every d,

    places needed by d  <=  (d - n + 1) * B

so that each batch can be made of groups that are young enough, without throwing any away. A leased group needs its
place in the batch that it is leased for; one that trains R batches needs R places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from lachesis_transport.batching import Choice, Missing, choose, places
from lachesis_transport.decisions import Fenced, Finished, Grant, PutResult, ReplayError, Rules, Wait
from lachesis_transport.items import Items, Stream
from lachesis_transport.ledger import Ledger
from lachesis_transport.lineage import Lineage
from lachesis_transport.messages import MAX_MESSAGE_BYTES, Group, MessageError, Scores, content_id
from lachesis_transport.pacing import first_broken
from lachesis_transport.presence import Client, Presence, Role
from lachesis_transport.records import OVERHEAD_BYTES, Entry, Lease, Ticket
from lachesis_transport.store import Event, Refused, Writing
from lachesis_transport.tables import Table

OVERDUE = -1
"""Deadline of something too old for any batch to come."""

FENCED = 256
"""Replaced incarnations of the learner that are remembered."""

QUARANTINED = 64
"""Refused messages of one commit that are kept; further ones are only counted."""


class Replay:
    """The queue's state. One instance a run; every change of it is in a `Writing`."""

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
        self._ready: dict[str, Entry] = {}
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

    # ------------------------------------------------------------------ clients

    @property
    def actors(self) -> dict[str, Client]:
        """The live actors by name."""
        return self._presence.actors

    @property
    def learner(self) -> Client | None:
        """The live learner."""
        return self._presence.learner

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
        for entry in self._ready.values():
            due += places(entry, rules, first, last=last)
        for ticket in self._tickets.values():
            if ticket.deadline >= first or rules.late != "mask_tokens":  # no batch waits for an overdue one there
                due += places(ticket, rules, first, last=last)
        return due

    def ticket(self, *, actor: str, ask: int, version: int, environment: str, now: float) -> Grant | Wait | Finished:
        """Issue a ticket if everything in progress can still meet its deadline with it.

        `ask` numbers the actor's requests: repeating one returns the ticket that it already has.
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
        if not self._fits(ticket):
            progress = len(self._tickets) + len(self._ready) + (len(self._lease.groups) if self._lease else 0)
            return Wait(f"{progress} groups in progress are enough for the batches from {first} on")
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

    def _fits(self, extra: Ticket | Entry) -> bool:
        first = self.next_depth
        last = first + self.rules.steps - self.step - 1
        due = self.deadlines(last=last) + places(extra, self.rules, first, last=last)
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
            ticket, order = self._check(group, actor)
        except MessageError as error:
            self._ledger.counts["groups_invalid"] += 1
            return PutResult("invalid", str(error))
        if ticket is None and group.ticket is not None:
            return PutResult("stale", f"ticket {group.ticket} has ended: {self._ledger.ticket_fate(group.ticket)}")
        if self.final is not None:
            return PutResult("stale", f"the run has finished with version {self.final}")
        entry = Entry(
            group_id=name,
            order=order,
            versions=group.versions,
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

    def _check(self, group: Group, actor: str) -> tuple[Ticket | None, tuple[int, int]]:
        if group.actor != actor:
            raise MessageError(f"actor: {group.actor!r}, expected {actor!r}, which sends it")
        # A batch travels as one message.
        limit = (MAX_MESSAGE_BYTES - (1 << 20)) // self.rules.batch_groups
        if group.nbytes > limit:
            raise MessageError(f"trajectories: {group.nbytes} bytes, expected at most {limit} for a group of a batch")
        group.validate()
        for version in group.versions:
            try:
                self._require_published(version)
            except ReplayError as error:
                raise MessageError(f"versions: {error}") from None
        if group.ticket is None:
            expected = content_id(group.trajectories)
            if group.group_id != expected:
                raise MessageError(f"group_id: {group.group_id!r}, expected {expected!r}: a group without a ticket")
            return None, (self._next_ticket, 0)
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
        return ticket, (group.ticket, int(index))

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
            for lease in list(self._batches.values()):
                self.step -= 1
                self._ledger.counts["groups_trained"] -= len(lease.groups)
                self._give_back(lease)
        if parent != previous:
            self._find_deadlines()
        return version

    def published(self, version: int) -> None:
        """Actors may sample from `version` from now on. Raises ReplayError."""
        if version not in self.lineage:
            raise ReplayError(f"version: {version}, expected one that this queue has reserved")
        if self.lineage.publish(version):
            self._ledger.note("published", version=version)

    def lease(self, *, version: int, now: float) -> Lease | Wait:
        """B groups to train `version` with: the earliest due, waiting for a straggler where the rule demands it.

        Repeating it returns the same batch until that is trained. Raises ReplayError.
        """
        if self._lease is not None and self._lease.version == version:
            return self._lease
        self._may_lease(version)
        depth = self.lineage.depth(version)
        self._purge(version)
        while True:
            answer = choose(
                self._ready.values(), self._tickets.values(), rules=self.rules, depth=depth, version=version
            )
            if isinstance(answer, Choice):
                break
            if not answer.late or not self._too_late("straggler" if answer.straggler else "groups", now):
                return Wait(f"batch {version}: {self._explain(answer)}")
            self._void(answer.late[0], "late")
        self._waiting = None
        return self._hand_out(version, answer.chosen)

    def _hand_out(self, version: int, chosen: list[Entry]) -> Lease:
        distances: dict[int, int] = {}
        masked = []
        for sampled in sorted({v for entry in chosen for v in entry.versions}):
            distance = self.lineage.distance(sampled, version, limit=self.rules.staleness_max)
            if distance is None:
                masked.append(sampled)
            else:
                distances[sampled] = distance
        assert not masked or self.rules.late == "mask_tokens"  # _purge let no older one through
        lease = Lease(
            version=version,
            groups=tuple(chosen),
            distances=distances,
            masked=tuple(masked),
            scores=self._scores,
            dropped=self._ledger.lost(),
        )
        for entry in chosen:
            entry.ready, entry.holders = False, entry.holders + 1
            del self._ready[entry.group_id]
            self._entries.touch(entry.group_id)
        self._lease = self._batches[version] = lease
        self._scores = Scores()
        self._ledger.mark()
        masks = {"masked": masked} if masked else {}
        self._ledger.note("leased", version=version, groups=lease.names, **masks)
        return lease

    def _explain(self, missing: Missing) -> str:
        if missing.straggler:
            return f"ticket {missing.late[0].number} of {missing.late[0].actor}, which is due"
        why = f"{missing.ready} of {self.rules.batch_groups} groups ready, {len(missing.late)} in progress"
        if lost := self._ledger.lost_since_mark():
            why += "; came to nothing: " + ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
        return why

    def _may_lease(self, version: int) -> None:
        if self._lease is not None:
            raise ReplayError(f"version: {version}, expected {self._lease.version}, leased and not yet trained")
        if self.final is not None:
            raise ReplayError(f"version: {version}, but the run has finished with version {self.final}")
        if version != self.lineage.current:
            raise ReplayError(f"version: {version}, expected {self.lineage.current}, the newest published")
        if version == self._last_trained:
            raise ReplayError(f"version: {version} is trained already, expected the next")
        if self.step >= self.rules.steps:
            raise ReplayError(f"version: {version}, but all {self.rules.steps} batches of the run are trained")
        if self._batches and self.bytes_uncommitted > self.rules.max_uncommitted_bytes:
            raise ReplayError(
                f"version: {version}, but {self.bytes_uncommitted} bytes are trained and in no checkpoint, at most "
                f"{self.rules.max_uncommitted_bytes} (queue.max_uncommitted_bytes): expected a commit first"
            )

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

    def _purge(self, version: int) -> None:
        """The hard bound: drop what is too old to train `version`, token by token, in the lineage tree."""
        for entry in list(self._ready.values()):
            if self._too_old_for(entry, version):
                self._drop(entry)
        depth = self.lineage.depth(version)
        overdue = sorted((t for t in self._tickets.values() if t.deadline < depth), key=lambda t: t.number)
        if self.rules.late == "mask_tokens":
            # Their groups are welcome with what is young enough of them. Those that never come are let go in the end.
            overdue = overdue[: -(self.rules.staleness_max + 1) * self.rules.batch_groups]
        for ticket in overdue:
            self._void(ticket, "stale")

    def trained(self, *, version: int) -> None:
        """The batch leased for `version` has changed the weights. A second time does nothing. Raises ReplayError."""
        if version == self._last_trained:
            return
        if self._lease is None or self._lease.version != version:
            raise ReplayError(f"version: {version}, expected one that is leased")
        lease, self._lease = self._lease, None
        lease.trained = True
        self._batches.touch(version)
        self.step += 1
        self._last_trained = version
        ages = [self._measured_age(entry, lease) for entry in lease.groups]
        self._ledger.counts["groups_trained"] += len(ages)
        self._ledger.counts["bound_violations"] += sum(age > self.rules.staleness_max for age in ages)
        self._oldest = max(self._oldest, *ages)
        self._ledger.note("trained", version=version, groups=lease.names, staleness=ages)
        for entry in lease.groups:
            entry.uses += 1
            self._entries.touch(entry.group_id)
            if entry.uses < self.rules.reuse and not self._too_old(entry):
                entry.ready = True
                self._ready[entry.group_id] = entry

    def _measured_age(self, entry: Entry, lease: Lease) -> int:
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

        up = ancestors(lease.version)
        sampled = [ancestors(v) for v in entry.versions if v not in lease.masked]
        return max(min((up[a] + d for a, d in down.items() if a in up), default=reach) for down in sampled)

    def commit(self, *, version: int, checkpoint: str) -> None:
        """A durable checkpoint holds `version`: the groups that made it are done with. Raises ReplayError."""
        if version not in self.lineage:
            raise ReplayError(f"version: {version}, expected one that this queue has reserved")
        self._settle(version)
        self._ledger.note("committed", version=version, checkpoint=checkpoint)

    def _settle(self, version: int) -> None:
        """Let go of the batches that made `version`: all that were trained on its way from the root."""
        for lease in list(self._batches.values()):
            if lease.trained and self.lineage.descends(version, lease.version):
                del self._batches[lease.version]
                self._ledger.counts["groups_committed"] += len(lease.groups)
                for entry in lease.groups:
                    entry.holders -= 1
                    self._forget_if_done(entry, "trained")

    @property
    def checkpoint_wanted(self) -> bool:
        """Whether trained groups that no checkpoint holds take more than half of their budget."""
        return 2 * self.bytes_uncommitted > self.rules.max_uncommitted_bytes

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
        for entry in list(self._ready.values()):
            del self._ready[entry.group_id]
            entry.ready = False
            self._entries.touch(entry.group_id)
            if not entry.uses:
                self._ledger.counts["groups_left"] += 1
                self._ledger.note("left", group=entry.group_id, reason="finished")
                self._return_item(entry.environment, entry.item, 0, "finished")
            self._forget_if_done(entry, "trained" if entry.uses else "finished")
        self._ledger.note("finished", version=version)

    # ------------------------------------------------------------------ what others ask

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
        return sum(e.nbytes for e in self._ready.values()) + (self._lease.nbytes if self._lease else 0)

    @property
    def bytes_uncommitted(self) -> int:
        """Bytes of the groups that are trained and in no checkpoint yet."""
        return sum(lease.nbytes for lease in self._batches.values() if lease.trained)

    def state(self) -> dict[str, Any]:
        """What every heartbeat carries back."""
        finished = self.final is not None
        return {"current": self.lineage.current, "step": self.step, "finished": finished, "final": self.final}

    def statistics(self) -> dict[str, Any]:
        """Counts since the run started, and what the queue holds now."""
        leased = len(self._lease.groups) if self._lease else 0
        return {
            **self._ledger.statistics(),
            "staleness_max": self._oldest,
            "ready": len(self._ready),
            "leased": leased,
            "live_tickets": len(self._tickets) + len(self._ready) + leased,
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
    def restore(cls, rules: Rules, rows: dict[str, dict[Any, Any]], *, now: float) -> Replay:
        """The queue that saved `rows` (table -> key -> row), under rules that may have changed since.

        Every client that was live has `heartbeat_seconds` to be heard. A finished run goes on when `steps` has grown.
        """
        replay = cls(rules)
        if "state" in rows:
            replay._restore(rows, now)
        return replay

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
        self._ready = {entry.group_id: entry for entry in self._entries.values() if entry.ready}
        self._find_deadlines()
        if self._lease is not None and max(self._lease.distances.values()) > self.rules.staleness_max:
            self._return_lease()  # the bound was lowered
        if self.final is not None and self.step < self.rules.steps:
            self._ledger.note("reopened", version=self.final, steps=self.rules.steps)
            self.final = None

    # ------------------------------------------------------------------ small steps

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
        self._scores += lease.scores
        self._ledger.counts["groups_returned"] += len(lease.groups)
        self._ledger.note("returned", version=lease.version, groups=lease.names)

    def _drop(self, entry: Entry) -> None:
        """No batch takes it any more: it is too old."""
        del self._ready[entry.group_id]
        entry.ready = False
        self._entries.touch(entry.group_id)
        if not entry.uses:
            self._ledger.dropped["stale"] += 1
            self._ledger.note("dropped", group=entry.group_id, reason="stale")
            self._return_item(entry.environment, entry.item, 0, "stale")
        self._forget_if_done(entry, "trained" if entry.uses else "stale")

    def _forget_if_done(self, entry: Entry, fate: str) -> None:
        if not entry.ready and not entry.holders:
            self._ledger.counts["uses_forgone"] += (self.rules.reuse - entry.uses) * (fate == "trained")
            del self._entries[entry.group_id]
            self._contents[entry.group_id] = None
            self._ledger.end_group(entry.group_id, fate)

    def _void(self, ticket: Ticket, reason: str) -> None:
        self._close(ticket, reason)
        self._ledger.voided[reason] += 1
        self._ledger.note("voided", ticket=ticket.number, actor=ticket.actor, reason=reason, item=ticket.item)

    def _close(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.number]
        del self._asks[ticket.actor, ticket.ask]
        self._open[ticket.actor] -= 1
        self._open += Counter()  # without zeros
        self._ledger.end_ticket(ticket.number, reason)
        if not ticket.used:
            self._return_item(ticket.environment, ticket.item, ticket.attempts, "stale" if ticket.groups else reason)

    def _return_item(self, environment: str, item: int | None, attempts: int, reason: str) -> None:
        if item is not None and not self.items.give_back(environment, item, attempts=attempts, reason=reason):
            self._ledger.counts["items_skipped"] += 1
            self._ledger.note("skipped", environment=environment, item=item, reason=reason)


def _grant(ticket: Ticket) -> Grant:
    return Grant(ticket=ticket.number, version=ticket.version, deadline=ticket.deadline, item=ticket.item)
