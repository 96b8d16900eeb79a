"""Who takes part in publications: members, epochs, fencing, deadlines. Pure: time comes in, decisions come out.

An actor joins and gets a token. Whatever it says carries that token; a token that is not known any more is fenced: the
actor has to join again and heal. A member is *current* when it staged the newest version. A publication is a round: it
expects all members that are current when it begins, and ends when all of them staged the version, or at the deadline;
who has not staged it then is removed.

The current members of a round form the collective group, but for those that want to stream. A group has an epoch: it
grows when the composition changes or a collective broke, so nothing of an older group can reach into a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GONE_SECONDS = 3.0
"""A member that cannot be reached for so long has gone: several times what a new connection of a living one takes."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One actor that joined."""

    token: int
    actor: str
    nonce: str
    """The actor's own name for this membership: a repeated join with it changes nothing."""
    workers: int
    """Receivers behind this actor: ranks it takes in a group."""
    collective: bool
    """Whether it takes part in collectives; it streams what it misses."""
    staged: int | None
    """Newest version that it holds."""
    heard: float
    """When it last said anything, seconds."""
    lost: float | None = None
    """Since when nothing can be sent to it; None: it was reached last time, or spoke since."""


@dataclass(slots=True, kw_only=True)
class Round:
    """One publication in progress."""

    version: int
    deadline: float
    waiting: dict[int, str]
    """Tokens (and names) of the members that have not staged the version yet."""
    staged: list[str] = field(default_factory=list)
    """Names of those that have."""
    removed: dict[str, str] = field(default_factory=dict)
    """Names of those that were removed while it lasted, with the reason."""

    @property
    def done(self) -> bool:
        """Nobody is waited for."""
        return not self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The ranks of a collective group; the publisher is rank 0."""

    epoch: int
    ranks: dict[int, int]
    """First rank of each member, by token."""
    size: int


class Membership:
    """The state machine.

    Args:
        deadline_seconds: what a member that is dead or hangs may cost, once; also the silence that ends a membership.
        first: tokens and epochs count up from here. Take a number far from those of any other publisher, so that
            members of an earlier one are fenced, and do not mistake a group for one that they are in.
    """

    def __init__(self, *, deadline_seconds: float, first: int = 1) -> None:
        self._deadline_seconds = deadline_seconds
        self._members: dict[int, Member] = {}
        self._next_token = first
        self._epoch = first - 1
        self._composition: Composition | None = None
        self._round: Round | None = None
        self.newest: int | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone who joined and was not removed, in the order of joining."""
        return tuple(self._members.values())

    def join(self, actor: str, *, nonce: str, workers: int, now: float, collective: bool = True) -> Member:
        """A new membership; an older one of the same actor ends."""
        if workers < 1:
            raise ValueError(f"workers: {workers}, expected 1 or more")
        for member in self.members:
            if member.actor == actor and member.nonce == nonce:
                member.heard, member.lost = now, None
                return member
            if member.actor == actor:
                self.remove(member.token, "joined again")
        member = Member(
            token=self._next_token,
            actor=actor,
            nonce=nonce,
            workers=workers,
            collective=collective,
            staged=None,
            heard=now,
        )
        self._next_token += 1
        self._members[member.token] = member
        return member

    def hear(self, token: int, *, now: float) -> bool:
        """A sign of life; False: fenced."""
        member = self._members.get(token)
        if member is None:
            return False
        member.heard, member.lost = now, None
        return True

    def quiet(self, token: int, *, seconds: float, now: float) -> bool:
        """Whether it is time to look if the member can be reached: it is waited for, or said nothing for so long."""
        member = self._members.get(token)
        waited_for = self._round is not None and token in self._round.waiting
        return member is not None and (waited_for or now - member.heard > seconds)

    def reach(self, token: int, *, reached: bool, now: float) -> None:
        """Something was sent to the member, or could not be: its connection is gone, or it does not read."""
        member = self._members.get(token)
        if member is None:
            return
        if reached:
            member.lost = None
        elif member.lost is None:
            member.lost = now

    def stage(self, token: int, version: int, *, now: float) -> bool:
        """The member holds this version now; False: fenced."""
        if not self.hear(token, now=now):
            return False
        member = self._members[token]
        member.staged = version
        if self._round is not None and version == self._round.version and token in self._round.waiting:
            self._round.staged.append(self._round.waiting.pop(token))
        return True

    def remove(self, token: int, reason: str) -> None:
        """End a membership."""
        member = self._members.pop(token, None)
        if member is None:
            return
        if self._round is not None and token in self._round.waiting:
            del self._round.waiting[token]
            self._round.removed[member.actor] = reason

    def silent(self, *, now: float) -> dict[str, str]:
        """Remove those who said nothing for the deadline, or could not be reached for GONE_SECONDS; why, by name."""
        gone = {}
        for member in self.members:
            if now - member.heard > self._deadline_seconds:
                gone[member.actor] = f"silent for {self._deadline_seconds:g} s"
            elif member.lost is not None and now - member.lost >= GONE_SECONDS:
                gone[member.actor] = f"disconnected for {GONE_SECONDS:g} s"
            else:
                continue
            self.remove(member.token, gone[member.actor])
        return gone

    def begin(self, version: int, *, now: float, everyone: bool = False) -> Round:
        """Start a round. It expects the current members, or with `everyone` (an anchor) whoever joined."""
        expected = {m.token: m.actor for m in self.members if everyone or m.staged == self.newest}
        self.newest = version
        self._round = Round(version=version, deadline=now + self._deadline_seconds, waiting=expected)
        return self._round

    def end(self, *, remove_late: bool = True) -> Round:
        """End the round; removes whoever did not stage the version in time (not when they may heal: an anchor)."""
        assert self._round is not None
        ended = self._round
        for token in tuple(ended.waiting) if remove_late else ():
            self.remove(token, f"version {ended.version} not staged within {self._deadline_seconds:g} s")
        self._round = None
        return ended

    @property
    def collective(self) -> bool:
        """Whether anybody whom the round in progress waits for takes part in collectives."""
        assert self._round is not None
        return any(member.collective and member.token in self._round.waiting for member in self.members)

    def compose(self) -> Composition:
        """The group for the round in progress: the one before it, when neither its ranks changed nor it broke."""
        assert self._round is not None
        ranks: dict[int, int] = {}
        size = 1
        for member in self.members:
            if member.collective and member.token in self._round.waiting:
                ranks[member.token] = size
                size += member.workers
        if self._composition is not None and self._composition.ranks == ranks:
            return self._composition
        self._epoch += 1
        self._composition = Composition(epoch=self._epoch, ranks=ranks, size=size)
        return self._composition

    def broke(self) -> None:
        """A collective failed: the next group gets a new epoch."""
        self._composition = None
