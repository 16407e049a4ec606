"""Schedules found for 30 topologies that a seed draws: the bound, the best registered algorithm, what is found.

``--regular`` takes eleven graphs with equal links instead, up to 16 ranks.

The rings, grids, random graphs and groups of hosts have links whose bandwidths differ by a factor of 4 or more.

    python docs/benchmarks/topologies.py [--collective all_gather] [--bytes 256M] [--seed 1 | --regular]

It prints a table in Markdown; ``seconds`` is the time of the search on this machine, proof and bound included. The
bound of an all_reduce is the sum of the bounds of a reduce_scatter and an all_gather; of an all_to_all scipy finds it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from dist_prims.schedules import Graph, synthesize
from dist_prims.units import format_duration, parse_bytes

SPEEDS = (0.25e9, 0.5e9, 1e9, 2e9)


def with_speeds(graph: Graph, draw: random.Random) -> Graph:
    """The graph with a bandwidth drawn for each link, equal both ways; one is the slowest and one the fastest."""
    ends = sorted({tuple(sorted(map(str, link[:2]))) for link in graph.links})
    speeds = [draw.choice(SPEEDS) for _ in ends]
    slow, fast = draw.sample(range(len(ends)), 2)
    speeds[slow], speeds[fast] = SPEEDS[0], SPEEDS[-1]
    speed_of = dict(zip(ends, speeds, strict=True))
    links = (link._replace(bandwidth=speed_of[tuple(sorted(map(str, link[:2])))]) for link in graph.links)
    return Graph(graph.ranks, links)


def random_graph(ranks: int, draw: random.Random) -> Graph:
    """A ring of ranks in random order with as many further links."""
    order = draw.sample(range(ranks), ranks)
    ends = {(min(pair), max(pair)) for pair in zip(order, order[1:] + order[:1], strict=True)}
    while len(ends) < 2 * ranks:
        one, two = sorted(draw.sample(range(ranks), 2))
        ends.add((one, two))
    both = [each for one, two in sorted(ends) for each in ((one, two), (two, one))]
    return Graph(ranks, [(*each, 2e-6, 1e9) for each in both])


def topologies(seed: int) -> Iterator[tuple[str, Graph]]:
    """Thirty topologies, six of each kind."""
    draw = random.Random(seed)
    for _ in range(6):
        size, rows, columns = draw.randint(4, 12), draw.randint(2, 3), draw.randint(3, 5)
        yield f"ring of {size}", with_speeds(Graph.ring(size), draw)
        yield f"mesh {rows} x {columns}", with_speeds(Graph.mesh(rows, columns), draw)
        yield f"torus {rows} x {columns}", with_speeds(Graph.torus(rows, columns), draw)
        size = draw.randint(6, 14)
        yield f"random, {size} ranks", with_speeds(random_graph(size, draw), draw)
        hosts = [draw.randint(1, 4) for _ in range(draw.randint(3, 5))]
        speeds = [SPEEDS[0], SPEEDS[-1], *(draw.choice(SPEEDS) for _ in hosts[2:])]
        yield f"hosts of {', '.join(map(str, hosts))}", Graph.hosts(hosts, draw.sample(speeds, len(speeds)))


REGULAR = {
    "ring of 8": Graph.ring(8),
    "ring of 16": Graph.ring(16),
    "mesh 4 x 4": Graph.mesh(4, 4),
    "torus 4 x 4": Graph.torus(4, 4),
    "fully connected, 8": Graph.fully_connected(8),
    "fat tree 3 x 4, 3 spines": Graph.fat_tree(3, 4, 3),
    "fat tree 4 x 4, 2 spines": Graph.fat_tree(4, 4, 2),
    "dragonfly 4 x 2 x 2": Graph.dragonfly(4, 2, 2),
    "DGX-1": Graph.dgx1(),
    "DGX": Graph.dgx(),
    "two DGX": Graph.dgx(2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", default="all_gather")
    parser.add_argument("--bytes", default="256M")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--regular", action="store_true")
    given = parser.parse_args()
    print("| topology | bound | best registered | found | found / bound | registered / found | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name, graph in REGULAR.items() if given.regular else topologies(given.seed):
        result = synthesize(graph, given.collective, parse_bytes(given.bytes))
        registered, found = result.registered, result.found
        bound = result.halves or result.bound
        assert bound is not None, "the bound needs networkx, and scipy for an all_to_all"
        cells = [name, format_duration(bound)]
        cells += [f"{each.name}: {format_duration(each.seconds)}" for each in (registered, found)]
        ratios = found.seconds / bound, registered.seconds / found.seconds
        print(f"| {' | '.join([*cells, *(f'{ratio:.2f}' for ratio in ratios)])} | {result.elapsed:.1f} |", flush=True)


if __name__ == "__main__":
    main()
