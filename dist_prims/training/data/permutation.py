"""A random permutation of up to 2^62 items, computed element by element.

A shuffled list of 10^12 numbers takes 8 TB. A keyed permutation takes no memory: item k of the order is a function of
k. Here it is a Feistel network on pairs: a number below ``rows * columns`` is a pair (row, column), and each round adds
a hash of one element to the other. A subtraction inverts the round for any hash. As ``rows`` and ``columns`` are near
the square root of the count, few pairs are beyond the count. These are permuted again until they are below it, which
happens because their cycle began below it. A network of a few dozen pairs is far from uniform, so a small order is a
sorted table of hashes.

The permutation of a key is the same on every machine and in every version: it uses integer arithmetic, and the seeding
that NumPy guarantees not to change. A test compares known values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__: list[str] = []

_ROUNDS = 8  # even: rows and columns take turns
_TABLE = 1 << 14  # up to this count the order and its inverse are stored: 128 KB each
_LIMIT = 1 << 62  # rows and columns fit into 32 bits, and their sums into 64
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Words = NDArray[np.uint64]


class Permutation:
    """The function from a position to an item of ``count``; ``key`` is one or several numbers, such as seed and epoch.

    >>> order = Permutation(10**12, key=[1234, 0])
    >>> items = order([0, 1, 2])
    >>> items.tolist(), order.inverse(items).tolist()
    ([555641452438, 268622704801, 814294383173], [0, 1, 2])
    >>> sorted(Permutation(5, key=7)(range(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, key: int | Sequence[int]) -> None:
        if not 0 <= count <= _LIMIT:
            raise ValueError(f"Permutation: count={count} must be from 0 to 2**62")
        if min([key] if isinstance(key, int) else key, default=0) < 0:
            raise ValueError(f"Permutation: key={key} must not be negative")
        self.count = count
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
        self._table = self._back = None
        if count <= _TABLE:
            self._table = np.argsort(_mix(np.arange(count, dtype=np.uint64) ^ self._keys[0]), kind="stable")
            self._back = np.argsort(self._table)
        self._rows = np.uint64(math.isqrt(max(count - 1, 0)) + 1)
        self._columns = np.uint64(-(-count // int(self._rows)))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The items at these positions."""
        within = self._checked(positions)
        return self._table[within] if self._table is not None else self._walk(within, self._forth)

    def inverse(self, items: ArrayLike) -> NDArray[np.int64]:
        """The positions of these items."""
        within = self._checked(items)
        return self._back[within] if self._back is not None else self._walk(within, self._backwards)

    def _checked(self, numbers: ArrayLike) -> NDArray[np.int64]:
        checked = np.asarray(numbers, dtype=np.int64)
        if checked.size and not 0 <= checked.min() <= checked.max() < self.count:
            raise IndexError(f"Permutation: indices {checked.min()} to {checked.max()}; there are {self.count} items")
        return checked

    def _walk(self, numbers: NDArray[np.int64], once: Callable[[Words], Words]) -> NDArray[np.int64]:
        """Permute by ``once``, again and again until every number is below the count."""
        permuted = once(numbers.reshape(-1).astype(np.uint64))
        beyond = np.flatnonzero(permuted >= self.count)
        while beyond.size:
            permuted[beyond] = once(permuted[beyond])
            beyond = beyond[permuted[beyond] >= self.count]
        return permuted.astype(np.int64).reshape(numbers.shape)

    def _forth(self, numbers: Words) -> Words:
        row, column = np.divmod(numbers, self._columns)
        for turn in range(0, _ROUNDS, 2):
            row = _add(row, _below(self._rows, column, self._keys[turn]), self._rows)
            column = _add(column, _below(self._columns, row, self._keys[turn + 1]), self._columns)
        return row * self._columns + column

    def _backwards(self, numbers: Words) -> Words:
        row, column = np.divmod(numbers, self._columns)
        for turn in range(_ROUNDS - 2, -1, -2):
            column = _subtract(column, _below(self._columns, row, self._keys[turn + 1]), self._columns)
            row = _subtract(row, _below(self._rows, column, self._keys[turn]), self._rows)
        return row * self._columns + column


def _mix(words: Words) -> Words:
    """The finalizer of splitmix64: every bit of the input affects every bit of the output."""
    words = (words ^ (words >> _SHIFTS[0])) * _FACTORS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _FACTORS[1]
    return words ^ (words >> _SHIFTS[2])


def _below(bound: np.uint64, half: Words, key: np.uint64) -> Words:
    """A hash below ``bound``: the upper 32 bits as a fraction of it, which is faster than a remainder."""
    return ((_mix(half + key) >> _SHIFTS[3]) * bound) >> _SHIFTS[3]


def _add(half: Words, more: Words, bound: np.uint64) -> Words:
    total = half + more
    least: Words = np.minimum(total, total - bound)  # below the bound the difference wraps to a huge number
    return least


def _subtract(half: Words, less: Words, bound: np.uint64) -> Words:
    total = half - less
    least: Words = np.minimum(total, total + bound)
    return least
