from __future__ import annotations

from lachesis_actors.activity import MAX_INTERVALS, Activity


def test_intervals_and_tokens():
    activity = Activity(now=100.0)
    activity.begin(now=101.0)
    activity.begin(now=101.5)
    activity.end(tokens=7, now=102.0)
    activity.pause(True, now=102.5)
    activity.pause(False, now=102.75)
    activity.end(tokens=3, now=104.0)
    report = activity.drain(now=105.0)
    assert report == {
        "start": 100.0,
        "end": 105.0,
        "tokens": 10,
        "intervals": [
            ["idle", 100.0, 101.0],
            ["generating", 101.0, 102.5],
            ["paused", 102.5, 102.75],
            ["generating", 102.75, 104.0],
            ["idle", 104.0, 105.0],
        ],
    }
    assert activity.drain(now=106.0)["intervals"] == [["idle", 105.0, 106.0]]


def test_intervals_are_bounded_and_cover_the_time():
    activity = Activity(now=0.0)
    for i in range(5 * MAX_INTERVALS):
        activity.begin(now=2.0 * i + 1)
        activity.end(tokens=1, now=2.0 * i + 2)
    report = activity.drain(now=1e6)
    assert report["tokens"] == 5 * MAX_INTERVALS
    assert len(report["intervals"]) <= MAX_INTERVALS + 1
    assert sum(end - start for _, start, end in report["intervals"]) == 1e6
