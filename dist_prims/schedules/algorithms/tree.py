"""Trees: reduce from the leaves to a root, broadcast back, chunk after chunk, so that all levels work at once.

A tree is as shallow as a logarithm, but whole buffers would climb it one level at a time. Cut into k chunks, chunk c
leaves a node one step after chunk c-1, and the tree is a pipeline: 2 log2 n + k - 1 steps of 1/k of the data.

    size 8, one tree (ranks in order, left to right)          height 3 (the root's) down to 0

            0                     rank r hangs from r with its lowest set bit cleared and the next one set:
            └───────4             1 -> 2, 2 -> 4, 3 -> 2, 5 -> 6, 6 -> 4, 7 -> 6; 4, which has none above it, -> 0
                2       6
              1   3   5   7

Its weak point: inner ranks send three times what a leaf does, and half of all ranks are leaves. The *double tree* gives
half of the data to a second tree in which no inner rank of the first is inner again, so a rank sends at most twice the
data, in a logarithm of steps. Where the size is even the second tree is the mirror image of the first. Where it is odd
both trees leave out place 0 of the tree of one rank more, whose only child becomes the root; the inner ranks are then
the odd ones, and the second tree is moved on by one rank, so that its inner ranks are the even ones from 2 on.

    size 5, two trees         3             4            inner ranks 1 and 3, and 2 and 4
                            1   4         2   0
                           0 2           1 3
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__ = ["double_tree", "parents", "tree"]

Ints = NDArray[np.int64]
CHUNKS = 4


def at_least_one(size: int, chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks={chunks}: data is split into 1 chunk or more")
    return chunks


def parents(size: int) -> Ints:
    """The parent of each rank 1..; that of the root, rank 0, is -1."""
    rank = np.arange(size)
    low = rank & -rank
    above = (rank ^ low) | (low << 1)
    return np.where(rank == 0, -1, np.where(above < size, above, rank ^ low))


def _levels(parent: Ints) -> tuple[Ints, Ints]:
    """(height, depth) of each rank: steps to its furthest leaf, and to the root."""
    depth, height = np.zeros_like(parent), np.zeros_like(parent)
    below, above = np.arange(len(parent)), parent.copy()
    for level in range(1, len(parent).bit_length() + 1):
        climbing = above >= 0
        below, above = below[climbing], above[climbing]
        depth[below] += 1
        np.maximum.at(height, above, level)
        above = parent[above]
    return height, depth


def _pipeline(parent: Ints, first: int, chunks: int) -> Iterator[Step]:
    """All chunks first.. up a tree and down again."""
    height, depth = _levels(parent)
    child = np.flatnonzero(parent >= 0)
    top = int(height.max(initial=0))
    for now in range(2 * top + chunks - 1 if top else 0):
        up, down = now - height[child], now - top - depth[parent[child]]
        climbs, falls = child[(up >= 0) & (up < chunks)], child[(down >= 0) & (down < chunks)]
        yield Step.concat(
            [
                Step(climbs, parent[climbs], first + now - height[climbs], reduce=True),
                Step(parent[falls], falls, first + now - top - depth[parent[falls]]),
            ]
        )


SOURCE = "Sanders, Speck and Träff, Two-tree algorithms, 2009; NCCL 2.4"
FOUR = {"k": lambda n: CHUNKS}


@algorithm(
    "all_reduce",
    name="tree",
    chunks=at_least_one,
    card=Card("(2*L + k - 1)*min(n-1, 1)", "min(n-1, 3)", "many ranks, small data", SOURCE, FOUR),
)
def tree(size: int, chunks: int = CHUNKS) -> Iterator[Step]:
    yield from _pipeline(parents(size), 0, chunks)


def _two_trees(size: int) -> tuple[Ints, Ints]:
    """Parents in two trees that have no inner rank in common."""
    if size % 2:
        one = parents(size + 1)[1:] - 1
        return one, _renumbered(one, (np.arange(size) + 1) % size)
    one = parents(size)
    return one, _renumbered(one, size - 1 - np.arange(size))


def _renumbered(parent: Ints, rank_at: Ints) -> Ints:
    """The same tree with rank ``rank_at[p]`` in place p."""
    moved = np.empty_like(parent)
    moved[rank_at] = np.where(parent < 0, -1, rank_at[parent])
    return moved


@algorithm(
    "all_reduce",
    name="double_tree",
    chunks=lambda size, chunks: 2 * at_least_one(size, chunks),
    card=Card(
        "(2*h + k - 1)*min(n-1, 1)",
        "min(n, 4)/2*min(n-1, 1)",
        "many ranks, middling data",
        SOURCE,
        {**FOUR, "h": lambda n: ceil_log2(n + 1) - 1 if n % 2 else ceil_log2(n)},
    ),
)
def double_tree(size: int, chunks: int = CHUNKS) -> Iterator[Step]:
    one, two = _two_trees(size)
    for steps in zip(_pipeline(one, 0, chunks), _pipeline(two, chunks, chunks), strict=True):
        yield Step.concat(steps)
