"""Binomial trees: broadcast, reduce, gather and scatter in log2 n steps.

    broadcast from 0 of 8    step 0: 0->1    step 1: 0->2 1->3    step 2: 0->4 1->5 2->6 3->7

Broadcast: in step k every rank that has the data, 0..2^k-1, sends it to the rank 2^k further on. The number of ranks
with the data doubles in every step, and no algorithm needs fewer steps. Reduce runs the tree backwards: in step k each
rank whose lowest set bit is 2^k sends its sum to the rank 2^k before it, so every contribution is added once.

Gather and scatter send the chunks of a whole subtree in one message; gather sends the nearest first, scatter the
furthest first. The root has log2 n messages instead of n-1, but a chunk may travel up to log2 n times.

``radix``: the k-nomial tree. In each step a rank that has the data sends it to radix-1 others, so that their number is
multiplied by the radix. The messages of one step do not wait for each other:

    broadcast from 0 of 9, radix 3    step 0: 0->1 0->2    step 1: 0->3 1->4 2->5 0->6 1->7 2->8

Positions are counted from the root (``place``), so any rank can be the root.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, backwards
from ..cost_card import Card, ceil_log2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []

SOURCE = "folklore; Thakur, Rabenseifner and Gropp 2005"
Ints = NDArray[np.int64]
TERNARY = [{"radix": 3}]
HALF = {"q": lambda n: 1 << max(ceil_log2(n) - 1, 0)}


def distances(size: int, radix: int) -> list[int]:
    """The powers of the radix below ``size``: the distance of each step, nearest first."""
    if radix < 2:
        raise ValueError(f"radix={radix}; it must be at least 2")
    powers = []
    distance = 1
    while distance < size:
        powers.append(distance)
        distance *= radix
    return powers


# The loads are the steps below in closed form, for root 0: for prices on any number of ranks and hosts. A step has a
# message set for each of the radix-1 others to which a rank sends, at ``shift`` places from it.


def _shifts(size: int, radix: int) -> Iterator[tuple[int, range]]:
    """For each step its distance, and the shifts of its message sets."""
    return ((step, range(step, min(radix * step, size), step)) for step in distances(size, radix))


def broadcast_load(hosts: Hosts, radix: int = 2) -> Iterator[LoadItem]:
    size = hosts.size
    for step, shifts in _shifts(size, radix):
        yield EqualSteps(1, [[MessageSet(0, min(step, size - shift), shift)] for shift in shifts])


def reduce_load(hosts: Hosts, radix: int = 2) -> Iterator[LoadItem]:
    size = hosts.size
    for step, shifts in _shifts(size, radix):
        yield EqualSteps(1, [[MessageSet(shift, size, -shift, stride=radix * step, reduce=True)] for shift in shifts])


def gather_load(hosts: Hosts, radix: int = 2) -> Iterator[LoadItem]:
    size = hosts.size
    for step, shifts in _shifts(size, radix):
        last = (size - 1) // step * step  # the head of the last subtree, which may be smaller than ``step`` places
        groups = []
        for shift in shifts:
            whole = MessageSet(shift, size - step + 1, -shift, stride=radix * step, chunks=step)
            is_cut = last % (radix * step) == shift and size - last < step
            groups.append([whole, MessageSet(last, last + 1, -shift, chunks=size - last)] if is_cut else [whole])
        yield EqualSteps(1, groups)


def scatter_load(hosts: Hosts, radix: int = 2) -> Iterator[LoadItem]:
    yield from backwards(gather_load(hosts, radix), reduce=False)


@algorithm(
    "broadcast",
    name="binomial",
    chunks=1,
    card=Card("L", "L", "small data", SOURCE, load=broadcast_load),
    variants=TERNARY,
)
def broadcast(size: int, root: int = 0, radix: int = 2) -> Iterator[Step]:
    for distance in distances(size, radix):
        target = np.arange(distance, min(radix * distance, size))
        yield Step(src=(root + target % distance) % size, dst=(root + target) % size, chunk=0)


@algorithm(
    "reduce",
    name="binomial",
    chunks=1,
    card=Card("L", "min(n-1, 1)", "small data", SOURCE, load=reduce_load),
    variants=TERNARY,
)
def reduce(size: int, root: int = 0, radix: int = 2) -> Iterator[Step]:
    for distance in distances(size, radix):
        place = np.arange(0, size, distance)
        place = place[place // distance % radix > 0]
        parent = place - place // distance % radix * distance
        yield Step(src=(root + place) % size, dst=(root + parent) % size, chunk=0, reduce=True)


def _subtrees(size: int, distance: int, radix: int) -> tuple[Ints, Ints, Ints]:
    """The places (parent, head, member) of the rows of a step; chunks go between the head of a subtree and its parent.

    The subtrees of the step have ``distance`` places; each member of a subtree is a row.
    """
    member = np.arange(size)
    digit = member // distance % radix
    member, digit = member[digit > 0], digit[digit > 0]
    head = member // distance * distance
    return head - digit * distance, head, member


@algorithm(
    "gather",
    name="binomial",
    card=Card("L", "max(n-q, q//2)/n", "small data", SOURCE, HALF, gather_load),
    variants=[{"radix": 3}, {"radix": 4}],
)
def gather(size: int, root: int = 0, radix: int = 2) -> Iterator[Step]:
    for distance in distances(size, radix):
        parent, head, member = _subtrees(size, distance, radix)
        yield Step((root + head) % size, (root + parent) % size, chunk=(root + member) % size)


@algorithm(
    "scatter",
    name="binomial",
    card=Card("L", "(n-1)/n", "small data", SOURCE, load=scatter_load),
    variants=[{"radix": 3}, {"radix": 4}],
)
def scatter(size: int, root: int = 0, radix: int = 2) -> Iterator[Step]:
    for distance in reversed(distances(size, radix)):
        parent, head, member = _subtrees(size, distance, radix)
        yield Step((root + parent) % size, (root + head) % size, chunk=(root + member) % size)
