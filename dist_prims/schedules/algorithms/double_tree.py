"""Broadcast and reduce over two binary trees, in which every rank sends and receives at most one message in a step.

A binary tree broadcasts at half the speed of a link: an inner rank sends each chunk twice, and leaves send nothing. Two
trees share the work. Each carries half of the data, and the inner ranks of one are leaves of the other, so that every
rank receives two halves and sends at most two. The root belongs to neither tree and feeds both:

    size 8, root 0     first tree        4           second tree      5
                                       2   6                        3   7
                                      1 3 5 7                      2 4 6 1

Every edge has one of two colours, and is used in every second step. A rank receives over two edges, one in each tree,
and sends over at most two; both pairs get different colours. As a graph of senders and receivers with at most two
edges each, the edges form paths and cycles of even length, along which the colours alternate.

An edge starts in the first step of its colour after data arrives. With k chunks in each half, trees of height h take
about 2 h + 2 k steps of 1/(2 k) of the data: for large k, the time of one buffer over one link, as in a chain, but with
a logarithmic delay. Reduce runs the steps backwards and adds.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..cost_card import Card
from ..load import Hosts
from ..moves import FEW_RANKS, Busiest, Move, Part, Round
from ..registry import algorithm
from ..steps import Step
from .tree import CHUNKS, at_least_one, moves_by_level, parents, renumbered

__all__: list[str] = []

Ints = NDArray[np.int64]


def two_trees(nodes: int) -> tuple[Ints, Ints]:
    """The parents in two trees over places 1..nodes without an inner place in common; the parent of a root is 0."""
    one, place = parents(nodes + 1)[1:] - 1, np.arange(nodes)
    return one + 1, renumbered(one, (place + 1) % nodes if nodes % 2 else nodes - 1 - place) + 1


def _other(vertex: Ints) -> Ints:
    """For each edge the other edge at the same vertex, or -1; a vertex has at most two."""
    order = np.argsort(vertex, kind="stable")
    same = vertex[order][1:] == vertex[order][:-1]
    other = np.full(len(vertex), -1)
    other[order[:-1][same]], other[order[1:][same]] = order[1:][same], order[:-1][same]
    return other


def colours(src: Ints, dst: Ints) -> Ints:
    """0 or 1 for each edge, so that no two edges with the same sender or the same receiver have the same colour."""
    found = [-1] * len(src)
    neighbours = list(zip(_other(src).tolist(), _other(dst).tolist(), strict=True))
    for first in range(len(src)):
        waiting = [(first, 0)] if found[first] < 0 else []
        while waiting:
            edge, colour = waiting.pop()
            found[edge] = colour
            waiting += [(next_edge, 1 - colour) for next_edge in neighbours[edge] if next_edge >= 0 > found[next_edge]]
    return np.array(found, np.int64)


def _edges(size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """(sender, receiver, tree, first step) of every edge, with places counted from the root."""
    trees = two_trees(size - 1)
    src, dst = np.concatenate(trees), np.tile(np.arange(1, size), 2)
    tree, colour = np.repeat([0, 1], size - 1), colours(src, dst)
    start = np.full(len(src), -1)
    ready = np.flatnonzero(src == 0)
    before = np.full(len(ready), -1)
    while len(ready):
        start[ready] = before + 1 + ((before + 1) % 2 != colour[ready])
        reached = np.full((2, size), -1)
        reached[tree[ready], dst[ready]] = start[ready]
        ready = np.flatnonzero(reached[tree, src] >= 0)
        before = reached[tree[ready], src[ready]]
    return src, dst, tree, start


def _last_start(n: int) -> int:
    return int(_edges(n)[3].max(initial=0))


def _steps(size: int, root: int, chunks: int) -> Iterator[Step]:
    """The steps of the broadcast."""
    src, dst, tree, start = _edges(size)
    for now in range(int(start.max(initial=0)) + 2 * chunks - 1 if size > 1 else 0):
        chunk, rest = np.divmod(now - start, 2)
        on = (rest == 0) & (chunk >= 0) & (chunk < chunks)
        yield Step((root + src[on]) % size, (root + dst[on]) % size, tree[on] * chunks + chunk[on])


def _in_second_tree(move: Move, size: int) -> Move:
    """The same message in the second tree, without the chunk of its last place."""
    if size % 2:
        return move.mirrored(size + 1)
    return replace(move, first=move.first + 1, last=min(move.last + 1, size))


def _load(hosts: Hosts, chunks: int = CHUNKS, reduce: bool = False) -> Iterator[Part]:
    """A parent sends to its children in turn: in each level, messages to the right and to the left.

    Each level begins two steps after the one above it. Of sizes other than powers of two, the last levels overlap.
    """
    size = hosts.size
    if size <= FEW_RANKS:
        yield from (reduce_to_root if reduce else broadcast)(size, chunks=chunks)
    else:
        levels = moves_by_level(size, reduce=True)
        top = 1 << (len(levels) - 1)  # the root of the first tree
        second = [[_in_second_tree(move, size) for move in level] for level in levels[:-1]]
        second.append([Move(size - top, size - top + 1, top - size) if size % 2 else Move(top + 1, top + 2, -top - 1)])
        halves = []
        for up in reversed([one + two for one, two in zip(levels, second, strict=True)]):
            level = [replace(move, reduce=True) if reduce else move.backwards() for move in up]
            halves += [[m for m in level if m.shift > 0], [m for m in level if m.shift < 0]]
        filling = halves[1:-1] if size == 2 * top else halves[1:-2]
        parts = [Round(1, [half]) for half in filling]
        every = [replace(move, chunks=0.5) for half in halves for move in half]
        parts.append(Round(2 * chunks, [every]))
        yield from reversed(parts) if reduce else parts
    if size > 1:
        yield Busiest(2 * chunks, 2 * chunks, 2 * chunks * reduce)


CARD = Card(
    "(d + 2*k - 1)*min(n-1, 1)",
    "min(n-1, 1)",
    "many ranks, medium and large data",
    "Sanders, Speck and Träff, Two-tree algorithms, 2009",
    {"k": lambda n: CHUNKS, "d": _last_start},
    _load,
)


def _chunks(size: int, chunks: int) -> int:
    return 2 * at_least_one(size, chunks)


@algorithm("broadcast", name="double_tree", chunks=_chunks, card=CARD)
def broadcast(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    yield from _steps(size, root, chunks)


@algorithm("reduce", name="double_tree", chunks=_chunks, card=replace(CARD, load=partial(_load, reduce=True)))
def reduce_to_root(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    for step in reversed(list(_steps(size, root, chunks))):
        yield step.backwards()
