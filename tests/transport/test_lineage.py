from __future__ import annotations

import pytest

from lachesis_transport.lineage import Lineage


@pytest.fixture
def tree() -> Lineage:
    """0 - 1 - 2 - 3, a branch 1 - 4 - 5, and another root 6."""
    lineage = Lineage()
    for parent in (None, 0, 1, 2, 1, 4, None):
        lineage.reserve(parent)
    return lineage


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (0, 0, 0),
        (0, 3, 3),
        (3, 0, 3),
        (3, 5, 4),
        (5, 3, 4),
        (2, 4, 2),
        (1, 5, 2),
        (6, 6, 0),
        (0, 6, None),
        (6, 3, None),
    ],
)
def test_distance_counts_edges(tree, a, b, distance):
    assert tree.distance(a, b, limit=10) == distance
    if distance:
        assert tree.distance(a, b, limit=distance) == distance
        assert tree.distance(a, b, limit=distance - 1) is None


def test_depth_and_descent(tree):
    assert [tree.depth(v) for v in range(7)] == [0, 1, 2, 3, 2, 3, 0]
    assert tree.descends(5, 1)
    assert tree.descends(5, 0)
    assert not tree.descends(5, 2)
    assert not tree.descends(5, 5)
    assert not tree.descends(1, 5)
    assert not tree.descends(6, 0)


def test_published_versions_only_grow(tree):
    assert tree.publish(0)
    assert not tree.publish(0)
    assert tree.publish(4)
    assert not tree.publish(3)
    assert tree.current == 4
    with pytest.raises(KeyError):
        tree.publish(7)
