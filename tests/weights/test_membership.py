from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_transport.weights.membership import Member, Membership

NONCES = count()


def join(membership: Membership, actor: str, *, workers: int = 1, now: float = 0.0) -> Member:
    return membership.join(actor, nonce=str(next(NONCES)), workers=workers, now=now)


def current(membership: Membership, *names: str) -> list[int]:
    tokens = []
    for name in names:
        member = join(membership, name, workers=1, now=0.0)
        if membership.newest is not None:
            membership.stage(member.token, membership.newest, now=0.0)
        tokens.append(member.token)
    return tokens


def test_a_round_ends_when_all_current_members_staged() -> None:
    membership = Membership(deadline_seconds=5.0)
    membership.begin(0, now=0.0)
    membership.end()
    a, b = current(membership, "a", "b")
    late = join(membership, "late", workers=1, now=0.0)
    current_round = membership.begin(1, now=10.0)
    assert current_round.waiting == {a: "a", b: "b"}
    assert current_round.deadline == 15.0
    assert membership.stage(a, 1, now=10.1)
    assert not current_round.done
    assert membership.stage(late.token, 0, now=10.1)
    assert membership.stage(b, 1, now=10.2)
    assert current_round.done
    ended = membership.end()
    assert (ended.staged, ended.removed) == (["a", "b"], {})
    assert [m.actor for m in membership.members] == ["a", "b", "late"]


def test_who_is_late_is_removed_and_fenced_and_can_join_again() -> None:
    membership = Membership(deadline_seconds=5.0)
    membership.begin(0, now=0.0)
    membership.end()
    a, b = current(membership, "a", "b")
    membership.begin(1, now=0.0)
    membership.stage(a, 1, now=1.0)
    ended = membership.end()
    assert ended.removed == {"b": "version 1 not staged within 5 s"}
    assert not membership.hear(b, now=6.0)
    assert not membership.stage(b, 1, now=6.0)
    again = join(membership, "b", workers=1, now=7.0)
    assert again.token not in (a, b)
    assert membership.begin(2, now=8.0).waiting == {a: "a"}


def test_an_anchor_expects_everyone_and_removes_nobody() -> None:
    membership = Membership(deadline_seconds=5.0)
    tokens = current(membership, "a", "b")
    current_round = membership.begin(0, now=0.0, everyone=True)
    assert set(current_round.waiting) == set(tokens)
    membership.stage(tokens[0], 0, now=1.0)
    assert membership.end(remove_late=False).removed == {}
    assert len(membership.members) == 2


def test_joining_again_ends_the_older_membership() -> None:
    membership = Membership(deadline_seconds=5.0)
    membership.begin(0, now=0.0)
    membership.end()
    (old,) = current(membership, "a")
    current_round = membership.begin(1, now=0.0)
    join(membership, "a", workers=2, now=1.0)
    assert current_round.done
    assert current_round.removed == {"a": "joined again"}
    assert not membership.hear(old, now=1.0)


def test_a_repeated_join_changes_nothing() -> None:
    membership = Membership(deadline_seconds=5.0)
    first = membership.join("a", nonce="x", workers=1, now=0.0)
    assert membership.join("a", nonce="x", workers=1, now=3.0) is first
    assert first.heard == 3.0
    assert membership.join("a", nonce="y", workers=1, now=3.0) is not first
    assert len(membership.members) == 1


def test_tokens_and_epochs_of_two_publishers_do_not_meet() -> None:
    memberships = [Membership(deadline_seconds=5.0, first=first) for first in (1, 1_000)]
    seen = []
    for membership in memberships:
        membership.begin(0, now=0.0)
        membership.end()
        (token,) = current(membership, "a")
        membership.begin(1, now=0.0)
        seen.append((token, membership.compose().epoch))
    assert seen == [(1, 1), (1_000, 1_000)]
    assert not memberships[1].hear(1, now=0.0)


def test_silence_ends_a_membership() -> None:
    membership = Membership(deadline_seconds=5.0)
    a, b = current(membership, "a", "b")
    membership.hear(a, now=4.0)
    assert membership.silent(now=6.0) == {"b": "silent for 5 s"}
    assert membership.silent(now=6.0) == {}
    assert not membership.hear(b, now=6.0)


