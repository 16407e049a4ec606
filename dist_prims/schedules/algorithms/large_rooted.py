"""Broadcast and reduce of large data: every rank sends less than two buffers, and the links stay busy.

The root of a binomial tree sends the whole buffer log2 n times. Two alternatives for a broadcast:

- *Chain*: the ranks form a line from the root. In step t the rank at place i forwards chunk t-i to place i+1. With k
  chunks the last one arrives after n-2+k steps of 1/k of the data: for large k, the time of one buffer over one link.
- *Scatter + all-gather* (van de Geijn): the root scatters one chunk to each rank, and a ring all-gathers them. The
  ranks send less than two buffers, whatever the size.

Reduce runs the second one backwards: a ring reduce-scatter, then a gather to the root. (Rabenseifner's algorithm of
2004 has the same two phases with recursive halving in the first: fewer messages, but only for powers of two.)
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step
from . import binomial, ring
from .tree import at_least_one

__all__: list[str] = []

CHUNKS = 8


@algorithm(
    "broadcast",
    name="chain",
    chunks=at_least_one,
    card=Card(
        "(n - 2 + k)*min(n-1, 1)", "min(n-1, 1)", "large data, few ranks", "folklore; NCCL", {"k": lambda n: CHUNKS}
    ),
)
def chain(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    for now in range(size - 2 + chunks if size > 1 else 0):
        place = np.arange(max(0, now - chunks + 1), min(now + 1, size - 1))
        yield Step(src=(root + place) % size, dst=(root + place + 1) % size, chunk=now - place)


@algorithm(
    "broadcast",
    name="scatter_all_gather",
    card=Card("L + n - 1", "2*(n-1)/n", "large data", "Barnett, van de Geijn et al. 1994"),
)
def scatter_all_gather(size: int, root: int = 0) -> Iterator[Step]:
    yield from binomial.scatter(size, root)
    yield from ring.all_gather(size)


@algorithm(
    "reduce",
    name="reduce_scatter_gather",
    card=Card(
        "n - 1 + L",
        "(n-1 + max(n-q, q//2))/n",
        "large data, few ranks",
        "ring, then binomial tree",
        binomial.HALF,
    ),
)
def reduce_scatter_gather(size: int, root: int = 0) -> Iterator[Step]:
    yield from ring.reduce_scatter(size)
    yield from binomial.gather(size, root)
