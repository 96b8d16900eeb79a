from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lachesis_transport.decisions import Fenced, Finished, Grant, NameTaken, NotJoined, ReplayError, Rules, Wait
from lachesis_transport.items import MAX_STREAMS
from lachesis_transport.messages import Group, Scores, content_id
from lachesis_transport.records import OVERHEAD_BYTES, Lease
from lachesis_transport.replay import Replay
from lachesis_transport.store import Event

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)


class Bench:
    """A queue with one actor and one learner, driven by hand."""

    def __init__(self, **rules) -> None:
        defaults = {"batch_groups": 2, "staleness_max": 1, "steps": 100, "late_seconds": 10.0}
        self.replay = Replay(Rules(**{**defaults, **rules}))
        self.now = 0.0
        self.asks = 0
        self.replay.join(role="actor", name="a", incarnation="1", now=0.0)
        self.replay.join(role="learner", name="l", incarnation="1", now=0.0)
        self.version = self.publish(None)

    def publish(self, parent):
        version = self.replay.reserve(parent=parent, key=f"k{len(self.replay.lineage)}")
        self.replay.published(version)
        return version

    def ticket(self, version=None, actor="a"):
        self.asks += 1
        version = self.version if version is None else version
        answer = self.replay.ticket(actor=actor, ask=self.asks, version=version, environment="sums", now=self.now)
        return answer.ticket if isinstance(answer, Grant) else answer

    def put(self, ticket, versions=None, **kwargs):
        final = kwargs.pop("final", True)
        group = groups.group(ticket, [self.version] if versions is None else versions, **kwargs)
        return self.replay.put(group, group.pack(), actor="a", final=final, now=self.now)

    def lease(self):
        return self.replay.lease(version=self.version, now=self.now)

    def train(self):
        batch = self.lease()
        assert isinstance(batch, Lease), batch
        self.replay.trained(version=self.version)
        self.version = self.publish(self.version)
        return [g.group_id for g in batch.groups]

    def kinds(self):
        return [event.kind for event in self.replay.drain().events]


def packed_size() -> int:
    return len(groups.group(0, [0]).pack()) + OVERHEAD_BYTES


def test_tickets_are_paced_by_the_bound():
    bench = Bench()
    tickets = [bench.ticket() for _ in range(4)]
    assert tickets == [0, 1, 2, 3]
    assert bench.ticket() == Wait("4 groups in progress are enough for the batches from 0 on")
    bench.put(0)
    bench.put(1)
    assert isinstance(bench.ticket(), Wait)
    assert bench.train() == ["0:0", "1:0"]
    assert [bench.ticket(), bench.ticket()] == [4, 5]
    assert isinstance(bench.ticket(), Wait)
    assert isinstance(bench.ticket(version=0), Wait)


def test_an_actor_at_an_old_version_gets_no_ticket_that_comes_too_late():
    bench = Bench(staleness_max=0)
    for ticket in (bench.ticket(), bench.ticket()):
        bench.put(ticket)
    bench.train()
    assert bench.ticket(version=0) == Wait("version 0 is too old for batch 1: waiting for the actor's next version")
    assert isinstance(bench.ticket(version=1), int)


def test_repeating_a_request_changes_nothing():
    bench = Bench()
    first = bench.replay.ticket(actor="a", ask=7, version=0, environment="sums", now=0)
    assert first == bench.replay.ticket(actor="a", ask=7, version=0, environment="sums", now=0)
    other = bench.ticket()
    assert bench.put(first.ticket).status == "accepted"
    assert bench.put(first.ticket).status == "duplicate"
    assert bench.put(other).status == "accepted"
    assert bench.lease() is bench.lease()
    assert bench.put(other).status == "duplicate"
    bench.replay.trained(version=0)
    bench.replay.trained(version=0)
    assert bench.put(other).status == "duplicate"
    assert bench.replay.reserve(parent=0, key="again") == bench.replay.reserve(parent=0, key="again") == 1
    counts = bench.replay.statistics()
    assert (counts["groups_accepted"], counts["groups_duplicate"], counts["groups_trained"], counts["step"]) == (
        2,
        3,
        2,
        1,
    )