def test_a_lost_connection_ends_a_membership_before_the_deadline_unless_a_new_one_comes() -> None:
    membership = Membership(deadline_seconds=30.0)
    membership.begin(0, now=0.0)
    membership.end()
    a, b = current(membership, "a", "b")
    assert not membership.quiet(a, seconds=2.0, now=1.0)
    assert membership.quiet(a, seconds=2.0, now=2.5)
    begun = membership.begin(1, now=0.0)
    assert membership.quiet(a, seconds=2.0, now=1.0)  # it is waited for
    assert membership.quiet(a, seconds=2.0, now=2.5)
    for now in (2.5, 3.0):
        membership.reach(a, reached=False, now=now)
        membership.reach(b, reached=False, now=now)
    membership.hear(b, now=4.0)
    assert membership.silent(now=5.0) == {}
    assert membership.silent(now=5.5) == {"a": "disconnected for 3 s"}
    assert begun.waiting == {b: "b"}
    assert begun.removed == {"a": "disconnected for 3 s"}
    membership.reach(b, reached=False, now=6.0)
    membership.reach(b, reached=True, now=7.0)
    assert membership.silent(now=10.0) == {}


def test_who_wants_to_stream_is_expected_but_takes_no_rank() -> None:
    membership = Membership(deadline_seconds=5.0)
    membership.begin(0, now=0.0)
    membership.end()
    slow = membership.join("slow", nonce="n", workers=2, collective=False, now=0.0)
    membership.stage(slow.token, 0, now=0.0)
    assert set(membership.begin(1, now=0.0).waiting) == {slow.token}
    assert not membership.collective
    membership.stage(slow.token, 1, now=0.0)
    membership.end()
    (fast,) = current(membership, "fast")
    assert set(membership.begin(2, now=0.0).waiting) == {slow.token, fast}
    assert membership.collective
    composition = membership.compose()
    assert (composition.ranks, composition.size) == ({fast: 1}, 2)


def test_epochs_change_with_the_composition_and_after_a_break_only() -> None:
    membership = Membership(deadline_seconds=5.0)
    membership.begin(0, now=0.0)
    membership.end()
    a = join(membership, "a", workers=2, now=0.0)
    b = join(membership, "b", workers=1, now=0.0)
    epochs = []
    for version in range(1, 6):
        for member in membership.members:
            membership.stage(member.token, version - 1, now=0.0)
        membership.begin(version, now=0.0)
        composition = membership.compose()
        epochs.append((composition.epoch, composition.size))
        if version == 1:
            assert composition.ranks == {a.token: 1, b.token: 3}
        if version == 2:
            membership.broke()
        if version == 3:
            membership.remove(b.token, "died")
        membership.end(remove_late=False)
    assert epochs == [(1, 4), (1, 4), (2, 4), (3, 3), (3, 3)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "stage", "begin", "end", "silent", "break"]), st.integers(0, 3))))
def test_invariants(actions: list[tuple[str, int]]) -> None:
    membership = Membership(deadline_seconds=5.0)
    now, version, open_round = 0.0, 0, False
    tokens: list[int] = []
    fenced: set[int] = set()
    for action, which in actions:
        now += 1.0
        if action == "join":
            before = {m.token for m in membership.members}
            tokens.append(join(membership, f"actor-{which}", workers=1 + which, now=now).token)
            fenced |= before - {m.token for m in membership.members}
        elif action == "stage" and tokens:
            token = tokens[which % len(tokens)]
            assert membership.stage(token, version, now=now) == (token in {m.token for m in membership.members})
        elif action == "begin" and not open_round:
            version += 1
            begun, open_round = membership.begin(version, now=now), True
            composition = membership.compose()
            assert set(composition.ranks) == set(begun.waiting)
            workers = {m.token: m.workers for m in membership.members}
            taken = [r for t, first in composition.ranks.items() for r in range(first, first + workers[t])]
            assert sorted(taken) == list(range(1, composition.size))
        elif action == "end" and open_round:
            late = set(begun.waiting)
            membership.end()
            open_round = False
            fenced |= late
        elif action == "silent":
            before = {m.token for m in membership.members}
            membership.silent(now=now)
            fenced |= before - {m.token for m in membership.members}
        elif action == "break":
            membership.broke()
        names = [m.actor for m in membership.members]
        assert len(names) == len(set(names))
        assert not any(membership.hear(token, now=now) for token in fenced)


def test_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="workers: 0, expected 1 or more"):
        join(Membership(deadline_seconds=1.0), "a", workers=0)
