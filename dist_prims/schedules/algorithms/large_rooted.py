"""Broadcast and reduce of large data: every rank sends less than two buffers, and the links stay busy.

The root of a binomial tree sends the whole buffer log2 n times. Two alternatives for a broadcast:

- *Chain*: the ranks form a line from the root. In step t the rank at place i forwards chunk t-i to place i+1. With k
  chunks the last one arrives after n-2+k steps of 1/k of the data: for large k, the time of one buffer over one link.
  The executor of the backend cuts the data into segments, which follow each other in the same way: ``chunks=1``
  leaves the pipeline to the segments, with one message for each of them.
- *Scatter + all-gather* (van de Geijn): the root scatters one chunk to each rank, and a ring all-gathers them. The
  ranks send less than two buffers, whatever the size.

Reduce has both backwards: a chain whose ranks add their data to what they pass on towards the root, and a ring
reduce-scatter, then a gather to the root.

    size 4, 2 chunks      step 0    step 1            step 2            step 3
    broadcast, root 0     a: 0->1   b: 0->1  a: 1->2  b: 1->2  a: 2->3  b: 2->3
    reduce, root 0        a: 3->2   b: 3->2  a: 2->1  b: 2->1  a: 1->0  b: 1->0

With ranks numbered host by host, a chain crosses each link between hosts once in each direction at most.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ..cost_card import Card
from ..load import Hosts
from ..moves import FEW_RANKS, Busiest, Move, Part, Round
from ..registry import algorithm
from ..steps import Step
from . import binomial, ring
from .tree import at_least_one

__all__: list[str] = []

CHUNKS = 8
_MANY_HOSTS = 1024  # a longer chain is not cut into segments, so the order of its steps does not matter


def _chain_load(hosts: Hosts, chunks: int = CHUNKS, reduce: bool = False) -> Iterator[Part]:
    """In each step a window of up to ``chunks`` consecutive ranks sends; a link carries each chunk once.

    A long chain has two kinds of windows: within a host, and across its end.
    """
    size, ranks = hosts.size, hosts.ranks
    if size <= FEW_RANKS:
        yield from (chain_reduce if reduce else chain)(size, chunks=chunks)
    else:
        begin, first = int(hosts.begins[ranks.index(max(ranks))]), max(ranks[0] - chunks, 0)
        window = min(chunks, max(ranks) - 1)
        inside, across = ([[Move(at, at + m, 1)]] for at, m in ((begin, window), (first, chunks)))
        if reduce:
            inside, across = ([[move.backwards(reduce)] for (move,) in groups] for groups in (inside, across))
        crossings = [min(chunks, m) for m in ranks[1:-1]] + [chunks] if len(ranks) > 1 else []
        if len(ranks) > _MANY_HOSTS:
            crossings = [sum(crossings)]
        rest = size - 2 + chunks - sum(crossings)
        for crossing in crossings:
            yield Round(rest // (len(crossings) + 1), inside)
            yield Round(crossing, across)
        yield Round(rest - len(crossings) * (rest // (len(crossings) + 1)), inside)
    yield Busiest(chunks, chunks, chunks * reduce, chunks)


def _scatter_all_gather_load(hosts: Hosts) -> Iterator[Part]:
    yield from binomial.scatter_load(hosts)
    yield from ring.round_load(hosts)


def _reduce_scatter_gather_load(hosts: Hosts) -> Iterator[Part]:
    yield from ring.reduce_scatter_load(hosts)
    yield from binomial.gather_load(hosts)


CHAIN = Card(
    "(n - 2 + k)*min(n-1, 1)",
    "min(n-1, 1)",
    "large data in many chunks or segments",
    "folklore; NCCL",
    {"k": lambda n: CHUNKS},
    _chain_load,
)


@algorithm("broadcast", name="chain", chunks=at_least_one, card=CHAIN)
def chain(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    place = np.arange(size)
    rank = (root + place) % size
    for now in range(size - 2 + chunks if size > 1 else 0):
        first, last = max(0, now - chunks + 1), min(now + 1, size - 1)
        yield Step(src=rank[first:last], dst=rank[first + 1 : last + 1], chunk=now - place[first:last])


@algorithm("reduce", name="chain", chunks=at_least_one, card=replace(CHAIN, load=partial(_chain_load, reduce=True)))
def chain_reduce(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    place = np.arange(size)  # counted from the last rank of the chain
    rank = (root - 1 - place) % size
    for now in range(size - 2 + chunks if size > 1 else 0):
        first, last = max(0, now - chunks + 1), min(now + 1, size - 1)
        src, dst = rank[first:last], rank[first + 1 : last + 1]
        yield Step(src, dst, chunk=now - place[first:last], reduce=True)


@algorithm(
    "broadcast",
    name="scatter_all_gather",
    card=Card(
        "L + n - 1", "2*(n-1)/n", "large data", "Barnett, van de Geijn et al. 1994", load=_scatter_all_gather_load
    ),
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
        _reduce_scatter_gather_load,
    ),
)
def reduce_scatter_gather(size: int, root: int = 0) -> Iterator[Step]:
    yield from ring.reduce_scatter(size)
    yield from binomial.gather(size, root)