def test_a_batch_may_overtake_a_straggler_only_while_it_can_still_be_met():
    bench = Bench(late="wait")
    straggler, *others = [bench.ticket() for _ in range(4)]
    for ticket in others:
        bench.put(ticket)
    assert bench.train() == ["1:0", "2:0"]  # the straggler is due by batch 1: overtaken once
    late = bench.ticket()
    bench.put(late)
    assert bench.lease() == Wait("batch 1: ticket 0 of a, which is due")
    bench.now = 9.9
    assert isinstance(bench.lease(), Wait)
    bench.put(straggler, [0])
    assert bench.train() == ["0:0", "3:0"]


def test_a_late_group_is_dropped_after_its_time_and_counted():
    bench = Bench(late="wait")
    tickets = [bench.ticket() for _ in range(4)]
    for ticket in tickets[1:]:
        bench.put(ticket)
    bench.train()
    bench.put(bench.ticket())
    assert isinstance(bench.lease(), Wait)
    bench.now = 10.0
    assert bench.train() == ["3:0", "4:0"]
    assert bench.replay.statistics()["tickets_voided"] == {"late": 1}
    assert bench.put(0, [0]).status == "stale"
    assert "late" in bench.put(0, [0]).reason


def test_drop_does_not_wait_for_a_straggler():
    bench = Bench(late="drop")
    for ticket in [bench.ticket() for _ in range(4)][1:]:
        bench.put(ticket)
    bench.train()
    bench.put(bench.ticket())
    assert bench.train() == ["3:0", "4:0"]


def test_a_hanging_ticket_blocks_a_synchronous_run_for_its_time_only():
    bench = Bench(staleness_max=0, late="drop")
    hanging, other = bench.ticket(), bench.ticket()
    assert isinstance(bench.lease(), Wait)
    bench.now = 9.0
    bench.put(other)  # progress: the clock starts again
    bench.now = 18.0
    assert bench.lease() == Wait("batch 0: 1 of 2 groups ready, 1 in progress")
    bench.now = 19.0
    assert bench.lease() == Wait("batch 0: 1 of 2 groups ready, 0 in progress; came to nothing: 1 late")
    bench.put(bench.ticket())
    assert bench.train() == [f"{other}:0", "2:0"]
    assert bench.put(hanging, [0]).status == "stale"


def test_the_bound_holds_token_by_token():
    bench = Bench(batch_groups=1)
    old = bench.ticket()
    bench.put(bench.ticket())
    bench.train()
    assert isinstance(bench.ticket(), int)
    assert bench.put(old, [0, 1]).status == "accepted"
    batch = bench.lease()
    assert batch.distances == {0: 1, 1: 0}
    bench.replay.trained(version=1)
    assert bench.replay.statistics()["staleness_max"] == 1
    bench.version = bench.publish(1)
    assert bench.put(2, [0, 2]).status == "stale"
    assert bench.put(2, [0, 2]).status == "stale"
    counts = bench.replay.statistics()
    assert (counts["groups_dropped"], counts["bound_violations"]) == ({"stale": 1}, 0)


def test_a_violation_of_the_bound_would_be_counted_apart_from_the_lease():
    bench = Bench(batch_groups=1)
    bench.put(bench.ticket())
    bench.lease()
    for _ in range(3):
        bench.replay.lineage.reserve(bench.replay.lineage.head)
    bench.replay.leased.groups[0].versions = (3,)
    bench.replay.trained(version=0)
    assert bench.replay.statistics()["bound_violations"] == 1


