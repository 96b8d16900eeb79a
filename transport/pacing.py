"""Whether groups can meet their deadlines: the inequality that paces the actors.

With batches of `size` groups from depth `first` on, a set of groups can be trained in time if and only if, for every d,
those due by d are at most (d - first + 1) * size. docs/queue.md proves what follows from keeping it.
"""

from __future__ import annotations

from collections.abc import Iterable


def first_broken(deadlines: Iterable[int], *, first: int, size: int) -> int | None:
    """The earliest deadline (depth) by which too many are due, or None when all can be met.

    >>> first_broken([3, 3, 4], first=3, size=2), first_broken([3, 3, 3], first=3, size=2)
    (None, 3)
    """
    for count, due in enumerate(sorted(deadlines), 1):
        if count > (due - first + 1) * size:
            return due
    return None
