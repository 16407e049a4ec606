"""Broadcast by halving: the first message goes half the ranks away, so that other hosts have the data first.

The ranks that a holder of the data is responsible for are an interval. In every step the holder sends the data to the
rank half the interval away, in the other half, and each of the two is then responsible for its own half:

    2 hosts of 4 ranks    step 0: 0->4    step 1: 0->2 4->6    step 2: 0->1 2->3 4->5 6->7
    root 0                between hosts   within hosts         within hosts

The binomial tree of :mod:`.binomial` sends to the nearest ranks first and to the furthest last, so that half of the
ranks receive the data over a link between hosts: 4 messages over the link of the example, where halving sends one.
Halves end where hosts end if the number of hosts is a power of two, with equally many ranks each. Each host then
receives the data once, from any root.

The number of steps is the same as for the binomial tree: an interval of n ranks has a half of at most (n+1)/2 ranks, so
after ceil(log2 n) steps every interval is one rank.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..load import Hosts
from ..moves import Part
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


def _load(hosts: Hosts) -> Iterator[Part]:
    yield from broadcast(hosts.size)


@algorithm(
    "broadcast",
    name="halving",
    chunks=1,
    card=Card("L", "L", "small data, several hosts", "folklore; MPICH, whose halves are powers of two", load=_load),
)
def broadcast(size: int, root: int = 0) -> Iterator[Step]:
    first, last, holder = np.array([0]), np.array([size]), np.array([root])
    while (last - first).max() > 1:
        single = last - first == 1
        middle = (first + last + 1) // 2
        half = middle - first
        target = np.where(holder < middle, np.minimum(holder + half, last - 1), holder - half)
        yield Step(src=holder[~single], dst=target[~single], chunk=0)
        low = np.where(holder < middle, holder, target)
        high = (holder + target - low)[~single]
        first, last = np.concatenate([first, middle[~single]]), np.concatenate([middle, last[~single]])
        holder = np.concatenate([low, high])