def test_no_more_tickets_than_the_rest_of_the_run_needs():
    bench = Bench(steps=2)
    for ticket in [bench.ticket() for _ in range(4)]:
        bench.put(ticket)
    bench.train()
    assert isinstance(bench.ticket(), Wait)
    bench.train()
    assert isinstance(bench.ticket(), Wait)
    with pytest.raises(ReplayError, match="all 2 batches of the run are trained"):
        bench.lease()
    bench.replay.finish(version=bench.version)
    assert bench.ticket() == Finished()


def test_finish_counts_what_is_left():
    bench = Bench()
    ready, opened = bench.ticket(), bench.ticket()
    bench.put(ready)
    bench.replay.finish(version=0)
    bench.replay.finish(version=0)
    counts = bench.replay.statistics()
    assert (counts["groups_left"], counts["tickets_voided"], counts["ready"]) == (1, {"finished": 1}, 0)
    assert bench.put(opened).status == "stale"
    assert bench.put(ready).status == "duplicate"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ticket": 9}, "ticket: 9 was never issued by this queue"),
        ({"versions": [4]}, "versions: version: 4, expected one that the learner has published (up to 0)"),
        ({"actor": "b"}, "actor: 'b', expected 'a', which sends it"),
        ({"index": -1}, "group_id: '0:-1', expected '0:' and an index"),
        ({"scores": ()}, "trajectories: 0, expected 1 to 4096"),
        ({"scores": (float("nan"),)}, "trajectories[0].score: nan, expected at most 1e+09 in magnitude"),
        ({"scores": (1e200,)}, "trajectories[0].score: 1e+200, expected at most 1e+09 in magnitude"),
    ],
)
def test_an_invalid_group_is_refused_by_name_and_its_ticket_lives(change, reason):
    bench = Bench()
    assert bench.ticket() == 0
    if "versions" in change and change["versions"] == []:
        change = {**change, "scores": (1.0,)}
    answer = bench.put(change.pop("ticket", 0), change.pop("versions", None), **change)
    assert (answer.status, answer.reason) == ("invalid", reason)
    assert bench.put(0).status == "accepted"


def test_a_ticket_belongs_to_its_actor():
    bench = Bench()
    bench.replay.join(role="actor", name="b", incarnation="1", now=0)
    ticket = bench.ticket(actor="b")
    assert bench.put(ticket).reason == "ticket: 0 belongs to actor 'b', not to 'a'"
    with pytest.raises(ReplayError, match="belongs to actor 'b'"):
        bench.replay.void(actor="a", ticket=ticket, reason="x", scores=None, now=0)


def test_a_ticket_may_carry_several_groups():
    bench = Bench()
    ticket = bench.ticket()
    assert bench.put(ticket, index=0, final=False).status == "accepted"
    assert bench.put(ticket, index=1, final=False).status == "accepted"
    assert bench.replay.statistics()["live_tickets"] == 3
    assert bench.put(ticket, index=1).status == "duplicate"  # sent again as the last one
    assert bench.replay.statistics()["live_tickets"] == 2
    bench.replay.void(actor="a", ticket=ticket, reason="released", scores=None, now=0)
    assert bench.put(ticket, index=2).reason == "ticket 0 has ended: its last group has come"
    assert bench.replay.statistics()["tickets_voided"] == {}
    assert bench.train() == ["0:0", "0:1"]


def test_scores_of_all_that_ended_since_the_last_lease():
    bench = Bench(batch_groups=1)
    bench.put(bench.ticket(), scores=(1.0, 0.0))
    bench.replay.void(actor="a", ticket=bench.ticket(), reason="no_variance", scores=Scores.of([1.0, 1.0]), now=0)
    bench.replay.void(actor="a", ticket=1, reason="no_variance", scores=Scores.of([1.0, 1.0]), now=0)
    batch = bench.lease()
    assert (batch.scores.groups, batch.scores.mean, batch.dropped) == (2, 0.75, {"no_variance": 1})
    bench.replay.trained(version=0)
    bench.version = bench.publish(0)
    bench.put(bench.ticket(), scores=(0.0,))
    assert bench.lease().scores == Scores.of([0.0])


