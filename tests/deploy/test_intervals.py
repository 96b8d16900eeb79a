from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lachesis_deploy.intervals import intersection, length, union

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda span: (float(span[0]), float(span[0] + span[1]))),
    max_size=8,
)


def cells(intervals):
    """The unit cells that integer intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(spans, spans)
def test_sets_of_time_behave_as_sets(first, second):
    a, b = union(first), union(second)
    assert cells(a) == cells(first)
    assert length(a) == len(cells(first))
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1))
    both = intersection(a, b)
    assert cells(both) == cells(first) & cells(second)
    assert length(both) == len(cells(both))
