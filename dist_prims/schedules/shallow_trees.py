"""Spanning trees of few levels, for a broadcast: each level of a tree costs a latency in every schedule of segments.

The trees of :mod:`.trees` take the cheapest pair next, so they are deep where pairs cost equally much. Here a tree
takes the cheapest way to the rank that is the most expensive to reach, as one piece. The long ways come first, before
cheap pairs have used up the levels. Between two boxes of GPUs a tree is:

    root -> a rank of its box -> a rank of the other box -> the other ranks of that box

A rank from which a cheap pair leads is preferred to one that is a little more expensive to reach, because it will send
most.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .trees import NOISE, Ints, Packing, Pairs, Tree

__all__: list[str] = []

Floats = NDArray[np.float64]
_OWN_PAIRS = 0.1  # of the cost of a rank's own cheapest pair, which is subtracted from the cost to reach the rank


class ShallowTrees(Packing):
    """Trees, and the load that they put on each link. A tree has more than ``levels`` only if it must."""

    def __init__(self, graph: Graph, pairs: Pairs, levels: int, seed: int) -> None:
        super().__init__(graph, pairs, 0.0, seed)
        self.levels = levels

    def grow(self, root: int, power: int) -> Tree:
        """A new tree, by the cheapest ways; its load is added."""
        pairs, most, tree = self.pairs, max(self.most, 1.0), list[int]()
        noise = 1 + NOISE * self.random.random(len(pairs.src))
        depth = np.full(self.size, self.size)  # of a rank outside the tree; no rank in it is as deep
        depth[root] = 0
        while len(tree) < self.size - 1:
            weight = self.slowness * ((self.load + 1) * self.slowness / most) ** power
            cost = np.append(weight, 0.0)[pairs.padded].sum(axis=1) * noise
            for pair in self._way(cost, depth):
                depth[pairs.dst[pair]] = depth[pairs.src[pair]] + 1
                tree.append(pair)
                for link in pairs.links[pair]:
                    self.load[link] += 1
        return tree

    def _way(self, cost: Floats, depth: Ints) -> list[int]:
        """The pairs from the tree to the rank outside that costs the most, given the cost of each pair."""
        pairs, outside = self.pairs, depth == self.size
        # 1. Ways enter ranks outside only; a rank stays where it is at no cost.
        step = np.full((self.size, self.size), np.inf)
        step[pairs.src, pairs.dst] = np.where(outside[pairs.dst], cost, np.inf)
        np.fill_diagonal(step, 0)
        # 2. best[rank]: the cost to reach a rank in ``level`` levels at most, the last pair from before[-1][rank].
        # Levels count from the root: a way may begin at a rank of the tree, at no cost, after the level of that rank.
        best, before = np.where(depth == 0, 0, np.inf), list[Ints]()
        for level in itertools.count(1):
            through = best[:, None] + step
            before.append(through.argmin(axis=0))
            best = np.where(depth <= level, 0, through.min(axis=0))
            if level >= self.levels and np.isfinite(best).all():
                break
        # 3. Choose the most expensive rank, less a part of the cost of its cheapest pair, and go back from it to the
        # tree. Where the level before has the rank itself, the way stayed there.
        cheapest_pair = np.full(self.size, 0.0)
        cheapest_pair[pairs.src] = np.inf
        np.minimum.at(cheapest_pair, pairs.src, cost)
        rank, way = int(np.where(outside, best - _OWN_PAIRS * cheapest_pair, -np.inf).argmax()), list[int]()
        for previous in reversed(before):
            source = int(previous[rank])
            if outside[rank] and source != rank:
                way.append(int(self.number[source, rank]))
                rank = source
        return way[::-1]