def test_a_silent_actor_is_gone_with_its_tickets_but_not_its_groups():
    bench = Bench()
    bench.put(bench.ticket())
    bench.ticket()
    bench.replay.heard(role="learner", name="l", incarnation="1", now=10.5)
    bench.replay.expire(10.0)
    assert list(bench.replay.actors) == ["a"]
    bench.replay.expire(10.5)
    counts = bench.replay.statistics()
    assert (counts["tickets_voided"], counts["ready"], counts["actors"]) == ({"actor_expired": 1}, 1, {})
    with pytest.raises(NotJoined):
        bench.ticket()
    bench.replay.join(role="actor", name="a", incarnation="2", now=11)
    with pytest.raises(NotJoined, match="took over"):
        bench.replay.heard(role="actor", name="a", incarnation="1", now=11)
    with pytest.raises(NameTaken):
        bench.replay.join(role="actor", name="a", incarnation="3", now=12)


def test_a_cancelled_ask_holds_no_ticket():
    bench = Bench()
    bench.replay.ticket(actor="a", ask=50, version=0, environment="sums", now=0)
    bench.replay.cancel(actor="a", ask=50, now=0)
    bench.replay.cancel(actor="a", ask=51, now=0)
    for ask in (50, 51):
        with pytest.raises(ReplayError, match="was cancelled"):
            bench.replay.ticket(actor="a", ask=ask, version=0, environment="sums", now=0)
    assert bench.replay.statistics()["live_tickets"] == 0


def test_full_never_blocks_the_batch_to_come():
    bench = Bench(max_bytes=2 * packed_size())
    tickets = [bench.ticket() for _ in range(4)]
    assert bench.put(tickets[3]).status == "accepted"
    assert bench.put(tickets[2]).status == "accepted"
    refused = bench.put(tickets[1])
    assert (refused.status, refused.retry_after) == ("full", 1.0)
    assert bench.put(tickets[0]).status == "accepted"  # the most urgent
    bench.train()
    assert bench.put(tickets[1], [0]).status == "accepted"


def resumed(bench: Bench, parent: int | None) -> Bench:
    bench.replay.leave(role="learner", name="l")
    bench.replay.join(role="learner", name="l", incarnation="2", now=bench.now)
    bench.version = bench.publish(parent)
    return bench


def test_a_new_learner_gets_back_what_no_checkpoint_holds():
    bench = Bench(staleness_max=3)
    for ticket in [bench.ticket() for _ in range(8)]:
        bench.put(ticket)
    assert bench.train() == ["0:0", "1:0"]
    bench.replay.commit(version=1, checkpoint="one")
    assert bench.train() == ["2:0", "3:0"]
    assert [g.group_id for g in bench.lease().groups] == ["4:0", "5:0"]
    resumed(bench, 1)
    assert bench.version == 3
    assert bench.replay.lineage.depth(3) == 2
    counts = bench.replay.statistics()
    assert (counts["ready"], counts["groups_returned"], counts["step"], counts["groups_trained"]) == (6, 4, 1, 2)
    assert bench.train() == ["2:0", "3:0"]
    assert bench.train() == ["4:0", "5:0"]
    assert bench.put(0).status == "duplicate"
    assert bench.replay.statistics()["bound_violations"] == 0


def test_a_commit_that_was_lost_is_made_up_by_the_resume():
    bench = Bench()
    for ticket in [bench.ticket() for _ in range(4)]:
        bench.put(ticket)
    bench.train()
    resumed(bench, 1)  # its checkpoint holds version 1, though the commit never came
    counts = bench.replay.statistics()
    assert (counts["groups_committed"], counts["ready"], counts["step"]) == (2, 2, 1)


