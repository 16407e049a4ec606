"""Lower bounds of the time of a schedule that need not follow each rank, to drop candidates without pricing them.

- The first segment passes all steps one after the other. Each takes at least the latency of a message, between hosts if
  the step has one that crosses a link, and the time of its segment of the chunks on the busiest link.
- The other segments pass the longest step after the first one, one after the other.
- A rank sends all its messages again for each segment, one after the other. So more segments mean more latency.
- The busiest link carries its chunks of all steps.

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

_MANY_MESSAGES = 1 << 16  # of a step: most ranks send to most others, and any host to all others
_SEGMENTS = [1 << power for power in range(MOST_SEGMENTS.bit_length())]


class StepBounds:
    """The steps of a schedule within hosts and between them, and the chunks over each link.

    Steps are counted only as far as a limit requires: one, then an eighth of those counted so far at a time. Threads
    that choose schedules at the same time, for two groups that span hosts, share the bounds of a schedule.

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
        # Of the steps counted so far: their number, the chunks over the busiest link of each step, and the most.
        self._within = self._between = self._crossing = self._most = 0
        self._links = np.zeros(2 * len(topology.hosts), np.int64)  # the chunks over each link, out and in
        self._latency = np.zeros(topology.size)  # of the messages that each rank has sent
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
                steps = [*itertools.islice(self._steps, 1 + (self._within + self._between) // 8)]
                if not steps:
                    return False
                for pattern, equal in itertools.groupby(steps, key=lambda each: each[0]):
                    (_, step), *others = equal
                    self._count(pattern, step, 1 + len(others))
            return True

    def _seconds(self, chunk: float) -> float:
        """A lower bound for the steps counted so far, with chunks of ``chunk`` bytes."""
        inner, outer = self._topology.inner, self._topology.outer
        latency = self._within * inner.alpha + self._between * outer.alpha
        spent = chunk * (self._within * inner.beta + self._crossing * outer.beta)
        of_messages = float(self._latency.max())
        message, longest = outer.alpha if self._between else 0.0, self._most * chunk * outer.beta
        cut = min(max(latency + spent / n + (n - 1) * (message + longest / n), n * of_messages) for n in _SEGMENTS)
        return max(cut, int(self._links.max()) * chunk * outer.beta)

    def _count(self, pattern: int, step: Step, times: int) -> None:
        """Count ``times`` steps of a pattern that follow each other."""
        if self._last is None or self._last[0] != pattern:
            self._last = pattern, _StepLoad.of(step, self._topology)
        _, load = self._last
        self._crossing += times * load.busiest
        self._most = max(self._most, load.busiest)
        self._between += times * (load.busiest > 0)
        self._within += times * (load.busiest == 0 and load.moves)
        self._links += times * load.links
        self._latency += times * load.latency


@dataclass(frozen=True, eq=False)
class _StepLoad:
    """What a step adds: chunks over each link and the busiest one, whether anything moves, latency of each sender."""

    links: NDArray[np.int64]
    busiest: int
    moves: bool
    latency: NDArray[np.float64]

    @staticmethod
    def of(step: Step, topology: Topology) -> _StepLoad:
        """The load of the messages; of very many only those that the first host sends, which is less."""
        rows, span = step.narrow
        if len(rows) > _MANY_MESSAGES:
            some = rows.src < topology.hosts[0]
            rows, span = rows.take(some), None if span is None else span[some]
        far = rows.src != rows.dst
        from_host, to_host = topology.host_of[rows.src], topology.host_of[rows.dst]
        crosses = from_host != to_host
        within, between = np.zeros((2, topology.size))
        within[rows.src[far & ~crosses]] = topology.inner.alpha
        between[rows.src[crosses]] = topology.outer.alpha
        hosts, chunks = len(topology.hosts), None if span is None else span[crosses]
        links = np.concatenate([np.bincount(each[crosses], chunks, hosts) for each in (from_host, to_host)])
        return _StepLoad(links.astype(np.int64), int(links.max()), bool(far.any()), within + between)
