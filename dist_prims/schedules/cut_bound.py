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

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .graph import Graph, Link

__all__: list[str] = []

_SOURCE = "all ranks at once", 0  # the source of a flow from all ranks; no switch is named by a tuple


@functools.lru_cache(maxsize=16)
def cut_bound(collective: str, graph: Graph, root: int = 0) -> Fraction:
    """The seconds for each byte of the data, without latency; ImportError without networkx.

    >>> cut_bound("all_gather", Graph.ring(8)) == Fraction(7, 8) / 2 / 10**9  # two links lead to a rank
    True
    """
    if graph.ranks == 1:
        return Fraction(0)
    unit = bandwidth_unit(graph)
    links = [link._replace(bandwidth=int(Fraction(link.bandwidth) / unit)) for link in graph.links]
    if collective in ("broadcast", "all_reduce"):
        ends = [(root, rank) for rank in range(graph.ranks) if rank != root]
        ends += [(dst, src) for src, dst in ends if collective == "all_reduce"]
        return 1 / (min(_cut(links, src, dst, 1)[0] for src, dst in ends) * unit)
    turned = [link._replace(src=link.dst, dst=link.src) for link in links]
    return _all_gather(graph.ranks, links if collective == "all_gather" else turned) / unit


def bandwidth_unit(graph: Graph) -> Fraction:
    """The largest number of bytes a second of which each bandwidth is a multiple; every float has such a number."""
    bandwidths = [Fraction(link.bandwidth) for link in graph.links]
    scale = max(each.denominator for each in bandwidths)  # powers of two
    return Fraction(math.gcd(*(int(each * scale) for each in bandwidths)), scale)


def _all_gather(size: int, links: list[Link]) -> Fraction:
    """The seconds for each byte of an all_gather: the inverse of the rate at which all ranks can send to one at once.

    The rate begins at the limit of the links to rank 0. While a cut does not carry it, it becomes the rate of the cut:
    what the links over the cut carry, divided by the ranks inside, whose data must all cross it.
    """
    rate = Fraction(sum(int(link.bandwidth) for link in links if link.dst == 0), size - 1)
    for rank in range(size):
        while True:
            flow, inside = _cut(links, _SOURCE, rank, rate.denominator, [rate.numerator] * size)
            if flow >= size * rate.numerator:
                break
            crossing = sum(int(link.bandwidth) for link in links if link.src in inside and link.dst not in inside)
            rate = Fraction(crossing, sum(isinstance(node, int) for node in inside))
    return 1 / (size * rate)


def _cut(links: list[Link], source: Any, rank: int, scale: int, sent: Sequence[int] = ()) -> tuple[int, set[Any]]:
    """The largest flow to a rank in multiples of ``scale``, and the nodes on the source's side of the narrowest cut.

    ``sent``: what the source sends to each rank, if it is all ranks at once.
    """
    import networkx

    network = networkx.DiGraph()
    for link in links:
        network.add_edge(link.src, link.dst, capacity=int(link.bandwidth) * scale)
    for each, capacity in enumerate(sent):
        network.add_edge(source, each, capacity=capacity)
    flow, (inside, _) = networkx.minimum_cut(network, source, rank)
    return flow, inside
