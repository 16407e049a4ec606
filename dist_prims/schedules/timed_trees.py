"""Spanning trees whose pairs have steps, for graphs on which the latency of many segments is too long.

In segments all steps of a schedule run at once, but each tick costs the latency of its messages. Between boxes of GPUs,
256 MB take 50 such latencies. There a few long steps take less time, if the links are busy in all of them: a chunk with
few pairs to go waits for a step in which other chunks leave its links free.

Trees grow here as in :mod:`.trees`, but each link counts once for each step, and a pair takes the step in which it is
cheapest, after the step that brings the chunk to its source. The lengths of the steps are given: the last is shorter,
because the links from box to box have little to do in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .steps import Step
from .trees import NOISE, Packing, Pairs, Tree

__all__: list[str] = []

LENGTHS = ((1.0, 1.0, 0.85), (1.0, 1.0, 0.9), (1.0, 0.9, 0.9, 0.8))  # of the steps, in relation to each other


class TimedTrees(Packing):
    """Trees, and the load that they put on each link in each step. A tree has the numbers ``step * pairs + pair``.

    ``seconds``: the time of a chunk on each link. ``lengths``: the seconds of each step, latency included.
    """

    powers = (2, 4, 8, 16, 24, 32, 48, 64, 64)

    def __init__(
        self, graph: Graph, pairs: Pairs, seed: int, seconds: NDArray[np.float64], lengths: NDArray[np.float64]
    ) -> None:
        super().__init__(graph, pairs, 0.0, seed)
        # The slowness of a link in a step is the part of the step, without latency, that a chunk takes on the link.
        latency = np.zeros(len(graph.links) + 1)  # the longest of all messages that pass a link
        longest = np.array([sum(graph.links[link].latency for link in links) for links in pairs.links])
        np.maximum.at(latency, pairs.padded, longest[:, None])
        slowness = seconds / np.maximum(lengths[:, None] - latency[:-1], lengths[:, None] / 10)
        self.slowness = slowness / slowness.min()
        self.load = np.zeros(slowness.shape)

    def grow(self, root: int, power: int) -> Tree:
        """A new tree; its load is added. Every two ranks must be a pair, so that each step can reach all ranks."""
        pairs, load, slowness, most = self.pairs, self.load, self.slowness, max(self.most, 1.0)
        number, steps = len(pairs.src), len(load)
        weight = np.pad(slowness * ((load + 1) * slowness / most) ** power, ((0, 0), (0, 1)))
        cost = weight[:, pairs.padded].sum(axis=2) * (1 + NOISE * self.random.random((steps, number)))
        key = np.full(number, np.inf)  # the cost of the pairs that may be taken next, in their cheapest step
        chosen = np.zeros(number, np.int64)
        outside = np.ones(self.size, np.bool_)
        rank, ready, tree = root, 0, list[int]()  # the rank that was reached last, and the step from which it sends
        while True:  # with the blocks of Packing.grow()
            # 1. ``rank`` joins the tree, and each of its pairs gets the cheapest step from ``ready`` on.
            outside[rank] = False
            key[pairs.into[rank]] = np.inf
            if len(tree) == self.size - 1:
                return tree
            out = pairs.out_of[rank]
            out = out[outside[pairs.dst[out]]]
            if ready < steps:
                chosen[out] = ready + cost[ready:, out].argmin(axis=0)
                key[out] = cost[chosen[out], out]
            # 2. Take the cheapest pair in its step.
            pair = int(key.argmin())
            step, rank = int(chosen[pair]), int(pairs.dst[pair])
            ready = step + 1
            tree.append(step * number + pair)
            for link in pairs.links[pair]:
                load[step, link] += 1
            # 3. The other pairs over its links cost more in this step.
            for link, others in pairs.shared[pair]:
                slow = slowness[step, link]
                more = slow * ((load[step, link] + 1) * slow / most) ** power - weight[step, link]
                weight[step, link] += more
                cost[step, others] += more
                key[others[chosen[others] == step]] += more

    def remove(self, tree: Tree) -> None:
        for step, pair in (divmod(number, len(self.pairs.src)) for number in tree):
            self.load[step, list(self.pairs.links[pair])] -= 1


def steps_of_timed(trees: Sequence[Tree], pairs: Pairs) -> list[Step]:
    """The steps in which each chunk goes through its tree."""
    rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for chunk, tree in enumerate(trees):
        for step, pair in (divmod(number, len(pairs.src)) for number in tree):
            rows[step].append((int(pairs.src[pair]), int(pairs.dst[pair]), chunk))
    return [Step(*np.array(rows[step], np.int64).T) for step in sorted(rows)]
