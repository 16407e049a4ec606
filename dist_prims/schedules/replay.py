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

A class that is busy in a pattern is replaced by new ones, each with one row of counts and one parent. An idle class
stays as it is, so only busy resources cost memory. A walk from the last pattern to the first finds the row of each
final class in every pattern. Classes are needed in place of a step's maximum because of segments: a rank then works on
several steps in one tick, and the sum must be taken over the same rank.

A third property saves time and is declared, by :class:`~.phase.Phase`:

*Equal phases.* Hierarchical schedules for the same hosts have phases in common. Broadcasts that differ only within the
hosts, for example, have the same phase between them. Each phase is counted once, and the counts are joined. If all
hosts have equally many ranks, a phase between hosts is counted for one rank a host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .phase import Phase
from .schedule import Schedule, Step
from .topology import COLUMNS, LINK, PROCESSOR, Topology

__all__: list[str] = []

Ints = NDArray[np.int64]
_SHARED = slice(4, COLUMNS)  # the columns of links and cores, which the ranks of a host share
MOST_COUNTS = 4_400_000  # numbers kept to follow classes from step to step: 35 MB


def patterns(steps: Iterator[Step]) -> Iterator[tuple[int, Step]]:
    """Each step with the number of its pattern; a new pattern gets the next number.

    >>> from dist_prims.schedules import build
    >>> [number for number, _ in patterns(iter(build("all_reduce", "ring", size=4).steps))]
    [0, 0, 0, 1, 1, 1]
    """
    last: tuple[int, tuple[bytes, ...]]
    last = before = (-1, ())  # the numbers and contents of the last two patterns
    seen = 0
    for step in steps:
        rows, span = step.narrow
        # Copies of the columns: a generator may change its own arrays.
        content: tuple[bytes, ...] = (rows.src.tobytes(), rows.dst.tobytes(), rows.reduce.tobytes())
        content = content if span is None else (*content, span.tobytes())
        if content != last[1]:
            last, before = before, last
            if content != last[1]:
                last = seen, content
                seen += 1
        yield last[0], step


@dataclass(frozen=True, eq=False)
class Loads:
    """The load of a schedule on a topology.

    ``pattern``: of each step. ``rows[which[pattern, class]]``: the counts of a class in a pattern; see ``topology`` for
    the columns. ``followed``: whether a class has the same resources in every pattern; segments can be priced only
    then. ``message``: the class of a message between hosts. ``sent``, ``received``: chunks over each host's link in the
    whole schedule.
    """

    pattern: Ints
    rows: Ints
    which: Ints
    followed: bool
    message: int
    sent: Ints
    received: Ints

    @property
    def counts(self) -> Ints:
        """counts[pattern, class, column], which may be large."""
        return self.rows[self.which]

    @cached_property
    def repeats(self) -> Ints:
        """The number of steps of each pattern."""
        return np.bincount(self.pattern, minlength=len(self.which))


_Replayed = tuple[Loads, Ints]  # the loads, and the class of each resource


@functools.lru_cache(maxsize=256)
def replay(schedule: Schedule, topology: Topology) -> Loads:
    """The loads of all steps of a schedule, computed in one pass that holds one step at a time."""
    if schedule.size != topology.size:
        raise ValueError(
            f"{schedule.collective} {schedule.algorithm} has {schedule.size} ranks, the topology has {topology.size}"
        )
    if phases := schedule.steps.phases:
        return _joined([(*_replay_phase(each, topology), each.width) for each in phases])
    return _replay(iter(schedule.steps), topology)[0]


@functools.lru_cache(maxsize=64)
def _replay_phase(phase: Phase, topology: Topology) -> _Replayed:
    """The loads of a phase whose chunks are one chunk wide, and the class of each resource.

    Ranks that do the same have the same counts; their links and cores carry what all of them send.
    """
    if phase.of_hosts is None or topology.hosts != phase.of_hosts[1]:
        return _replay(phase.make(*phase.given), topology)
    schedule, hosts = phase.of_hosts
    loads, of_resource = _replay(iter(schedule.steps), topology.one_rank_a_host)
    rows, each = loads.rows.copy(), hosts[0]
    rows[:, _SHARED] *= each
    ranks, others = np.split(of_resource, [2 * len(hosts)])
    scaled = replace(loads, rows=rows, sent=loads.sent * each, received=loads.received * each)
    return scaled, np.concatenate([np.repeat(ranks, each), others])


def _replay(steps: Iterator[Step], topology: Topology) -> _Replayed:
    """The loads of steps, and the class of each resource."""
    classes = _Classes(topology.resources)
    numbers: list[int] = []
    seen = len(topology.hosts)
    links = np.zeros((2, seen), np.int64)
    recent: dict[int, Ints] = {}
    for number, step in patterns(steps):
        if number not in recent:
            counts = topology.loads(step)
            classes.add(counts)
            at = 2 * topology.size
            recent = dict([*recent.items()][-1:]) | {number: counts[at : at + 2 * seen, 4].reshape(2, seen).copy()}
        else:
            recent[number] = recent.pop(number)
        numbers.append(number)
        links += recent[number]
    rows, which, followed, of_resource = classes.found()
    message = int(of_resource[-1])  # the last resource
    return Loads(np.array(numbers, np.int64), rows, which, followed, message, *links), of_resource


