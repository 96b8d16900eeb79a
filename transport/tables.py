"""A dict that knows what changed in it, so that just that is saved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Table(dict[K, V]):
    """A dict whose changed keys are collected. A value that is changed in place is named by `touch`."""

    def __init__(self, name: str, to_row: Callable[[V], Any]) -> None:
        super().__init__()
        self.name = name
        self._to_row = to_row
        self._touched: dict[K, None] = {}

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self._touched[key] = None

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self._touched[key] = None

    def touch(self, key: K) -> None:
        """The value at `key` was changed in place."""
        self._touched[key] = None

    def drain(self) -> Iterator[tuple[tuple[str, K], Any | None]]:
        """What to save: ((table, key), row), the row None where the key is gone. Each change is told once."""
        touched, self._touched = self._touched, {}
        for key in touched:
            yield (self.name, key), self._to_row(self[key]) if key in self else None

    def restore(self, rows: dict[Any, Any], from_row: Callable[[K, Any], V]) -> None:
        """Fill an empty table from saved rows, in their order; nothing of it counts as changed."""
        for key, row in rows.items():
            super().__setitem__(key, from_row(key, row))
