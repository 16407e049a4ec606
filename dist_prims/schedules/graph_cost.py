"""The cost of a schedule on a graph, with contention: the load of each link in each step.

All messages of a step begin together, and each takes its route. The load of a link is the data of all messages that
pass it. A message takes the latency of its route, and the time in which the busiest link of the route carries its load.
A step takes as long as its longest message, and the next step begins when it is over. Ranks cost nothing: the limit of
a rank is the bandwidth of its links.

    graph 0 ──── switch ──── 2      step: 0 -> 2 and 1 -> 2, a chunk each
                    │               loads: 0 -> switch: 1, 1 -> switch: 1, switch -> 2: 2
                    1               seconds: the latencies of both links, and 2 chunks / bandwidth

In segments, a tick does the work of several steps, as in :mod:`.cost`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .steps import ScheduleData

__all__: list[str] = []

Floats = NDArray[np.float64]
_MOST_SEGMENTS = 256


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """The load of a schedule on a graph: ``loads[step, link]``, as fractions of the data of the collective.

    ``messages[step, pair]``: whether a pair of ranks has a message. ``routes[pair]``: the numbers of the links of its
    route, the last repeated as a filler. ``latencies[pair]``: the seconds of its route.
    """

    loads: Floats
    messages: NDArray[np.bool_]
    routes: NDArray[np.int64]
    latencies: Floats
    bandwidth: Floats

    def seconds(self, nbytes: float, segments: int = 1) -> float:
        """The seconds for data of ``nbytes`` in segments that follow each other through the steps."""
        steps = len(self.loads)
        loads = np.zeros((steps + 1, len(self.bandwidth)))
        np.cumsum(self.loads * nbytes / segments / self.bandwidth, axis=0, out=loads[1:])
        messages = np.zeros((steps + 1, len(self.routes)), np.int64)
        np.cumsum(self.messages, axis=0, out=messages[1:])
        total = 0.0
        for tick in range(steps + segments - 1 if steps else 0):
            first, last = max(tick - segments + 1, 0), min(tick + 1, steps)
            sent = np.flatnonzero(messages[last] > messages[first])
            busy = loads[last] - loads[first]
            total += float((self.latencies[sent] + busy[self.routes[sent]].max(axis=1)).max(initial=0))
        return total

    def seconds_of_busiest_link(self, nbytes: float) -> float:
        """The seconds in which the busiest link carries its load of all steps, without latency."""
        return float((self.loads.sum(axis=0) * nbytes / self.bandwidth).max(initial=0))

    def best_segments(self, nbytes: float) -> tuple[float, int]:
        """The shortest seconds of 1, 2, 4, ... 256 segments, and the number of segments."""
        counts = (1 << power for power in range(_MOST_SEGMENTS.bit_length()))
        return min((self.seconds(nbytes, segments), segments) for segments in counts)


@functools.lru_cache(maxsize=64)
def link_loads(schedule: ScheduleData, graph: Graph) -> LinkLoads:
    """Count the load of each link in each step."""
    if schedule.size != graph.ranks:
        raise ValueError(
            f"{schedule.collective} {schedule.algorithm} has {schedule.size} ranks, the graph has {graph.ranks}"
        )
    # 1. The messages of each step: pairs of ranks as src * ranks + dst, and the data of each pair.
    share, counted = float(schedule.share), []
    for step in schedule.steps:
        rows, span = step.narrow
        pairs, which = np.unique(rows.src * graph.ranks + rows.dst, return_inverse=True)
        chunks = np.bincount(which, span, len(pairs)) if len(pairs) else np.zeros(0)
        sent = pairs // graph.ranks != pairs % graph.ranks
        counted.append((pairs[sent], chunks[sent] * share))
    # 2. The route of each pair, filled up to the length of the longest route.
    every = np.unique(np.concatenate([pairs for pairs, _ in counted])) if counted else np.zeros(0, np.int64)
    paths = [graph.route_numbers(*divmod(pair, graph.ranks)) for pair in every.tolist()]
    longest = max(map(len, paths), default=1)
    routes = np.array([path + path[-1:] * (longest - len(path)) for path in paths], np.int64).reshape(-1, longest)
    latencies = np.array([sum(graph.links[number].latency for number in path) for path in paths], np.float64)
    loads, messages = np.zeros((len(counted), len(graph.links))), np.zeros((len(counted), len(every)), np.bool_)
    # 3. The load of each link in each step; the fillers of a route, which repeat its last link, do not count.
    passes = np.ones(routes.shape, np.bool_)
    passes[:, 1:] = routes[:, 1:] != routes[:, :-1]
    for number, (pairs, chunks) in enumerate(counted):
        at = np.searchsorted(every, pairs)
        messages[number, at] = True
        passed = np.repeat(chunks, longest)[passes[at].ravel()]
        loads[number] = np.bincount(routes[at][passes[at]], passed, len(graph.links))
    return LinkLoads(loads, messages, routes, latencies, graph.bandwidth)
