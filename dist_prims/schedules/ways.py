"""Ways on a graph: one for each chunk of an all_to_all, from its source to its destination, with balanced links.

The ways are chosen like the trees of :mod:`.trees`, one after the other by the load that the others leave, and each is
removed and found again in every round. A way is the cheapest one, by the weights of the links and a little for each
pair, so the chunks of two ranks spread over the shortest ways and over longer ones whose links have less load.

A chunk goes a pair further in each step. On its way it lies in scratch chunks. The step that sends a scratch chunk does
not write it, and later steps may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .steps import Step
from .trees import NOISE, Packing, Pairs, Tree

__all__: list[str] = []


class Ways(Packing):
    """Ways, and the load that they put on each link, in chunks. A root is here the two ends of a way."""

    def grow(self, root: tuple[int, int], power: int) -> Tree:
        """The cheapest way, by Dijkstra's algorithm; its load is added."""
        (src, dst), pairs = root, self.pairs
        weight = self.slowness * ((self.load + 1) * self.slowness / max(self.most, 1.0)) ** power
        cost = np.append(weight, 0.0)[pairs.padded].sum(axis=1) * (1 + NOISE * self.random.random(len(pairs.src)))
        further = np.full((self.size, self.size), np.inf)
        further[pairs.src, pairs.dst] = cost + self.depth_cost
        best, before = np.full(self.size, np.inf), np.full(self.size, src)
        best[src] = 0
        unfinished = best.copy()  # ``best`` of the ranks whose way may still change, else infinite
        while (rank := int(unfinished.argmin())) != dst:
            unfinished[rank] = np.inf
            through = best[rank] + further[rank]
            closer = np.flatnonzero(through < best)
            best[closer] = unfinished[closer] = through[closer]
            before[closer] = rank
        way: Tree = []
        while dst != src:
            way.append(int(self.number[before[dst], dst]))
            dst = int(before[dst])
        for pair in way:
            for link in pairs.links[pair]:
                self.load[link] += 1
        return way[::-1]


def steps_of_ways(ways: Sequence[Tree], pairs: Pairs, ends: Sequence[tuple[int, int]]) -> tuple[list[Step], int]:
    """The steps in which each chunk goes its way, and the number of scratch chunks of a rank.

    ``ends``: source and destination of each way; the ways of the same two ranks follow each other.
    """
    size = len(pairs.out_of)
    parts = len(ends) // (size * (size - 1)) if size > 1 else 1
    # 1. Each rank copies its block for itself to where it receives blocks, behind the blocks that it sends.
    chunks, kept = size * parts, np.arange(size * parts)
    rank = kept // parts
    own = Step(rank, rank, kept, into=chunks + kept)
    # 2. Behind the received blocks is the scratch, even numbers for even steps.
    rows: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    place = [dst * parts + number % parts for number, (_, dst) in enumerate(ends)]  # the chunk number of each chunk now
    used = np.zeros((2, size), np.int64)  # scratch chunks that odd and even steps write, by rank
    for step in range(max(map(len, ways), default=0)):
        written = np.zeros(size, np.int64)
        for number, way in enumerate(ways):
            if step < len(way):
                src, dst = int(pairs.src[way[step]]), int(pairs.dst[way[step]])
                into = chunks + ends[number][0] * parts + number % parts
                if step + 1 < len(way):
                    into = 2 * chunks + 2 * int(written[dst]) + step % 2  # not a chunk that this step reads
                    written[dst] += 1
                rows[step].append((src, dst, place[number], into))
                place[number] = into
        used[step % 2] = np.maximum(used[step % 2], written)
    steps = []
    for number in range(len(rows)):
        src, dst, chunk, into = np.array(rows[number], np.int64).T
        steps.append(Step(src, dst, chunk, into=into))
    if not steps:
        return [own], 0
    return [Step.concat([own, steps[0]]), *steps[1:]], int(2 * used.max())
