"""Rabenseifner's reduce: recursive halving, then a binomial gather to the root, for any number of ranks.

The ranks reduce-scatter by recursive halving, as in :mod:`.halving_doubling`, and gather the sums to the root: 2 log2 p
steps, less than two buffers a rank, and less than one buffer of additions. A binomial reduce adds the whole buffer
in each of its log2 n steps.

Places are counted from the root. If the size n is not a power of two, let p be the largest power of two below it, and
r = n - p. The first 2 r places then form pairs, and in two further steps the data of each pair is added up at its even
place. Each pair shares the additions: the even place adds the first half of the data, the odd place the second half.

    size 6, root 0, p = 4    step 0    0 <-> 1  2 <-> 3             halves of the data
                             step 1    1 -> 0   3 -> 2              the reduced half: 1 and 3 are done
                             step 2    0 <-> 4  2 <-> 5             2 of 4 chunks
                             step 3    0 <-> 2  4 <-> 5             1 of 4 chunks
                             step 4    2 -> 0   5 -> 4              1 chunk
                             step 5    4 -> 0                       2 chunks

After this fold, places 0, 2, ..., 2 r - 2 and 2 r, ..., n - 1 remain: p places, which take part in the halving.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, MessageSet
from ..cost_card import Card, floor_pow2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step, WideStep
from . import _butterfly as butterfly
from . import binomial
from .halving_doubling import distances, halves

__all__: list[str] = []

SOURCE = "Rabenseifner, Optimization of collective reduction operations, 2004"


def _fold(size: int, root: int, p: int) -> Iterator[Step]:
    """Steps 0 and 1: the even one of each pair of places gets the sum of both."""
    surplus = size - p
    even = (root + 2 * np.arange(surplus)) % size
    odd = (even + 1) % size
    half = np.arange(p // 2)
    evens, odds = np.repeat(even, len(half)), np.repeat(odd, len(half))
    first, second = np.tile(half, surplus), np.tile(p // 2 + half, surplus)
    yield Step.concat([Step(odds, evens, first, reduce=True), Step(evens, odds, second, reduce=True)])
    yield Step(odds, evens, second)


def _gathered(n: int) -> int:
    """The chunks that a rank of the fold sends in the gather: of the busiest such rank."""
    surplus = n - floor_pow2(n)
    return floor_pow2(surplus - 1) if surplus > 1 else 0


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below, for prices. The steps of the fold are in closed form."""
    p = floor_pow2(hosts.size)
    surplus, places = hosts.size - p, np.arange(p)
    rank = places + np.minimum(places, surplus)
    if surplus:
        odd = MessageSet(1, 2 * surplus, -1, stride=2, chunks=p // 2, reduce=True)
        yield EqualSteps(1, [[odd, odd._replace(first=0, shift=1)]])
        yield EqualSteps(1, [[odd._replace(reduce=False)]])
    for distance in halves(p):
        yield WideStep(Step(rank, rank[places ^ distance], places, reduce=True), distance)
    yield from (step.renumbered(rank) for step in binomial.gather(p))


@algorithm(
    "reduce",
    name="rabenseifner",
    chunks=floor_pow2,
    card=Card(
        "2*l + 2*min(n-p, 1)",
        "(p-1 + (p/2 + f*min(n-p, 1))*min(p-1, 1))/p",
        "medium and large data",
        SOURCE,
        {"f": _gathered},
        _load,
    ),
)
def reduce(size: int, root: int = 0) -> Iterator[Step]:
    p = floor_pow2(size)
    surplus = size - p
    place = np.concatenate([2 * np.arange(surplus), np.arange(2 * surplus, size)])
    rank = (root + place) % size
    if surplus:
        yield from _fold(size, root, p)
    for step in (*butterfly.reduce_scatter(distances(p), np.eye(p, dtype=bool)), *binomial.gather(p)):
        yield step.renumbered(rank)
