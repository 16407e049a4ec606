"""Choices of algorithms: their prices beside the best price, and the time that advice takes for 100,000 ranks.

    python docs/benchmarks/choices.py

It prints two tables in Markdown. The first one has, for hosts x ranks at 1 and 10 Gbit/s and for 1.5 KB to 384 MB, the
price of the chosen schedule divided by the lowest price of any candidate: the worst and the mean. *Advice* is the
first line of ``recommend``, *backend* the choice of the backend dist_prims. Both choose by cost cards; the prices that
are compared are those of the counted steps. The second table has the advice for 12,500 hosts of 8 ranks with the
default figures of ``recommend``, and the processor time of the first size and of a further one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dist_prims.backend.multi_host import _recommended
from dist_prims.schedules import COLLECTIVES, Schedule, build
from dist_prims.schedules.cost import best_segments, load_seconds
from dist_prims.schedules.load import Hosts, count
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.registry import version
from dist_prims.schedules.topology import Level, Topology
from dist_prims.units import format_duration

CLUSTERS = ((2, 2), (2, 2, 2), (1, 1, 1, 1), (2, 2, 2, 2), (4, 4), (1, 3), (6, 8, 8, 2, 8), (8,) * 8)
SIZES = [1 << power for power in (10, 16, 20, 24, 28)]


def topologies() -> Iterator[Topology]:
    """The clusters on two cores with links of 1 Gbit/s, and on many cores with links of 10 Gbit/s."""
    for hosts in CLUSTERS:
        shared = Level(3e-6, 0.2e-9)
        yield Topology(hosts, shared, Level(60e-6, 8e-9), 0.2e-9, 2, True, 0.8e-9, Level(30e-6, 7e-9))
        yield Topology(hosts, shared, Level(20e-6, 0.8e-9), 0.2e-9)


def ratios(collective: str, size: int, topology: Topology) -> tuple[float, float]:
    """The price by counted steps of the advice and of the backend's choice, by the lowest price of any candidate."""
    nbytes, hosts = 1.5 * size, Hosts.of(topology)

    def seconds(schedule: Schedule, *segments: int) -> float:
        load = count(schedule, hosts)
        return min(
            load_seconds(load, nbytes, topology, number or best_segments(load, nbytes, topology)) for number in segments
        )

    candidates = recommend(collective, nbytes, topology).candidates
    best = min(seconds(each.schedule, each.segments, 0) for each in candidates)
    choice, _ = _recommended(collective, size, topology, version())
    chosen = build(collective, choice.algorithm, topology.size, **dict(choice.parameters))
    return seconds(candidates[0].schedule, candidates[0].segments) / best, seconds(chosen, choice.segments) / best


def main() -> None:
    print("| collective | advice, worst | mean | backend, worst | mean |\n| --- | --- | --- | --- | --- |")
    for collective in COLLECTIVES:
        found = [ratios(collective, size, topology) for topology in topologies() for size in SIZES]
        cells = (f"{value:.2f}" for each in zip(*found, strict=True) for value in (max(each), sum(each) / len(each)))
        print(f"| {collective} | {' | '.join(cells)} |", flush=True)
    print("\n| collective | 64 KB | 16 MB | first size | further size |\n| --- | --- | --- | --- | --- |")
    cluster = Topology((8,) * 12_500, Level(1e-6, 1e-10), Level(10e-6, 3.2e-10), 1e-10)
    for collective in COLLECTIVES:
        cells, times = [], []
        for size in SIZES[1::2]:
            begin = time.process_time()
            best = recommend(collective, size, cluster).candidates[0]
            times.append(f"{time.process_time() - begin:.2f} s")
            cells.append(f"{best.name}: {format_duration(best.seconds)}")
        print(f"| {collective} | {' | '.join([*cells, *times])} |", flush=True)


if __name__ == "__main__":
    main()
