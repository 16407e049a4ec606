"""Lower bounds of the time of a schedule that need not follow each rank, to drop candidates without pricing them.

- The first segment passes all steps one after the other. Each takes at least the latency of a message, between hosts if
  the step has one that crosses a link, and the time of a segment of one chunk.
- A rank sends all its messages again for each segment, one after the other. So more segments mean more latency.
- The busiest link carries at least as much as the average one.

A chain of 512 ranks is too long for small data, and a flat two-shot all-reduce sends too much over the links for large
data. Both show after a part of the steps.
"""

from __future__ import annotations

import functools
import itertools
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import MOST_SEGMENTS
from .replay import patterns
from .schedule import Schedule, Step
from .topology import Topology

__all__: list[str] = []

_AT_ONCE = 8  # steps that are counted before the limit is looked at again
_SEGMENTS = [1 << power for power in range(MOST_SEGMENTS.bit_length())]


class StepBounds:
    """The steps of a schedule within hosts and between them, and the chunks that cross links.

    Steps are counted only as far as a limit requires. Threads that choose schedules at the same time, for two groups
    that span hosts, share the bounds of a schedule.

    >>> from dist_prims.schedules import build
    >>> from dist_prims.schedules.topology import Level
    >>> cluster = Topology((2, 2), Level(1e-6, 0), Level(10e-6, 0))
    >>> chain = StepBounds.of(build("broadcast", "chain", 4, chunks=1), cluster)  # 2 steps within hosts, 1 between
    >>> [chain.is_longer(nbytes=8, limit=limit) for limit in (11e-6, 13e-6)]
    [True, False]
    """

    def __init__(self, schedule: Schedule, topology: Topology) -> None:
        self._counting = threading.Lock()
        self._topology = topology
        self._share = float(schedule.share)
        self._steps = patterns(iter(schedule.steps))
        self._within = self._between = self._crossing = 0  # steps and chunks counted so far
        self._latency = np.zeros(topology.size)  # of the messages that each rank has sent so far
        self._last: tuple[int, _StepLoad] | None = None  # the number of a pattern, and the load of its steps

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(schedule: Schedule, topology: Topology) -> StepBounds:
        """The bounds of a schedule; a later limit continues to count where an earlier one stopped."""
        return StepBounds(schedule, topology)

    def is_longer(self, nbytes: float, limit: float) -> bool:
        """Whether the schedule takes longer than ``limit`` seconds."""
        with self._counting:
            while self._seconds(nbytes * self._share) <= limit:
                steps = [*itertools.islice(self._steps, _AT_ONCE)]
                if not steps:
                    return False
                for pattern, step in steps:
                    self._count(pattern, step)
            return True

    def _seconds(self, chunk: float) -> float:
        """A lower bound for the steps counted so far, with chunks of ``chunk`` bytes."""
        inner, outer = self._topology.inner, self._topology.outer
        latency = self._within * inner.alpha + self._between * outer.alpha
        bytes_of_all = chunk * (self._within * inner.beta + self._between * outer.beta)
        busiest = float(self._latency.max())
        cut = min(max(latency + bytes_of_all / segments, segments * busiest) for segments in _SEGMENTS)
        return max(cut, self._crossing * chunk * outer.beta / len(self._topology.hosts))

    def _count(self, pattern: int, step: Step) -> None:
        if self._last is None or self._last[0] != pattern:
            self._last = pattern, _StepLoad.of(step, self._topology)
        _, load = self._last
        self._crossing += load.crossing
        self._between += load.crossing > 0
        self._within += load.crossing == 0 and load.moves
        self._latency += load.latency


@dataclass(frozen=True, eq=False)
class _StepLoad:
    """What one step adds: the chunks that cross links, whether anything moves, the latency of each sending rank."""

    crossing: int
    moves: bool
    latency: NDArray[np.float64]

    @staticmethod
    def of(step: Step, topology: Topology) -> _StepLoad:
        rows, span = step.narrow
        far = rows.src != rows.dst
        crosses = topology.host_of[rows.src] != topology.host_of[rows.dst]
        within, between = np.zeros((2, topology.size))
        within[rows.src[far & ~crosses]] = topology.inner.alpha
        between[rows.src[crosses]] = topology.outer.alpha
        crossing = int(np.count_nonzero(crosses) if span is None else span[crosses].sum())
        return _StepLoad(crossing, bool(far.any()), within + between)
