"""Lower bounds of the time of a schedule that need not follow each rank, to drop candidates without pricing them.

- The first segment passes all steps one after the other. Each takes at least the latency of a message, between hosts if
  the step has one that crosses a link, and the time of the smallest segment of one chunk.
- The busiest link carries at least as much as the average one.

A chain of 512 ranks is too long for small data, and a flat two-shot all-reduce sends too much over the links for large
data. Both show in a tenth of the time that their prices take.
"""

from __future__ import annotations

import functools
import threading

import numpy as np

from .cost import MOST_SEGMENTS
from .schedule import Schedule, Step
from .topology import Topology

__all__: list[str] = []


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
        self._steps = iter(schedule.steps)
        self._within = self._between = self._crossing = 0  # steps and chunks counted so far

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(schedule: Schedule, topology: Topology) -> StepBounds:
        """The bounds of a schedule; a later limit continues to count where an earlier one stopped."""
        return StepBounds(schedule, topology)

    def is_longer(self, nbytes: float, limit: float) -> bool:
        """Whether the schedule takes longer than ``limit`` seconds."""
        with self._counting:
            while self._seconds(nbytes * self._share) <= limit:
                step = next(self._steps, None)
                if step is None:
                    return False
                self._count(step)
            return True

    def _seconds(self, chunk: float) -> float:
        """A lower bound for the steps counted so far, with chunks of ``chunk`` bytes."""
        inner, outer = self._topology.inner, self._topology.outer
        least = chunk / MOST_SEGMENTS
        first = self._within * (inner.alpha + least * inner.beta) + self._between * (outer.alpha + least * outer.beta)
        return max(first, self._crossing * chunk * outer.beta / len(self._topology.hosts))

    def _count(self, step: Step) -> None:
        messages, span = step.narrow
        host = self._topology.host_of
        crosses = host[messages.src] != host[messages.dst]
        chunks = int(np.count_nonzero(crosses) if span is None else span[crosses].sum())
        self._crossing += chunks
        if chunks:
            self._between += 1
        elif (messages.src != messages.dst).any():
            self._within += 1
