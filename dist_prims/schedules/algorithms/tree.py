"""Tree all-reduce: reduce from the leaves to a root, then broadcast back, pipelined chunk by chunk.

A tree has only log2 n levels, but whole buffers would pass them one level at a time. Cut into k chunks, chunk c leaves
a node one step after chunk c-1, so all levels work at once: 2 log2 n + k - 1 steps of 1/k of the data.

    size 8, one tree (ranks in order, left to right)          height 3 (the root's) down to 0

            0                     the parent of rank r: clear the lowest set bit of r and set the next one:
            └───────4             1 -> 2, 2 -> 4, 3 -> 2, 5 -> 6, 6 -> 4, 7 -> 6; 4 has no such parent, so 4 -> 0
                2       6
              1   3   5   7

In step t a node of height h (its distance to its furthest leaf) sends chunk t-h to its parent, which adds it. A node
receives the complete sum of a chunk after its parent has it. Each node adds its own data once and every rank receives a
copy of the root's sum, so all ranks end with the same bits.

The weakness of one tree: inner ranks send three times as much as leaves, and half of all ranks are leaves. The *double
tree* gives half of the data to a second tree, in which the inner ranks of the first tree are leaves. A rank then sends
at most twice the data, in a logarithmic number of steps. If the size is even, the second tree is the mirror image of
the first. If the size is odd, take the tree of one rank more, remove its root (place 0), whose only child becomes the
root, and number the places from 0 again. The inner ranks of this first tree are odd; the second tree is the first one
shifted by one rank, so that its inner ranks are even, from 2 on.

    size 5, two trees         3             4            inner ranks 1 and 3, and 2 and 4
                            1   4         2   0
                           0 2           1 3
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import FEW_RANKS, Busiest, EqualSteps, LoadItem, MessageSet
from ..cost_card import Card, ceil_log2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []

Ints = NDArray[np.int64]
CHUNKS = 4


def at_least_one(size: int, chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks={chunks}; the data needs at least 1 chunk")
    return chunks


def two_halves(size: int, chunks: int) -> int:
    return 2 * at_least_one(size, chunks)


def parents(size: int) -> Ints:
    """The parent of each rank; -1 for the root, rank 0."""
    rank = np.arange(size)
    low = rank & -rank
    above = (rank ^ low) | (low << 1)
    return np.where(rank == 0, -1, np.where(above < size, above, rank ^ low))


def _heights_and_depths(parent: Ints) -> tuple[Ints, Ints]:
    """(height, depth) of each rank: the distances to its furthest leaf and to the root."""
    depth, height = np.zeros_like(parent), np.zeros_like(parent)
    rank, ancestor = np.arange(len(parent)), parent.copy()
    for distance in range(1, len(parent).bit_length() + 1):  # the ancestors at this distance
        exists = ancestor >= 0
        rank, ancestor = rank[exists], ancestor[exists]
        depth[rank] += 1
        np.maximum.at(height, ancestor, distance)
        ancestor = parent[ancestor]
    return height, depth


def _pipeline(parent: Ints, first: int, chunks: int) -> Iterator[Step]:
    """The steps of one tree, whose chunks are numbered from ``first``: up to the root and down again."""
    height, depth = _heights_and_depths(parent)
    child = np.flatnonzero(parent >= 0)
    top = int(height.max(initial=0))
    for now in range(2 * top + chunks - 1 if top else 0):
        # The chunk on each edge, from the child up and from the parent down; most edges have none in a step.
        up, down = now - height[child], now - top - depth[parent[child]]
        senders, receivers = child[(up >= 0) & (up < chunks)], child[(down >= 0) & (down < chunks)]
        yield Step.concat(
            [
                Step(senders, parent[senders], first + now - height[senders], reduce=True),
                Step(parent[receivers], receivers, first + now - top - depth[parent[receivers]]),
            ]
        )


def sets_by_level(size: int, reduce: bool) -> list[list[MessageSet]]:
    """For each level, from the leaves: if ``reduce``, the messages of children to parents, else to children.

    The children of a level are the ranks with the lowest set bit ``low``: low, 3 low, 5 low, ... Every second one has
    its parent ``low`` to the right, the others to the left; so has the last one, if no rank is that far to its right.
    """
    levels = []
    for step in range(ceil_log2(size)):
        low, last = 1 << step, size - (1 << step)
        last_to_the_right = last - 1 - (last - 1 - low) % (4 * low) if last > low else low - 4 * low
        odd_one = last_to_the_right + 4 * low
        level = [MessageSet(low, last, low, stride=4 * low), MessageSet(3 * low, size, -low, stride=4 * low)]
        level += [MessageSet(odd_one, odd_one + 1, -low)] if odd_one < size else []
        levels.append([move._replace(reduce=True) if reduce else move.backwards() for move in level])
    return levels


def _double_tree_sets_by_level(size: int, reduce: bool) -> list[list[MessageSet]]:
    """:func:`sets_by_level` for both trees of a double tree."""
    if size % 2 == 0:
        return [[*level, *(move.mirrored(size) for move in level)] for level in sets_by_level(size, reduce)]
    levels = sets_by_level(size + 1, reduce=True)[:-1]
    both = []
    for level in levels:
        first_tree = [move._replace(first=move.first - 1, last=move.last - 1) for move in level]
        second_tree = [move._replace(last=min(move.last, size)) for move in level]  # without its last place: rank 0
        both.append([move if reduce else move.backwards() for move in first_tree + second_tree])
    return both


def _load(hosts: Hosts, chunks: int = CHUNKS, trees: int = 1) -> Iterator[LoadItem]:
    """The steps of :func:`tree` or, with two ``trees``, of :func:`double_tree`, for prices on any number of ranks."""
    size = hosts.size
    sent = min(size - 1, 3) if trees == 1 else min(size, 4) * (size > 1)  # messages of the busiest rank for each chunk
    yield Busiest(messages=sent * chunks, chunks=sent * chunks, reduced=min(size - 1, 2) * chunks)
    if size <= FEW_RANKS:
        yield from (tree if trees == 1 else double_tree)(size, chunks)
        return
    up, down = ((sets_by_level if trees == 1 else _double_tree_sets_by_level)(size, reduce) for reduce in (True, False))
    top = len(up)
    for now in range(2 * top + chunks - 1 if top else 0):
        active = [move for height, level in enumerate(up) if 0 <= now - height < chunks for move in level]
        active += [m for depth, level in enumerate(reversed(down)) if 0 <= now - top - depth < chunks for m in level]
        # A parent has one child on each side, so a rank sends and receives at most one message in each direction.
        to_the_right = [move for move in active if move.shift > 0]
        to_the_left = [move for move in active if move.shift < 0]
        yield EqualSteps(1, [to_the_right, to_the_left])


SOURCE = "Sanders, Speck and Träff, Two-tree algorithms, 2009; NCCL 2.4"
FOUR = {"k": lambda n: CHUNKS}


@algorithm(
    "all_reduce",
    name="tree",
    chunks=at_least_one,
    card=Card("(2*L + k - 1)*min(n-1, 1)", "min(n-1, 3)", "many ranks, small data", SOURCE, FOUR, _load),
)
def tree(size: int, chunks: int = CHUNKS) -> Iterator[Step]:
    yield from _pipeline(parents(size), 0, chunks)


def _two_trees(size: int) -> tuple[Ints, Ints]:
    """The parents of each rank in two trees that have no inner rank in common."""
    if size % 2:
        first_tree = parents(size + 1)[1:] - 1
        return first_tree, renumbered(first_tree, (np.arange(size) + 1) % size)
    first_tree = parents(size)
    return first_tree, renumbered(first_tree, size - 1 - np.arange(size))


def renumbered(parent: Ints, rank_at: Ints) -> Ints:
    """The same tree with rank ``rank_at[p]`` in place p."""
    new_parent = np.empty_like(parent)
    new_parent[rank_at] = np.where(parent < 0, -1, rank_at[parent])
    return new_parent


@algorithm(
    "all_reduce",
    name="double_tree",
    chunks=two_halves,
    card=Card(
        "(2*h + k - 1)*min(n-1, 1)",
        "min(n, 4)/2*min(n-1, 1)",
        "many ranks, medium data",
        SOURCE,
        {**FOUR, "h": lambda n: ceil_log2(n + 1) - 1 if n % 2 else ceil_log2(n)},
        partial(_load, trees=2),
    ),
)
def double_tree(size: int, chunks: int = CHUNKS) -> Iterator[Step]:
    first_tree, second_tree = _two_trees(size)
    for steps in zip(_pipeline(first_tree, 0, chunks), _pipeline(second_tree, chunks, chunks), strict=True):
        yield Step.concat(steps)