def test_tokens_of_an_abandoned_branch_have_an_honest_age():
    bench = Bench(batch_groups=1, staleness_max=2)
    for ticket in [bench.ticket() for _ in range(3)]:
        bench.put(ticket, [0])
    bench.train()
    bench.train()
    abandoned = bench.ticket()
    assert bench.version == 2
    resumed(bench, 0)
    assert bench.put(abandoned, [2]).status == "stale"  # 2-1-0-3: three edges
    assert [bench.train() for _ in range(2)] == [["0:0"], ["1:0"]]
    assert bench.replay.statistics()["bound_violations"] == 0


def test_what_waits_for_a_checkpoint_is_bounded_and_nothing_of_it_is_lost():
    size = packed_size()
    bench = Bench(batch_groups=1, max_uncommitted_bytes=3 * size)
    for wanted in (False, True, True, True):
        bench.put(bench.ticket())
        assert isinstance(bench.lease(), Lease)
        bench.replay.trained(version=bench.version)
        assert bench.replay.checkpoint_wanted is wanted
        bench.version = bench.publish(bench.version)
    bench.put(bench.ticket())
    with pytest.raises(ReplayError, match=r"in no checkpoint, at most .* expected a commit first"):
        bench.lease()
    assert bench.replay.bytes_uncommitted == 4 * size
    bench.replay.commit(version=bench.version, checkpoint="x")
    assert bench.replay.bytes_uncommitted == 0
    assert isinstance(bench.lease(), Lease)


def test_the_learner_is_told_what_it_did_out_of_turn():
    bench = Bench()
    with pytest.raises(ReplayError, match="version: 5, expected 0, the newest published"):
        bench.replay.lease(version=5, now=0)
    with pytest.raises(ReplayError, match="version: 0, expected one that is leased"):
        bench.replay.trained(version=0)
    with pytest.raises(ReplayError, match="parent: 9"):
        bench.replay.reserve(parent=9, key="x")
    for ticket in (bench.ticket(), bench.ticket()):
        bench.put(ticket)
    bench.lease()
    bench.replay.trained(version=0)
    with pytest.raises(ReplayError, match="version: 0 is trained already"):
        bench.replay.lease(version=0, now=0)


# ---------------------------------------------------------------- prompts, turns, reuse, orders, masks, restarts


def items(bench: Bench) -> list[int]:
    return [ticket.item for ticket in bench.replay.tickets]


def test_each_prompt_is_used_once_whatever_becomes_of_its_ticket():
    bench = Bench(batch_groups=4)
    tickets = [bench.ticket() for _ in range(5)]
    assert items(bench) == [0, 1, 2, 3, 4]
    void = bench.replay.void
    void(actor="a", ticket=tickets[0], reason="cancelled", scores=None, now=0)
    void(actor="a", ticket=tickets[1], reason="no_variance", scores=Scores.of([1.0, 1.0]), now=0)
    void(actor="a", ticket=tickets[2], reason="dropped_by_environment", scores=Scores(), now=0)
    bench.put(tickets[3])
    assert bench.replay.tickets[-1].item == 4
    again = [bench.ticket() for _ in range(2)]
    assert items(bench) == [4, 0, 5]  # what was given back comes first, what was used never
    assert again == [5, 6]


def test_the_prompt_of_a_group_that_gets_too_old_comes_again():
    bench = Bench(batch_groups=1, staleness_max=2)
    for _ in range(3):
        bench.put(bench.ticket())
    bench.train()
    bench.train()
    bench.put(bench.ticket())
    resumed(bench, 0)
    assert [bench.train() for _ in range(2)] == [["0:0"], ["1:0"]]  # 2:0 is too old by the time, 3:0 is of version 2
    assert bench.replay.statistics()["groups_dropped"] == {"stale": 1}
    bench.ticket()
    assert items(bench) == [3]
    assert bench.replay.statistics()["items_skipped"] == 0


