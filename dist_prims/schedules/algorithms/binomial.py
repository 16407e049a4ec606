"""Binomial trees: broadcast, reduce, gather and scatter in log2 n steps.

    broadcast from 0 of 8    step 0: 0->1    step 1: 0->2 1->3    step 2: 0->4 1->5 2->6 3->7

Broadcast: in step k every rank that has the data, 0..2^k-1, sends it to the rank 2^k further on. The number of ranks
with the data doubles in every step, and no algorithm needs fewer steps. Reduce runs the tree backwards: in step k each
rank whose lowest set bit is 2^k sends its sum to the rank 2^k before it, so every contribution is added once.

Gather and scatter send the chunks of a whole subtree in one message; gather sends the nearest first, scatter the
furthest first. The root has log2 n messages instead of n-1, but a chunk may travel up to log2 n times.

Positions are counted from the root (``place``), so any rank can be the root.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__: list[str] = []

SOURCE = "folklore; Thakur, Rabenseifner and Gropp 2005"
HALF = {"q": lambda n: 1 << max(ceil_log2(n) - 1, 0)}


@algorithm("broadcast", name="binomial", chunks=1, card=Card("L", "L", "small data", SOURCE))
def broadcast(size: int, root: int = 0) -> Iterator[Step]:
    for step in range(ceil_log2(size)):
        place = np.arange(min(1 << step, size - (1 << step)))
        yield Step(src=(root + place) % size, dst=(root + place + (1 << step)) % size, chunk=0)


@algorithm("reduce", name="binomial", chunks=1, card=Card("L", "min(n-1, 1)", "small data", SOURCE))
def reduce(size: int, root: int = 0) -> Iterator[Step]:
    for step in range(ceil_log2(size)):
        place = np.arange(1 << step, size, 2 << step)
        yield Step(src=(root + place) % size, dst=(root + place - (1 << step)) % size, chunk=0, reduce=True)


def _subtrees(size: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place of a subtree's head, place of one of its members) for the subtrees of 2^step places that are sent."""
    member = np.arange(size)
    head = member >> step << step
    is_child = (head >> step & 1) == 1
    return head[is_child], member[is_child]


@algorithm("gather", name="binomial", card=Card("L", "max(n-q, q//2)/n", "small data", SOURCE, HALF))
def gather(size: int, root: int = 0) -> Iterator[Step]:
    for step in range(ceil_log2(size)):
        head, member = _subtrees(size, step)
        yield Step((root + head) % size, (root + head - (1 << step)) % size, chunk=(root + member) % size)


@algorithm("scatter", name="binomial", card=Card("L", "(n-1)/n", "small data", SOURCE))
def scatter(size: int, root: int = 0) -> Iterator[Step]:
    for step in reversed(range(ceil_log2(size))):
        head, member = _subtrees(size, step)
        yield Step((root + head - (1 << step)) % size, (root + head) % size, chunk=(root + member) % size)
