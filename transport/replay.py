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

from lachesis_transport.batching import Choice, Missing, choose
from lachesis_transport.decisions import ReplayError, Wait
from lachesis_transport.intake import Intake
from lachesis_transport.messages import Scores
from lachesis_transport.records import Entry, Lease


class Replay(Intake):
    """The queue: what actors see of it (`intake`), and here the learner's side, versions and batches."""

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
        if self._resuming and parent not in (None, previous) and not self._leads_to_newest(parent):
            raise ReplayError(
                f"parent: {parent} is on a branch that was given up when version {previous} went on from an older one: "
                "what was trained there is trained anew since. Expected a checkpoint that a later learner started from "
                "or wrote; remove the one of this version"
            )
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

    def _leads_to_newest(self, version: int | None) -> bool:
        head = self.lineage.head
        return version is not None and head is not None and self.lineage.descends(head, version)

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
            self._take_out(entry)
            entry.holders += 1
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
        if self._resuming:
            raise ReplayError(f"version: {version}, but this learner is new: expected a reserve of its first version")
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
            self._take_out(entry)
            if not entry.uses:
                self._ledger.counts["groups_left"] += 1
                self._ledger.note("left", group=entry.group_id, reason="finished")
                self._return_item(entry.environment, entry.item, 0, "finished")
            self._forget_if_done(entry, "trained" if entry.uses else "finished")
        self._ledger.note("finished", version=version)