def test_a_prompt_that_fails_three_times_is_skipped_and_counted():
    bench = Bench()
    for _ in range(3):
        ticket = bench.ticket()
        assert items(bench) == [0]
        bench.replay.void(actor="a", ticket=ticket, reason="failed", scores=None, now=0)
    bench.ticket()
    assert items(bench) == [1]
    assert bench.replay.statistics()["items_skipped"] == 1
    assert "skipped" in bench.kinds()


def test_turns_follow_weights_and_then_the_actor_with_fewer_tickets():
    bench = Bench(batch_groups=200, weights={"often": 3.0, "seldom": 1.0})
    bench.replay.join(role="actor", name="b", incarnation="1", now=0)
    given: Counter[tuple[str, str]] = Counter()
    for ask in range(160):
        turn = min(
            ((actor, environment) for environment in ("often", "seldom") for actor in "ab"),
            key=lambda kind: bench.replay.turn(*kind),
        )
        given[turn] += 1
        bench.replay.ticket(actor=turn[0], ask=ask, version=0, environment=turn[1], now=0)
    assert given["a", "often"] + given["b", "often"] == 120
    assert given["a", "often"] + given["a", "seldom"] == 80


def test_an_environment_that_was_away_does_not_take_everything_afterwards():
    bench = Bench(batch_groups=100, staleness_max=0)
    for ask in range(50):
        bench.replay.ticket(actor="a", ask=ask, version=0, environment="busy", now=0)
    bench.replay.rules = replace(bench.replay.rules, batch_groups=1000)
    bench.replay.ticket(actor="a", ask=99, version=0, environment="late", now=0)
    ahead = bench.replay.items.clock("busy") - bench.replay.items.clock("late")
    assert 0 <= ahead <= 50


def test_a_group_trains_as_many_batches_as_planned_each_time_within_the_bound():
    bench = Bench(batch_groups=1, staleness_max=3, reuse=2)
    bench.put(bench.ticket())
    bench.put(bench.ticket())
    assert isinstance(bench.ticket(), Wait)  # four batches within the bound, and all of them are planned
    assert [bench.train() for _ in range(4)] == [["0:0"], ["1:0"], ["0:0"], ["1:0"]]
    bench.replay.commit(version=4, checkpoint="all")
    counts = bench.replay.statistics()
    assert (counts["groups_trained"], counts["uses_forgone"], counts["staleness_max"]) == (4, 0, 3)
    assert bench.replay.held == []


def test_uses_after_a_checkpoint_are_given_back_with_the_rest():
    bench = Bench(batch_groups=1, staleness_max=3, reuse=2)
    bench.put(bench.ticket())
    bench.put(bench.ticket())
    assert [bench.train() for _ in range(2)] == [["0:0"], ["1:0"]]
    bench.replay.commit(version=1, checkpoint="one")
    assert bench.train() == ["0:0"]
    resumed(bench, 1)
    assert sorted(entry.uses for entry in bench.replay.ready) == [0, 1]
    assert [bench.train() for _ in range(2)] == [["1:0"], ["0:0"]]
    assert bench.replay.statistics()["bound_violations"] == 0


def test_freshest_and_uniform_keep_the_bound_and_drop_what_they_leave_behind():
    bench = Bench(batch_groups=1, order="freshest")
    for _ in range(2):
        bench.put(bench.ticket())
    bench.train()
    bench.put(bench.ticket())
    assert bench.train() == ["2:0"]
    bench.put(bench.ticket())
    assert bench.train() == ["3:0"]
    assert bench.replay.statistics()["groups_dropped"] == {"stale": 1}
    chosen = set()
    for seed in range(20):
        bench = Bench(batch_groups=1, order="uniform", seed=seed)
        for _ in range(2):
            bench.put(bench.ticket())
        chosen.add(bench.lease().names[0])
    assert chosen == {"0:0", "1:0"}


