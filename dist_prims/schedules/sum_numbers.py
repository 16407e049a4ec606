"""Numbering of sums: every distinct sum of a symbolic run gets a number, so that steps stay NumPy columns.

Numbers 0..size-1 are the ranks' own data; each further number is ``left + right`` of two earlier ones. Two expressions
get the same number exactly when floats give the same result for both: operands may be swapped, groups may not. A sum
that a step *continues* (with a third addend, a fourth) is not rounded between its addends. It therefore gets another
number than the sum of a rounded sum and an addend.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__: list[str] = []

Ints = NDArray[np.int64]


class Sums:
    """The sums of one symbolic run. ``ranks[i]`` is the set of ranks in sum i, as bits of an int."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [1 << rank for rank in range(size)]
        self._additions: list[tuple[int, int, bool]] = []
        self._numbers: dict[tuple[int, int, bool], int] = {}

    def add(self, left: Ints, right: Ints, continues: NDArray[np.bool_]) -> Ints:
        """Numbers of the sums left[i] + right[i]. ``continues[i]``: right[i] is a further addend of the sum left[i]."""
        low, high = np.minimum(left, right), np.maximum(left, right)
        left, right = np.where(continues, left, low), np.where(continues, right, high)
        # Each addition is one integer: left, right (32 bits), continues (1 bit).
        keys, where = np.unique((left << 32 | right) << 1 | continues, return_inverse=True)
        numbers = [self._number(key >> 33, key >> 1 & 0xFFFFFFFF, bool(key & 1)) for key in keys.tolist()]
        return np.array(numbers, np.int64)[where]

    def _number(self, left: int, right: int, continues: bool) -> int:
        key = (left, right, continues)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.ranks)
            self._additions.append(key)
            self.ranks.append(self.ranks[left] | self.ranks[right])
        return number

    def addends(self, number: int) -> tuple[int, ...]:
        """The numbers that are added, left to right and rounded once, to form a sum; () for a rank's own data."""
        if number < self.size:
            return ()
        left, right, continues = self._additions[number - self.size]
        if continues:
            return (*self.addends(left), right)
        return (right, left) if left < self.size <= right else (left, right)  # a partial sum stands before one rank


def ranks_of(bits: int) -> tuple[int, ...]:
    """The ranks in a set of bits: (0, 2) for 0b101."""
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)


def names_of(bits: int) -> str:
    """Format the ranks in a set of bits as r0+r2."""
    return "+".join(f"r{rank}" for rank in ranks_of(bits))
