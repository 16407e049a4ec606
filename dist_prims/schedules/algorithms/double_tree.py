"""Broadcast and reduce over two binary trees, in which every rank sends and receives at most one message in a step.

A binary tree broadcasts at half the speed of a link: an inner rank sends each chunk twice, and leaves send nothing. Two
trees share the work. Each carries half of the data, and the inner ranks of one are leaves of the other, so that every
rank receives two halves and sends at most two. The root belongs to neither tree and feeds both:

    size 8, root 0     first tree        4           second tree      5
                                       2   6                        3   7
                                      1 3 5 7                      2 4 6 1

Every edge, from a parent to a child, has one of two *colours*, and is used in every second step. A rank receives over
two edges, one in each tree, and sends over at most two edges; the two edges of either kind get different colours, so
that a rank sends and receives at most one message in a step. Such colours exist: each edge touches at most one other
edge at its sender and one at its receiver, so the edges form paths, and cycles of even length, along which the colours
alternate.

An edge starts in the first step of its colour after data arrives. With k chunks in each half, trees of height h take
about 2 h + 2 k steps of 1/(2 k) of the data: for large k, the time of one buffer over one link, as in a chain, but with
a logarithmic delay. Reduce runs the steps backwards and adds.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import FEW_RANKS, Busiest, EqualSteps, LoadItem, MessageSet
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from .tree import CHUNKS, parents, renumbered, sets_by_level, two_halves

__all__: list[str] = []

Ints = NDArray[np.int64]


def two_trees(nodes: int) -> tuple[Ints, Ints]:
    """The parents of places 1..nodes in two trees without an inner place in common; the parent of a root is 0.

    For an odd number of nodes the second tree is the first one shifted by one place, else its mirror image.
    """
    first_tree, place = parents(nodes + 1)[1:] - 1, np.arange(nodes)
    second_tree = renumbered(first_tree, (place + 1) % nodes if nodes % 2 else nodes - 1 - place)
    return first_tree + 1, second_tree + 1


def _other_edge(end: Ints) -> Ints:
    """For each edge the number of the other edge with the same end (a sender or a receiver), or -1."""
    order = np.argsort(end, kind="stable")
    same = end[order][1:] == end[order][:-1]
    other = np.full(len(end), -1)
    other[order[:-1][same]], other[order[1:][same]] = order[1:][same], order[:-1][same]
    return other


def colours(src: Ints, dst: Ints) -> Ints:
    """0 or 1 for each edge, so that no two edges with the same sender or the same receiver have the same colour."""
    colour_of = [-1] * len(src)
    neighbours = list(zip(_other_edge(src).tolist(), _other_edge(dst).tolist(), strict=True))
    for first in range(len(src)):  # each path or cycle, from the first of its edges
        waiting = [(first, 0)] if colour_of[first] < 0 else []
        while waiting:
            edge, colour = waiting.pop()
            colour_of[edge] = colour
            waiting += [(other, 1 - colour) for other in neighbours[edge] if other >= 0 > colour_of[other]]
    return np.array(colour_of, np.int64)


class _Edges(NamedTuple):
    """The edges of both trees. Places are counted from the root, place 0, which feeds both trees."""

    src: Ints
    dst: Ints
    tree: Ints  # 0 or 1
    start: Ints  # the first step in which the edge carries a chunk


def _edges(size: int) -> _Edges:
    src, dst = np.concatenate(two_trees(size - 1)), np.tile(np.arange(1, size), 2)
    tree, colour = np.repeat([0, 1], size - 1), colours(src, dst)
    start = np.full(len(src), -1)
    # Level by level: an edge starts after the edge to its sender, in the next step that has its colour.
    level = np.flatnonzero(src == 0)
    arrival = np.full(len(level), -1)  # the step in which the sender receives its first chunk
    while len(level):
        start[level] = arrival + 1 + ((arrival + 1) % 2 != colour[level])
        reached = np.full((2, size), -1)  # reached[tree, place]: the step in which the level reaches it, else -1
        reached[tree[level], dst[level]] = start[level]
        level = np.flatnonzero(reached[tree, src] >= 0)
        arrival = reached[tree[level], src[level]]
    return _Edges(src, dst, tree, start)


def _last_start(n: int) -> int:
    return int(_edges(n).start.max(initial=0))


def _steps(size: int, root: int, chunks: int) -> Iterator[Step]:
    """The steps of the broadcast. Chunks 0..chunks-1 travel in the first tree, the others in the second one."""
    src, dst, tree, start = _edges(size)
    for now in range(_last_start(size) + 2 * chunks - 1 if size > 1 else 0):
        chunk, rest = np.divmod(now - start, 2)
        is_used = (rest == 0) & (chunk >= 0) & (chunk < chunks)
        edge = np.flatnonzero(is_used)
        yield Step((root + src[edge]) % size, (root + dst[edge]) % size, tree[edge] * chunks + chunk[edge])


def _in_second_tree(tree_set: MessageSet, size: int) -> MessageSet:
    """The same messages in the second tree. The last place of a shifted tree is left out: it becomes place 1."""
    if size % 2:
        return tree_set.mirrored(size + 1)
    return tree_set._replace(first=tree_set.first + 1, last=min(tree_set.last + 1, size))


def _load(hosts: Hosts, chunks: int = CHUNKS, reduce: bool = False) -> Iterator[LoadItem]:
    """A parent sends to its children in turn, so each level has two kinds of steps: messages to the right, to the left.

    A level begins two steps after the level above it: first the pipeline fills, half a level more in each step (only
    this half is counted, which has the most messages), then every edge carries a chunk in every second step. If the
    size is not a power of two, the last levels begin together.
    """
    size = hosts.size
    if size <= FEW_RANKS:
        yield from (reduce_to_root if reduce else broadcast)(size, chunks=chunks)
    else:
        # 1. The messages to the parents, level by level from the leaves, in the first tree and in the second.
        levels = sets_by_level(size, reduce=True)
        top = 1 << (len(levels) - 1)  # the root of the first tree
        second = [[_in_second_tree(move, size) for move in level] for level in levels[:-1]]
        # The last level is the edge between the root of the tree and place 0.
        second.append(
            [MessageSet(size - top, size - top + 1, top - size) if size % 2 else MessageSet(top + 1, top + 2, -top - 1)]
        )
        # 2. Two halves of each level of both trees, from the roots on.
        half_levels = []
        for up in reversed([both[0] + both[1] for both in zip(levels, second, strict=True)]):
            level = [move._replace(reduce=True) if reduce else move.backwards() for move in up]
            half_levels += [[m for m in level if m.shift > 0], [m for m in level if m.shift < 0]]
        # 3. The steps in which the pipeline fills, then the steps in which it is full.
        filling = half_levels[1:-1] if size == 2 * top else half_levels[1:-2]
        parts = [EqualSteps(1, [half]) for half in filling]
        all_edges = [move._replace(chunks=0.5) for half in half_levels for move in half]
        parts.append(EqualSteps(2 * chunks, [all_edges]))
        yield from reversed(parts) if reduce else parts
    if size > 1:
        yield Busiest(messages=2 * chunks, chunks=2 * chunks, reduced=2 * chunks * reduce)


CARD = Card(
    "(d + 2*k - 1)*min(n-1, 1)",
    "min(n-1, 1)",
    "many ranks, medium and large data",
    "Sanders, Speck and Träff, Two-tree algorithms, 2009",
    {"k": lambda n: CHUNKS, "d": _last_start},
    _load,
)


@algorithm("broadcast", name="double_tree", chunks=two_halves, card=CARD)
def broadcast(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    yield from _steps(size, root, chunks)


@algorithm("reduce", name="double_tree", chunks=two_halves, card=replace(CARD, load=partial(_load, reduce=True)))
def reduce_to_root(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    for step in reversed(list(_steps(size, root, chunks))):
        yield step.backwards()