def _joined(phases: Sequence[tuple[Loads, Ints, int]]) -> Loads:
    """The loads of phases that follow each other: of each its loads, the class of each resource, and its width.

    Resources are in one class if they are in one class in every phase.
    """
    followed = all(loads.followed for loads, _, _ in phases)
    if followed:
        first, of_resource = _classify([of_phase for _, of_phase, _ in phases])
        followed = len(first) <= _most_classes(sum(len(loads.which) for loads, _, _ in phases))
    pattern: list[Ints] = []
    which: list[Ints] = []
    rows = [np.zeros((1, COLUMNS), np.int64)]
    for loads, of_phase, width in phases:
        pattern.append(loads.pattern + sum(len(each) for each in which))
        which.append((loads.which[:, of_phase[first]] if followed else loads.which) + sum(len(each) for each in rows))
        rows.append(loads.rows.copy())
        rows[-1][:, [*PROCESSOR, *LINK]] *= width  # the columns that count chunks
    links = np.sum([(width * loads.sent, width * loads.received) for loads, _, width in phases], axis=0)
    return Loads(
        np.concatenate(pattern),
        np.concatenate(rows),
        np.concatenate(which) if followed else _padded([each for block in which for each in block]),
        followed,
        int(of_resource[-1]) if followed else 0,
        *links,
    )


class _Classes:
    """The classes of resources with equal counts in all patterns so far. Class 0 is idle in all of them."""

    def __init__(self, resources: int) -> None:
        self.followed = True
        self._class = np.zeros(resources, np.int64)  # of each resource
        self._rows: list[Ints] = [np.zeros((1, COLUMNS), np.int64)]  # counts of class 0; of each pattern's new classes
        self._parents: list[Ints] = []  # for each pattern: the classes that its new ones replace
        self._number = 1  # of classes so far, replaced ones included

    def add(self, rows: Ints) -> None:
        busy = np.flatnonzero(rows.any(axis=1))
        before = self._class[busy]
        first, after = _classify([before, *(column[busy] for column in rows.T if column.any())])
        self._rows.append(rows[busy[first]])
        if not self.followed:
            return
        self._parents.append(before[first])
        self._class[busy] = after + self._number
        self._number += len(first)
        if self._is_too_large():
            self.followed = False  # from now on each pattern has classes of its own
            self._class[:] = 0
            self._rows[1:] = [each[_classify([*each.T])[0]] for each in self._rows[1:]]

    def _is_too_large(self) -> bool:
        most = _most_classes(len(self._parents))
        return min(self._number, len(self._class)) > most and len(_distinct(self._class)) > most

    def found(self) -> tuple[Ints, Ints, bool, Ints]:
        """``rows``, ``which`` and ``followed`` of :class:`Loads`, and the class of each resource."""
        begins = np.cumsum([len(rows) for rows in self._rows])
        patterns = len(self._rows) - 1
        if not self.followed:
            every = [np.arange(begin, end) for begin, end in itertools.pairwise(begins)]
            return np.concatenate(self._rows), _padded(every), False, self._class
        first, of_resource = _classify([self._class])
        now = self._class[first]
        which = np.zeros((patterns, len(now)), np.int64)
        for pattern in reversed(range(patterns)):
            new = now >= begins[pattern]
            which[pattern, new] = now[new]
            now[new] = self._parents[pattern][now[new] - begins[pattern]]
        return np.concatenate(self._rows), which, True, of_resource


def _most_classes(patterns: int) -> int:
    """The number of classes that can be followed through so many patterns."""
    return MOST_COUNTS // (COLUMNS * max(patterns, 1))


def _padded(rows: Sequence[Ints]) -> Ints:
    """One row of numbers for each pattern, filled up with 0 and without duplicates."""
    every = [_distinct(each) for each in rows]
    found = np.zeros((len(every), max(map(len, every), default=1)), np.int64)
    for place, each in zip(found, every, strict=True):
        place[: len(each)] = each
    return found


def _classify(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """(the first row of each class, the class of each row); rows with equal columns form a class.

    The columns are the digits of one number for each row, which is made smaller where it would not fit into 63 bits.
    """
    one, limit = columns[0], int(columns[0].max(initial=0)) + 1
    for column in columns[1:]:
        if base := int(column.max(initial=0)):
            if limit * (base + 1) >= 1 << 63:
                one = np.unique(one, return_inverse=True)[1]
                limit = len(one)
            one, limit = one * (base + 1) + column, limit * (base + 1)
    order = np.argsort(one, kind="stable")
    begins = np.append(True, np.diff(one[order]) > 0)[: len(one)]
    which = np.empty_like(order)
    which[order] = begins.cumsum() - 1
    return order[begins], which


def _distinct(numbers: Ints) -> Ints:
    """The numbers in order, without duplicates; ``np.unique`` would import ``numpy.ma``, which takes 40 ms."""
    ordered = np.sort(numbers)
    found: Ints = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found
