"""Replay of a schedule on a topology: one pass over the steps, from which the seconds for any number of bytes follow.

A ring of 12,500 hosts with 8 ranks each has 25,000 steps of 100,000 transfers: 62 GB if it were stored. Two properties
make it small, and both are detected, not declared:

*Equal steps.* The load of a step on ports and links depends on its senders, receivers and reductions, not on its chunk
numbers. The steps of a ring differ in chunk numbers only, so they are one *pattern*, counted once. Each step is
compared with the last two patterns, column by column, which finds rings and alternating steps.

*Equal resources.* Ranks (and links) with the same counts in every step are busy for the same time, so one of them
represents its *class*. A pattern can only split classes:

    pattern 0    rank   0 1 2 3          all send one message              classes {0 1 2 3}
    pattern 1           0 1 2 3          0 and 2 send between hosts        classes {0 2} {1 3}

Every class comes from one parent class of the previous pattern. So the counts are stored in one row for each class and
pattern, and a walk from the last pattern to the first finds the row of each final class in every pattern. Classes are
needed in place of a step's maximum because of segments: a rank then works on several steps in one tick, and the sum
must be taken over the same rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .schedule import Schedule, Step
from .topology import COLUMNS, Topology

__all__: list[str] = []

Ints = NDArray[np.int64]
MOST_COUNTS = 4_000_000  # numbers kept to follow classes from step to step: 32 MB


def patterns(steps: Iterator[Step]) -> Iterator[tuple[int, Step]]:
    """Each step with the number of its pattern; a new pattern gets the next number.

    >>> from dist_prims.schedules import build
    >>> [number for number, _ in patterns(iter(build("all_reduce", "ring", size=4).steps))]
    [0, 0, 0, 1, 1, 1]
    """
    recent: list[tuple[int, list[NDArray[np.generic]]]] = []
    seen = 0
    for step in steps:
        rows, span = step.narrow
        columns = [rows.src, rows.dst, rows.reduce, *([] if span is None else [span])]
        same = [each for each in recent if _equal(each[1], columns)]
        if not same:
            same = [(seen, [column.copy() for column in columns])]  # a generator may change its own arrays
            seen += 1
        recent = [*same, *(each for each in recent if each is not same[0])][:2]
        yield same[0][0], step


def _equal(some: list[NDArray[np.generic]], others: list[NDArray[np.generic]]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


@dataclass(frozen=True, eq=False)
class Loads:
    """The load of a schedule on a topology. ``pattern``: of each step; ``counts[pattern, class]``: see ``topology``.

    ``followed``: whether a class has the same resources in every pattern; segments can be priced only then.
    ``sent``, ``received``: chunks over each host's link in the whole schedule.
    """

    pattern: Ints
    counts: Ints
    followed: bool
    sent: Ints
    received: Ints

    def ticks(self, segments: int) -> tuple[Ints, Ints]:
        """(counts of every class in a tick, number of such ticks) of a pipeline of segments.

        In tick t segment s is at its step t - s, so a tick does the work of up to ``segments`` consecutive steps.
        """
        if segments == 1:
            return self.counts, np.bincount(self.pattern, minlength=len(self.counts))
        before = np.concatenate([np.zeros_like(self.counts[:1]), self.counts[self.pattern].cumsum(axis=0)])
        tick = np.arange(len(self.pattern) + segments - 1 if len(self.pattern) else 0)
        first, last = np.maximum(tick - segments + 1, 0), np.minimum(tick + 1, len(self.pattern))
        return before[last] - before[first], np.ones(len(tick), np.int64)


@functools.lru_cache(maxsize=256)
def replay(schedule: Schedule, topology: Topology) -> Loads:
    """The loads of all steps of a schedule, computed in one pass that holds one step at a time."""
    if schedule.size != topology.size:
        raise ValueError(
            f"{schedule.collective} {schedule.algorithm} has {schedule.size} ranks, the topology has {topology.size}"
        )
    classes = _Classes()
    numbers: list[int] = []
    seen = len(topology.hosts)
    links = np.zeros((2, seen), np.int64)
    recent: dict[int, Ints] = {}
    for number, step in patterns(iter(schedule.steps)):
        if number not in recent:
            rows = topology.loads(step)
            classes.add(rows)
            at = 2 * topology.size
            recent = dict([*recent.items()][-1:]) | {number: rows[at : at + 2 * seen, 4].reshape(2, seen).copy()}
        else:
            recent[number] = recent.pop(number)
        numbers.append(number)
        links += recent[number]
    return Loads(np.array(numbers, np.int64), *classes.counts(), *links)


class _Classes:
    """The classes of resources with equal counts in all patterns so far."""

    def __init__(self) -> None:
        self.followed = True
        self._rows: list[Ints] = []  # for each pattern: the counts of its classes,
        self._parents: list[Ints] = []  # and the parent of each class in the previous pattern
        self._class: Ints | None = None  # the class of each resource
        self._kept = 0

    def add(self, rows: Ints) -> None:
        if not self.followed:
            rows = rows[rows @ np.ones(COLUMNS, np.int64) > 0]  # idle resources cannot be the busiest
        before = np.zeros(len(rows), np.int64) if self._class is None or not self.followed else self._class
        first, after = _classify([before, *rows.T])
        self._rows.append(rows[first])
        self._parents.append(before[first])
        self._class = after
        self._kept += 1
        if self.followed and self._kept * len(first) * COLUMNS > MOST_COUNTS:
            self.followed = False  # too many classes: from now on each pattern has classes of its own
            self._rows = [rows[_classify([*rows.T])[0]] for rows in self._rows]

    def counts(self) -> tuple[Ints, bool]:
        """counts[pattern, class], and whether a class has the same resources in all patterns."""
        if not self.followed:
            table = np.zeros((len(self._rows), max(1, *map(len, self._rows)), COLUMNS), np.int64)
            for place, rows in zip(table, self._rows, strict=True):
                place[: len(rows)] = rows
            return table, False
        if not self._rows:
            return np.zeros((0, 1, COLUMNS), np.int64), True
        now = np.arange(len(self._rows[-1]))
        found = []
        for rows, parents in zip(reversed(self._rows), reversed(self._parents), strict=True):
            found.append(rows[now])
            now = parents[now]
        return np.stack(found[::-1]), True


def _classify(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """(the first row of each class, the class of each row); rows with equal columns form a class."""
    one = columns[0]
    for column in columns[1:]:
        if column.any():
            one = np.unique(one * (int(column.max()) + 1) + column, return_inverse=True)[1]
    _, first, which = np.unique(one, return_index=True, return_inverse=True)
    return first, which