def test_a_late_group_trains_the_tokens_that_are_young_enough():
    bench = Bench(batch_groups=1, late="mask_tokens")
    late = bench.ticket()
    bench.put(bench.ticket())
    bench.train()
    bench.put(bench.ticket())
    bench.train()  # nobody waits for the straggler
    bench.put(bench.ticket())
    bench.train()
    assert bench.put(late, [0, 1, 2, 3]).status == "accepted"
    lease = bench.lease()
    assert (lease.names, lease.masked, lease.distances) == (["0:0"], (0, 1), {2: 1, 3: 0})
    bench.replay.trained(version=3)
    counts = bench.replay.statistics()
    assert (counts["bound_violations"], counts["staleness_max"]) == (0, 1)
    assert bench.put(late, [0]).status == "duplicate"


def test_a_late_group_without_a_young_token_is_stale():
    bench = Bench(batch_groups=1, late="mask_tokens")
    late = bench.ticket()
    for _ in range(3):
        bench.put(bench.ticket())
        bench.train()
    assert bench.put(late, [0, 1]).status == "stale"
    bench.ticket()
    assert items(bench) == [0]


def test_tokens_of_a_version_that_was_never_published_are_invalid():
    bench = Bench()
    ticket = bench.ticket()
    bench.replay.reserve(parent=0, key="ahead")
    assert (
        bench.put(ticket, [1]).reason == "versions: version: 1, expected one that the learner has published (up to 0)"
    )
    bench.replay.published(1)
    assert bench.put(ticket, [1]).status == "accepted"


def test_groups_without_a_ticket_are_paced_like_tickets():
    bench = Bench(batch_groups=1)

    def put(score: float, **changes):
        trajectories = (groups.trajectory([0], score),)
        group = Group(
            group_id=changes.pop("group_id", content_id(trajectories)),
            ticket=None,
            actor="a",
            environment="sums",
            trajectories=trajectories,
        )
        return bench.replay.put(group, group.pack(), actor="a", final=True, now=0)

    assert put(0.0, group_id="made-up").reason.startswith("group_id: 'made-up', expected ")
    assert [put(score).status for score in (0.0, 1.0, 0.0, 2.0)] == ["accepted", "accepted", "duplicate", "full"]
    bench.train()
    assert (put(2.0).status, put(0.0).status) == ("full", "duplicate")
    bench.train()
    assert put(2.0).status == "stale"


def test_a_learner_that_was_replaced_is_refused_for_ever():
    bench = resumed(Bench(), 0)
    for _ in range(2):
        with pytest.raises(Fenced, match="incarnation: '1' of learner 'l' was replaced"):
            bench.replay.join(role="learner", name="l", incarnation="1", now=0)
        bench.replay.leave(role="learner", name="l")


def test_reasons_that_clients_make_up_are_counted_in_bounded_space():
    bench = Bench()
    for i in range(100):
        bench.replay.void(actor="a", ticket=bench.ticket(), reason=f"reason {i}", scores=Scores(), now=0)
    voided = bench.replay.statistics()["tickets_voided"]
    assert (len(voided), sum(voided.values()), voided["other"]) == (65, 100, 36)


def test_reports_are_logged_once():
    bench = Bench()
    bench.kinds()
    for number in (1, 1, 2):
        bench.replay.report(role="actor", name="a", number=number, events=[Event("activity", {"n": number}, "a")])
    assert [event.fields["n"] for event in bench.replay.drain().events] == [1, 2]


def saved(bench: Bench) -> dict[str, dict]:
    rows: dict[str, dict] = {}
    for (table, key), row in bench.replay.drain().rows.items():
        if row is not None:
            rows.setdefault(table, {})[key] = row
    return rows


