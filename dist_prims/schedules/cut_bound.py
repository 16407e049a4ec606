"""The cut bound: how soon the data of a collective can cross the narrowest cut of a graph.

Whatever the schedule, the data that the ranks of one side of a cut must give to the other side passes the links between
the two sides. networkx finds the narrowest cut by maximum flows:

    broadcast       all data from the root to each rank: the smallest maximum flow
    all_gather      the blocks of all ranks to each rank: the largest rate at which all ranks can send to one at once
    reduce_scatter  the same with all links turned round
    all_reduce      the sum of one side, as large as the data, to the other side: the smallest maximum flow of two ranks

The bound of an all_reduce is less than the sum of the bounds of a reduce_scatter and an all_gather. A schedule may take
less than that sum, because segments of one use links while the other leaves them free.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from .graph import Graph

__all__: list[str] = []

_SOURCE = "all ranks at once", 0  # the source of a flow from all ranks; no switch is named by a tuple


def cut_bound(collective: str, graph: Graph, root: int = 0) -> Fraction:
    """The seconds for each byte of the data, without latency; ImportError without networkx.

    >>> cut_bound("all_gather", Graph.ring(8)) == Fraction(7, 8) / 2 / 10**9  # two links lead to a rank
    True
    """
    if graph.ranks == 1:
        return Fraction(0)
    if collective in ("broadcast", "all_reduce"):
        ends = [(root, rank) for rank in range(graph.ranks) if rank != root]
        ends += [(dst, src) for src, dst in ends if collective == "all_reduce"]
        return 1 / Fraction(min(_cut(graph, src, dst, 1)[0] for src, dst in ends))
    turned = Graph(graph.ranks, [(link.dst, link.src, *link[2:]) for link in graph.links])
    return _all_gather(graph if collective == "all_gather" else turned)


def _all_gather(graph: Graph) -> Fraction:
    """Begin with the links into one rank; while all ranks together cannot send at the rate, take the cut in the way."""
    size = graph.ranks
    rate = Fraction(sum(int(link.bandwidth) for link in graph.links if link.dst == 0), size - 1)
    for rank in range(size):
        while True:
            flow, inside = _cut(graph, _SOURCE, rank, rate.denominator, rate.numerator)
            if flow >= size * rate.numerator:
                break
            crossing = sum(int(link.bandwidth) for link in graph.links if link.src in inside and link.dst not in inside)
            rate = Fraction(crossing, sum(isinstance(node, int) for node in inside))
    return 1 / (size * rate)


def _cut(graph: Graph, source: Any, rank: int, scale: int, rate: int = 0) -> tuple[int, set[Any]]:
    """The largest flow to a rank in multiples of ``scale``, and the nodes on the source's side of the narrowest cut."""
    import networkx

    network = networkx.DiGraph()
    for link in graph.links:
        network.add_edge(link.src, link.dst, capacity=int(link.bandwidth) * scale)
    for each in range(graph.ranks if rate else 0):
        network.add_edge(_SOURCE, each, capacity=rate)
    flow, (inside, _) = networkx.minimum_cut(network, source, rank)
    return flow, inside
