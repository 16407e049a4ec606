"""Spanning trees on a graph: one tree for each chunk, from the rank that has it to all others, with balanced links.

If chunks follow each other closely through their trees, all links work at once, and a collective takes as long as the
link with the most load. The trees are chosen one after the other by the load that the others leave:

1. A tree grows from its root by the cheapest pair of a rank in the tree and a rank outside. The cost of a pair is the
   sum of the weights of the links between the two, and a little for the distance from the root. A link weighs

       slowness * ((load + 1) * slowness / the most of any link) ^ power

   with slowness = the largest bandwidth of any link / the bandwidth of this one. So the busiest links are avoided. The
   load of the tree itself counts, too: a chunk avoids a link that it has passed.
2. In each round every tree is removed and grown again, in random order. The power rises from round to round, so the
   first rounds find short ways and the last ones relieve the busiest links.

A pair is two ranks whose route passes no third rank: neighbours, or ranks that only switches separate.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .steps import Step

__all__: list[str] = []

Ints = NDArray[np.int64]
Tree = list[int]  # the numbers of its pairs, from the root on

NOISE = 0.01  # of a cost, so that equal costs are drawn by chance


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of ranks of a graph, and the links that a message between the two passes.

    ``shared``: for each pair its links, each with the other pairs that pass it and have another end. A tree that takes
    the pair may still take these others, at a higher cost. ``out_of`` and ``into``: the pairs of which a rank is the
    source or the end.
    """

    src: Ints
    dst: Ints
    links: list[tuple[int, ...]]
    padded: Ints  # ``links`` as an array, filled up with a link that weighs nothing
    shared: list[list[tuple[int, Ints]]]
    out_of: list[Ints]
    into: list[Ints]

    @staticmethod
    def of(graph: Graph, backwards: bool = False) -> Pairs:
        """``backwards``: the messages go from the end of a pair to its source, as in a reduce_scatter."""
        size = graph.ranks  # nodes from this number on are switches
        ends: list[tuple[int, int]] = []
        links: list[tuple[int, ...]] = []
        for src, dst in np.argwhere(~np.eye(size, dtype=np.bool_)).tolist():
            passed = graph.route_numbers(*((dst, src) if backwards else (src, dst)))
            if (graph.ends[1, list(passed[:-1])] >= size).all():
                ends.append((src, dst))
                links.append(passed)
        one, two = np.array(ends, np.int64).reshape(-1, 2).T
        over: dict[int, list[int]] = defaultdict(list)
        for pair, passed in enumerate(links):
            for link in passed:
                over[link].append(pair)
        passing = {link: np.array(pairs, np.int64) for link, pairs in over.items()}
        shared: list[list[tuple[int, Ints]]] = [[] for _ in links]
        for pair, passed in enumerate(links):
            for link in passed:
                others = passing[link][two[passing[link]] != two[pair]]
                shared[pair] += [(link, others)] if len(others) else []
        longest = max(map(len, links), default=1)
        padded = [passed + (len(graph.links),) * (longest - len(passed)) for passed in links]
        out_of, into = ([np.flatnonzero(side == rank) for rank in range(size)] for side in (one, two))
        return Pairs(one, two, links, np.array(padded, np.int64).reshape(-1, longest), shared, out_of, into)


class Packing:
    """Trees, and the load that they put on each link, in chunks.

    ``depth_cost``: what a rank that is one pair further from its root costs; the busiest link weighs about 1. ``seed``:
    of the order in which trees are replaced.
    """

    powers: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)  # of the rounds

    def __init__(self, graph: Graph, pairs: Pairs, depth_cost: float, seed: int) -> None:
        self.pairs, self.size, self.depth_cost = pairs, graph.ranks, depth_cost
        self.slowness = graph.bandwidth.max(initial=1) / graph.bandwidth
        self.load = np.zeros(len(graph.links))
        self.number = np.full((self.size, self.size), -1)  # of the pair of two ranks
        self.number[pairs.src, pairs.dst] = range(len(pairs.src))
        self.random = np.random.default_rng(seed)

    @property
    def most(self) -> float:
        """The load of the busiest link, in the time of a chunk on the fastest link."""
        return float((self.load * self.slowness).max(initial=0))

    def grow(self, root: Any, power: int) -> Tree:
        """A new tree; its load is added. ``root``: a rank, or what a subclass takes for a root."""
        pairs, load = self.pairs, self.load
        slowness, most = self.slowness, max(self.most, 1.0)
        weight = np.append(slowness * ((load + 1) * slowness / most) ** power, 0.0)
        cost = weight[pairs.padded].sum(axis=1) * (1 + NOISE * self.random.random(len(pairs.src)))
        key = np.full(len(cost), np.inf)  # the cost of the pairs that may be taken next
        outside, depth = np.ones(self.size, np.bool_), [0] * self.size
        rank, tree = root, list[int]()
        while True:
            # 1. ``rank`` joins the tree: pairs into it are of no use, and its pairs to ranks outside may be taken.
            outside[rank] = False
            key[pairs.into[rank]] = np.inf
            out = pairs.out_of[rank]
            out = out[outside[pairs.dst[out]]]
            key[out] = cost[out] + self.depth_cost * depth[rank]
            if len(tree) == self.size - 1:
                return tree
            # 2. Take the cheapest pair.
            pair = int(key.argmin())
            tree.append(pair)
            rank = int(pairs.dst[pair])
            depth[rank] = depth[pairs.src[pair]] + 1
            for link in pairs.links[pair]:
                load[link] += 1
            # 3. Its links weigh more now, so the other pairs over them cost more; inf stays inf.
            for link, others in pairs.shared[pair]:
                more = slowness[link] * ((load[link] + 1) * slowness[link] / most) ** power - weight[link]
                weight[link] += more
                cost[others] += more
                key[others] += more

    def remove(self, tree: Tree) -> None:
        for pair in tree:
            for link in self.pairs.links[pair]:
                self.load[link] -= 1


def pack(packing: Packing, roots: Sequence[Any], until: float = math.inf) -> list[Tree]:
    """A tree for each root, such that the busiest link carries little.

    Args:
        packing: without trees.
        roots: the root of each tree; several trees may have one root.
        until: the value of ``time.perf_counter`` from which on no tree is replaced; TimeoutError without all trees.
    """
    trees: list[Tree] = []
    for root in roots:
        if time.perf_counter() > until:
            raise TimeoutError(f"{len(trees)} of {len(roots)} trees have grown")
        trees.append(packing.grow(root, packing.powers[0]))
    best, least = list(trees), packing.most
    for power in packing.powers:
        for which in packing.random.permutation(len(trees)).tolist():
            if time.perf_counter() > until:
                break
            packing.remove(trees[which])
            trees[which] = packing.grow(roots[which], power)
        if packing.most < least:
            best, least = list(trees), packing.most
    return best


def steps_of(trees: Sequence[Tree], pairs: Pairs, roots: Sequence[int]) -> list[Step]:
    """The steps in which each chunk goes through its tree, a pair further in each step."""
    rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for chunk, (tree, root) in enumerate(zip(trees, roots, strict=True)):
        depth = {root: 0}
        for pair in tree:
            src, dst = int(pairs.src[pair]), int(pairs.dst[pair])
            depth[dst] = depth[src] + 1
            rows[depth[src]].append((src, dst, chunk))
    return [Step(*np.array(rows[number], np.int64).T) for number in range(len(rows))]
