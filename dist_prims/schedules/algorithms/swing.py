"""Swing all-reduce: a butterfly whose peers are close to each other on a ring or torus network.

Halving-doubling pairs ranks up to half the group apart, and on a torus such messages share the links between them.
Swing pairs each rank with one to the left, then to the right, ... at distances 1, -1, 3, -5, 11, -21:

    distance(s) = 1 - 2 + 4 - ... ± 2^s          peer of an even rank r: r + distance(s), of an odd one: r - distance(s)

    size 8, step 0    0-1  2-3  4-5  6-7         step 1    0-7  2-1  4-3  6-5         step 2    0-3  2-5  4-7  6-1

In each step the peers are at most about half as far apart as in halving-doubling. If the size is a power of two, no two
ranks meet twice, directly or through others, so each exchange adds new contributions. For other even sizes some ranks
meet twice. A rank then leaves out the blocks that its peer has already, so the number of bytes is still the smallest:

    size 6, all-gather of chunk 0    step 2: 0->3    step 1: 0->5 3->4    step 0: 0->1 3->2, but not 4->5

:mod:`._butterfly` has the exchanges. An odd size has one surplus rank, which adds its data to rank 0 first.

The topologies of this library have hosts and links but no torus. For powers of two the cost model prices Swing like
halving-doubling, and the gain shows on a real torus only.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, backwards
from ..cost_card import Card, ceil_log2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from . import _butterfly as butterfly

__all__: list[str] = []


def even(n: int) -> int:
    """The largest even number up to n; 1 for one rank."""
    return max(n - n % 2, 1)


def peers(p: int) -> list[NDArray[np.int64]]:
    rank = np.arange(p)
    sign = np.where(rank % 2 == 0, 1, -1)
    return [(rank + sign * (1 - (-2) ** (step + 1)) // 3) % p for step in range(ceil_log2(p))]


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices. ``size - p`` is 1 or 0: whether the steps of a surplus rank exist."""
    size, p = hosts.size, even(hosts.size)
    gather = [*butterfly.swing_gather(p)]
    yield EqualSteps(size - p, [[MessageSet(p, size, -p, chunks=p, reduce=True)]])
    yield from backwards(gather)
    yield from gather
    yield EqualSteps(size - p, [[MessageSet(0, size - p, p, chunks=p)]])


EVEN = {"e": even, "E": lambda n: ceil_log2(even(n))}


@algorithm(
    "all_reduce",
    name="swing",
    chunks=even,
    card=Card(
        "2*E + 2*(n-e)",
        "2*(e-1)/e + n-e",
        "even sizes (a torus is not modelled)",
        "De Sensi, Bonato, Saam and Hoefler, Swing, NSDI 2024",
        EVEN,
        _load,
    ),
)
def all_reduce(size: int) -> Iterator[Step]:
    p = even(size)
    yield from butterfly.all_reduce(size, p, peers(p))
