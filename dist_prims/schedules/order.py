"""The order of additions behind a result, so that a distributed sum can be reproduced to the bit.

Float addition is commutative but not associative: ``(a+b)+c`` and ``a+(b+c)`` differ in the last bits. A schedule fixes
the grouping, and this module derives it from the schedule. Each pair of parentheses is one step's sum, which is added
left to right and rounded once to the type of the data. The rounding matters for half types, whose sums are in float32.

>>> from dist_prims.schedules import build
>>> str(build("all_reduce", "ring", size=4).order(chunk=2))
'((r2+r3)+r0)+r1'
>>> str(build("all_reduce", "direct", size=4).order(chunk=0))
'r0+r1+r2+r3'

A mean (AVG) is the same expression, divided within the last pair of parentheses, before the rounding. For half types,
partial sums of several ranks are stored divided by a power of two, so that they do not overflow; the division loses
bits only below the normal range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .steps import ScheduleData
from .sum_numbers import Sums
from .symbolic import execute

__all__: list[str] = []


def scales(terms: Sequence[int], ranks: int) -> tuple[list[float], float]:
    """The scaling of one addition for a mean of half types: the factor of each operand, and the divisor of their sum.

    ``terms``: the number of ranks whose data is in each operand. A sum of n ranks is stored divided by the smallest
    power of two that is at least n. So each operand is multiplied by its own power and divided by the power of the
    sum: a sum of 2 ranks, stored as half, becomes a quarter in a sum of 3. The sum of all ``ranks`` is divided by what
    a mean lacks then: the number of ranks over its power of two.

    >>> scales([2, 1], ranks=6), scales([3, 3], ranks=6)
    (([0.5, 0.25], 1.0), ([0.5, 0.5], 0.75))
    """
    whole = sum(terms)
    power = 2 ** (whole - 1).bit_length()
    factors = [2 ** (each - 1).bit_length() / power for each in terms]
    return factors, ranks / power if whole == ranks else 1.0


def _numpy_sum(addends: Sequence[Any]) -> Any:
    wide = "float32" if addends[0].dtype == "float16" else addends[0].dtype
    total = functools.reduce(lambda held, other: held + other.astype(wide), addends[1:], addends[0].astype(wide))
    return total.astype(addends[0].dtype)


def _numpy_mean(addends: Sequence[Any], terms: Sequence[int], ranks: int) -> Any:
    dtype = addends[0].dtype
    if dtype == "float16":
        factors, divisor = scales(terms, ranks)
        wide = [each.astype("float32") * np.float32(by) for each, by in zip(addends, factors, strict=True)]
        return (_numpy_sum(wide) / np.float32(divisor)).astype(dtype)
    total = _numpy_sum(addends)
    return total if sum(terms) < ranks else total / np.asarray(ranks, dtype)


@dataclass(frozen=True, eq=False)
class Order:
    """The expression of one sum of ranks' data. ``str()`` formats it, ``evaluate`` computes it."""

    sums: Sums
    number: int  # of the sum, in ``sums``

    def evaluate(self, values: Sequence[Any], add: Callable[[Sequence[Any]], Any] = _numpy_sum) -> Any:
        """The sum of values[rank], in this order; ``add`` adds a list left to right and rounds once."""
        return self._fold(lambda rank: values[rank], add)

    def mean(
        self, values: Sequence[Any], fold: Callable[[Sequence[Any], Sequence[int], int], Any] = _numpy_mean
    ) -> Any:
        """The mean of values[rank], real numbers; ``fold(sums, terms, ranks)`` makes one step of it, see ``scales``."""
        ranks = self._fold(lambda rank: 1, sum)

        def join(parts: Sequence[tuple[Any, int]]) -> tuple[Any, int]:
            sums, terms = zip(*parts, strict=True)
            return fold(sums, terms, ranks), sum(terms)

        return self._fold(lambda rank: (values[rank], 1), join)[0]

    def __str__(self) -> str:
        text: str = self._fold(lambda rank: f"r{rank}", lambda addends: f"({'+'.join(addends)})")
        return text[1:-1] if text.startswith("(") else text

    def _fold(self, leaf: Callable[[int], Any], join: Callable[[Sequence[Any]], Any]) -> Any:
        """Evaluate bottom-up without recursion: a ring over 1,000 ranks is nested 1,000 levels deep."""
        done: dict[int, Any] = {}
        stack = [self.number]
        while stack:
            addends = self.sums.addends(stack[-1])
            waiting = [number for number in addends if number not in done]
            if waiting:
                stack += waiting
                continue
            number = stack.pop()
            done[number] = join([done[each] for each in addends]) if addends else leaf(number)
        return done[self.number]


def order(schedule: ScheduleData, chunk: int, rank: int | None = None) -> Order:
    """The sum in a chunk of the output on ``rank``; by default on the first rank whose output has the chunk."""
    state = execute(schedule)
    for candidate in range(schedule.size) if rank is None else (rank,):
        if chunk in schedule.contract.end(candidate).chunk:
            return Order(state.sums, int(state.sum[candidate, chunk]))
    raise ValueError(f"{schedule.collective} {schedule.algorithm}: no rank ends with chunk {chunk} as its output")