def test_a_queue_that_comes_back_waits_for_its_clients_and_goes_on_in_a_longer_run():
    bench = Bench(steps=1)
    ticket, other = bench.ticket(), bench.ticket()
    bench.put(ticket)
    bench.put(other)
    bench.train()
    bench.replay.finish(version=1)
    rows = saved(bench)
    back = Replay.restore(replace(bench.replay.rules, steps=1), rows, now=100.0)
    assert (back.final, list(back.actors)) == (1, ["a"])
    back.expire(109.0)
    assert list(back.actors) == ["a"]
    back.expire(111.0)
    assert back.actors == {}
    longer = Replay.restore(replace(bench.replay.rules, steps=2), rows, now=0.0)
    assert longer.final is None
    assert isinstance(longer.ticket(actor="a", ask=9, version=1, environment="sums", now=0), Grant)


def test_a_lower_bound_takes_back_a_lease_that_breaks_it():
    bench = Bench(batch_groups=1)
    bench.put(bench.ticket())
    bench.put(bench.ticket())
    bench.train()
    assert bench.lease().distances == {0: 1}
    back = Replay.restore(replace(bench.replay.rules, staleness_max=0), saved(bench), now=0.0)
    assert back.leased is None
    assert isinstance(back.lease(version=1, now=0), Wait)
    assert back.statistics()["groups_dropped"] == {"stale": 1}


def test_an_actor_that_is_a_little_behind_gets_its_share_of_what_a_batch_frees():
    bench = Bench(batch_groups=4, staleness_max=1)
    bench.replay.join(role="actor", name="b", incarnation="1", now=0)
    for _ in range(8):
        bench.put(bench.ticket())
    bench.train()
    bench.version, old = 1, 0

    def ask(actor: str, version: int, kept: list[int]):
        bench.asks += 1
        return bench.replay.ticket(
            actor=actor, ask=bench.asks, version=version, environment="sums", now=0, kept=kept, waiting=9
        )

    kept: list[int] = []
    assert isinstance(ask("b", old, kept), Wait)  # its turn comes first, as it holds no ticket
    assert kept == [2, 2]
    assert [isinstance(ask("a", 1, kept), Grant) for _ in range(3)] == [True, True, False]
    assert [isinstance(ask("b", 1, []), Grant) for _ in range(3)] == [True, True, False]


def test_a_checkpoint_that_a_replaced_learner_still_wrote_is_refused():
    bench = Bench(staleness_max=3)
    for ticket in [bench.ticket() for _ in range(6)]:
        bench.put(ticket)
    bench.train()
    abandoned = bench.version  # its learner freezes while it writes this checkpoint
    resumed(bench, 0)
    bench.replay.leave(role="learner", name="l")
    bench.replay.join(role="learner", name="l", incarnation="3", now=0)
    with pytest.raises(ReplayError, match="parent: 1 is on a branch that was given up when version 2 went on"):
        bench.publish(abandoned)
    bench.version = bench.publish(2)
    assert bench.train() == ["0:0", "1:0"]


def test_fewer_uses_than_before_end_those_that_had_more():
    bench = Bench(batch_groups=1, staleness_max=3, reuse=2)
    for _ in range(2):
        bench.put(bench.ticket())
    assert [bench.train() for _ in range(2)] == [["0:0"], ["1:0"]]
    assert bench.replay.statistics()["ready"] == 2
    back = Replay.restore(replace(bench.replay.rules, reuse=1), saved(bench), now=0.0)
    assert back.statistics()["ready"] == 0
    assert isinstance(back.lease(version=2, now=0), Wait)
    back.commit(version=2, checkpoint="c")
    assert (back.held, back.statistics()["uses_forgone"]) == ([], 0)


def test_a_configured_environment_always_has_a_place():
    bench = Bench(batch_groups=2000, weights={"sums": 1.0})
    for ask in range(MAX_STREAMS):
        bench.replay.ticket(actor="a", ask=10_000 + ask, version=0, environment=f"x{ask}", now=0)
    with pytest.raises(ReplayError, match="environment: 'one more', but there are 1024 others already"):
        bench.replay.ticket(actor="a", ask=1, version=0, environment="one more", now=0)
    assert isinstance(bench.ticket(), int)
