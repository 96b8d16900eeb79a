"""The tree of policy versions.

A version names the one it was trained from. Staleness is a distance in this tree, so tokens of a branch that a rollback
abandoned have an honest age: they are as far away as the two branches have grown apart.

    >>> tree = Lineage()
    >>> tree.reserve(None), tree.reserve(0), tree.reserve(1), tree.reserve(0)
    (0, 1, 2, 3)
    >>> tree.distance(2, 3, limit=9)
    3
"""

from __future__ import annotations

from typing import Any

from lachesis_transport.tables import Table


class Lineage:
    """Which versions exist, which are published, and how far they are from each other.

    A few integers a version are kept for ever: 100,000 versions are some megabytes.
    """

    def __init__(self) -> None:
        self.parents: Table[int, int | None] = Table("version", lambda parent: [parent])
        """By version."""
        self.publications: Table[int, None] = Table("published", lambda _: [])
        """The versions that were published."""
        self._depths: dict[int, int] = {}
        self.current: int | None = None
        """Newest published version."""
        self.head: int | None = None
        """Newest reserved version."""

    def restore(self, versions: dict[int, Any], published: dict[int, Any]) -> None:
        """Fill an empty tree from saved rows."""
        self.parents.restore(dict(sorted(versions.items())), lambda _, row: row[0])
        self.publications.restore(published, lambda _, row: None)
        for version, parent in self.parents.items():  # a parent is older than its children
            self._depths[version] = 0 if parent is None else self._depths[parent] + 1
        self.head, self.current = max(self.parents, default=None), max(self.publications, default=None)

    def __contains__(self, version: int) -> bool:
        return version in self.parents

    def __len__(self) -> int:
        return len(self.parents)

    def reserve(self, parent: int | None) -> int:
        """The next unused version, as a child of `parent` (None: a new root). Raises KeyError for an unknown parent."""
        version = 0 if self.head is None else self.head + 1
        self._depths[version] = 0 if parent is None else self._depths[parent] + 1
        self.parents[version] = parent
        self.head = version
        return version

    def publish(self, version: int) -> bool:
        """Note that actors may sample from `version`; whether that was news. Raises KeyError for an unknown version."""
        self.parents[version]
        if self.current is not None and version <= self.current:
            return False
        self.publications[version] = None
        self.current = version
        return True

    def is_published(self, version: int) -> bool:
        """Whether actors may ever have sampled from `version`."""
        return version in self.publications

    def parent(self, version: int) -> int | None:
        """The version that `version` was trained from."""
        return self.parents[version]

    def depth(self, version: int) -> int:
        """Edges from `version` to its root."""
        return self._depths[version]

    def distance(self, a: int, b: int, *, limit: int) -> int | None:
        """Edges between two versions, or None when there are more than `limit` (or no path). Takes O(limit) steps."""
        edges = 0
        left: int | None = a
        right: int | None = b
        while left != right:
            if left is None or right is None or edges >= limit:
                return None
            if self._depths[left] >= self._depths[right]:
                left = self.parents[left]
            else:
                right = self.parents[right]
            edges += 1
        return edges

    def descends(self, version: int, ancestor: int) -> bool:
        """Whether `ancestor` lies on the way from `version` to its root (a version does not descend from itself)."""
        at: int | None = version
        while at is not None and self._depths[at] > self._depths[ancestor]:
            at = self.parents[at]
        return at == ancestor and version != ancestor
