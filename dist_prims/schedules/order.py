"""The exact expression of additions behind a result, so that a distributed sum can be reproduced to the bit.

Float addition is commutative but not associative: ``(a+b)+c`` and ``a+(b+c)`` differ in the last bits. A schedule
fixes the grouping, and here it is read off. Each pair of parentheses is one step's sum, added left to right and
rounded once to the type of the data; that matters for half types, whose sums are made in float32.

>>> from dist_prims.schedules import build
>>> str(build("all_reduce", "ring", size=4).order(chunk=2))
'((r2+r3)+r0)+r1'
>>> str(build("all_reduce", "direct", size=4).order(chunk=0))
'r0+r1+r2+r3'
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .schedule import Schedule
from .sums import Sums

__all__ = ["Order", "order"]


def _numpy_sum(addends: Sequence[Any]) -> Any:
    wide = "float32" if addends[0].dtype == "float16" else addends[0].dtype
    total = functools.reduce(lambda held, other: held + other.astype(wide), addends[1:], addends[0].astype(wide))
    return total.astype(addends[0].dtype)


@dataclass(frozen=True, eq=False)
class Order:
    """A sum of ranks' data. ``str()`` writes it, ``evaluate`` computes it."""

    sums: Sums
    number: int

    def evaluate(self, values: Sequence[Any], add: Callable[[Sequence[Any]], Any] = _numpy_sum) -> Any:
        """The sum of values[rank], in this order; ``add`` adds a list left to right and rounds once."""
        return self._fold(lambda rank: values[rank], add)

    def __str__(self) -> str:
        text: str = self._fold(lambda rank: f"r{rank}", lambda addends: f"({'+'.join(addends)})")
        return text[1:-1] if text.startswith("(") else text

    def _fold(self, leaf: Callable[[int], Any], join: Callable[[Sequence[Any]], Any]) -> Any:
        """Bottom up without recursion: a ring over 1,000 ranks nests 1,000 deep."""
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


def order(schedule: Schedule, chunk: int, rank: int | None = None) -> Order:
    """The sum that a chunk of the output ends as; on the first rank that is promised it unless a rank is given."""
    from .proof import execute

    state = execute(schedule)
    for candidate in range(schedule.size) if rank is None else (rank,):
        if chunk in schedule.contract.end(candidate).chunk:
            return Order(state.sums, int(state.sum[candidate, chunk]))
    raise ValueError(f"{schedule.collective} {schedule.algorithm}: no rank ends with chunk {chunk} as its output")
