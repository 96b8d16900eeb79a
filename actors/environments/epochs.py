"""The order of training problems: an endless stream of numbers over a finite set, each problem once an epoch."""

from __future__ import annotations

import random

EPOCHS_KEPT = 2
"""Around the end of an epoch the numbers of two come mixed."""


class Epochs:
    """Maps the number of an item to the index of a problem among `size` of them.

    Numbers e * size to (e + 1) * size - 1 are epoch e: a permutation that depends on `seed` and e alone, so every
    process that has the same seed agrees on it, also after a restart.

    >>> order = Epochs(3, seed=7)
    >>> sorted(order[number] for number in (3, 4, 5))
    [0, 1, 2]

    Raises ValueError for a size below 1, and IndexError for a number below 0.
    """

    def __init__(self, size: int, *, seed: int) -> None:
        if size < 1:
            raise ValueError(f"size: {size}, expected 1 or more")
        self._size = size
        self._seed = seed
        self._kept: dict[int, list[int]] = {}

    def __getitem__(self, number: int) -> int:
        if number < 0:
            raise IndexError(f"number: {number}, expected 0 or more")
        epoch, position = divmod(number, self._size)
        return self._permutation(epoch)[position]

    def _permutation(self, epoch: int) -> list[int]:
        if epoch not in self._kept:
            while len(self._kept) >= EPOCHS_KEPT:
                del self._kept[min(self._kept)]
            permutation = list(range(self._size))
            random.Random(f"{self._seed}/{epoch}").shuffle(permutation)
            self._kept[epoch] = permutation
        return self._kept[epoch]
