from __future__ import annotations

import time

from lachesis_deploy.drought import LEAST_GROUPS, LEAST_SECONDS, REMIND_SECONDS, Drought


def statistics(accepted, **voided):
    return {"groups_accepted": accepted, "tickets_voided": voided}


def clock(now):
    return time.strftime("%H:%M:%S", time.localtime(now))


def test_it_is_said_when_it_begins_and_then_once_in_a_while_with_counts():
    drought = Drought(groups=20)
    lines = [drought.look(statistics(0, no_variance=n), now=1000.0 + n) for n in range(200)]
    said = [n for n, line in enumerate(lines) if line]
    assert said == [30, 30 + REMIND_SECONDS, 30 + 2 * REMIND_SECONDS]
    assert lines[30] == (
        f"no group to train on since {clock(1000)}: 30 with equal scores throughout, so without advantages"
    )
    assert ": 90 with equal scores" in lines[90]


def test_a_group_that_is_accepted_ends_it_and_what_was_before_does_not_count():
    drought = Drought(groups=1)
    assert drought.look(statistics(5, no_variance=1000), now=0.0) is None  # a run that was resumed
    assert drought.look(statistics(5, no_variance=1000 + LEAST_GROUPS - 1), now=1.0) is None
    assert drought.look(statistics(6, no_variance=1000 + LEAST_GROUPS), now=2.0) is None
    assert drought.look(statistics(6, no_variance=1000 + 2 * LEAST_GROUPS - 1), now=3.0) is None
    assert drought.look(statistics(6, no_variance=1000 + 2 * LEAST_GROUPS), now=1.9 + LEAST_SECONDS) is None
    assert drought.text is None
    line = drought.look(statistics(6, no_variance=1000 + 2 * LEAST_GROUPS), now=2.0 + LEAST_SECONDS)
    assert f": {LEAST_GROUPS} with equal scores" in line
    assert drought.text == line
    assert drought.look(statistics(7, no_variance=2000), now=3.0 + LEAST_SECONDS) is None
    assert drought.text is None
    # A new one soon after does not say more often than a long one.
    assert drought.look(statistics(7, no_variance=2100), now=3.0 + 2 * LEAST_SECONDS) is None
    assert drought.look(statistics(7, no_variance=2200), now=2.0 + LEAST_SECONDS + REMIND_SECONDS) is not None


def test_reasons_are_told_apart_and_ends_from_outside_do_not_count():
    drought = Drought(groups=1)
    drought.look(statistics(0), now=0.0)
    outside = {"cancelled": 99, "actor_stopped": 99, "actor_gone": 99, "no_item": 99}
    assert drought.look(statistics(0, **outside), now=1.0) is None
    line = drought.look(statistics(0, failed=10, no_variance=5, malformed=2, **outside), now=LEAST_SECONDS)
    counts = (
        "10 failed in their environment, 5 with equal scores throughout, so without advantages, 2 ended as malformed"
    )
    assert line.endswith(counts)


def test_without_statistics_nothing_is_said():
    drought = Drought(groups=1)
    assert drought.look({}, now=0.0) is None
    assert drought.look({"groups_accepted": 0, "tickets_voided": None}, now=0.0) is None
