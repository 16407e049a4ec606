"""Broadcast by halving: the first message goes half the ranks away, so that other hosts have the data first.

Each rank that has the data (a *holder*) is responsible for an interval of ranks; at first the root is, for all ranks.
In every step a holder sends the data to the rank half the interval away, in the other half. Then each of the two ranks
is responsible for its own half:

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
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


@algorithm(
    "broadcast",
    name="halving",
    chunks=1,
    card=Card(
        "L",
        "L",
        "small data, several hosts",
        "folklore; MPICH, whose halves are powers of two",
        load=lambda hosts: _steps(hosts.size, 0),
    ),
)
def broadcast(size: int, root: int = 0) -> Iterator[Step]:
    yield from _steps(size, root)


def _steps(size: int, root: int) -> Iterator[Step]:
    first, last, holder = np.array([0]), np.array([size]), np.array([root])  # interval i: first[i] .. last[i] - 1
    while (last - first).max() > 1:
        is_cut = last - first > 1
        middle = (first + last + 1) // 2
        half = middle - first
        target = np.where(holder < middle, np.minimum(holder + half, last - 1), holder - half)
        yield Step(src=holder[is_cut], dst=target[is_cut], chunk=0)
        lower = np.where(holder < middle, holder, target)  # the holder of the lower half; a single rank keeps its own
        upper = (holder + target - lower)[is_cut]
        first, last = np.concatenate([first, middle[is_cut]]), np.concatenate([middle, last[is_cut]])
        holder = np.concatenate([lower, upper])
