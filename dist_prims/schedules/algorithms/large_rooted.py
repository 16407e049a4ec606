"""Broadcast and reduce of large data: every rank sends less than two buffers, and the links stay busy.

The root of a binomial tree sends the whole buffer log2 n times. Two alternatives for a broadcast:

- *Chain*: the ranks form a line from the root. In step t the rank at place i forwards chunk t-i to place i+1. With k
  chunks the last one arrives after n-2+k steps of 1/k of the data: for large k, the time of one buffer over one link.
  The backend can cut the data of any schedule into segments, which follow each other through the steps in the same
  way. With ``chunks=1`` the pipeline comes from the segments alone, with one message for each segment.
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
from numpy.typing import NDArray

from ..closed_form_load import FEW_RANKS, Busiest, EqualSteps, LoadItem, MessageSet
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from . import binomial, ring
from .tree import at_least_one

__all__: list[str] = []

CHUNKS = 8
_MANY_HOSTS = 1024  # a longer chain is not cut into segments, so the order of its steps does not matter


def _chain_load(hosts: Hosts, chunks: int = CHUNKS, reduce: bool = False) -> Iterator[LoadItem]:
    """In each step a *window* of up to ``chunks`` consecutive ranks sends; a link carries each chunk once.

    A long chain has two kinds of steps: the window is within a host, or crosses the end of a host. In a step of each
    kind the load is the same, so the card has one move for each.
    """
    size, ranks = hosts.size, hosts.ranks
    if size <= FEW_RANKS:
        yield from (chain_reduce if reduce else chain)(size, chunks=chunks)
    else:
        # 1. A window in the largest host, and a window across the end of the first host.
        largest, before_end = int(hosts.begins[ranks.index(max(ranks))]), max(ranks[0] - chunks, 0)
        within = MessageSet(largest, largest + min(chunks, max(ranks) - 1), 1)
        across = MessageSet(before_end, before_end + chunks, 1)
        if reduce:
            within, across = within.backwards(reduce), across.backwards(reduce)
        # 2. The number of steps in which the window crosses the end of each host; the other steps are in between.
        crossings = [min(chunks, number) for number in ranks[1:-1]] + [chunks] if len(ranks) > 1 else []
        if len(ranks) > _MANY_HOSTS:
            crossings = [sum(crossings)]
        others = size - 2 + chunks - sum(crossings)
        between = others // (len(crossings) + 1)
        for crossing in crossings:
            yield EqualSteps(between, [[within]])
            yield EqualSteps(crossing, [[across]])
        yield EqualSteps(others - len(crossings) * between, [[within]])
    yield Busiest(messages=chunks, chunks=chunks, reduced=chunks * reduce, link=chunks)


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
    yield from _along((root + np.arange(size)) % size, chunks, reduce=False)


def _along(rank: NDArray[np.int64], chunks: int, reduce: bool) -> Iterator[Step]:
    """The chunks travel from rank[0] to rank[1], rank[2], ...: in step t the rank at place i sends chunk t-i."""
    size, place = len(rank), np.arange(len(rank))
    for now in range(size - 2 + chunks if size > 1 else 0):
        first, last = max(0, now - chunks + 1), min(now + 1, size - 1)  # the window of places that send
        yield Step(rank[first:last], rank[first + 1 : last + 1], chunk=now - place[first:last], reduce=reduce)


@algorithm("reduce", name="chain", chunks=at_least_one, card=replace(CHAIN, load=partial(_chain_load, reduce=True)))
def chain_reduce(size: int, root: int = 0, chunks: int = CHUNKS) -> Iterator[Step]:
    yield from _along((root - 1 - np.arange(size)) % size, chunks, reduce=True)


@algorithm(
    "broadcast",
    name="scatter_all_gather",
    card=Card(
        "L + n - 1",
        "2*(n-1)/n",
        "large data",
        "Barnett, van de Geijn et al. 1994",
        load=lambda hosts: [*binomial.scatter_load(hosts), *ring.all_gather_load(hosts)],
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
        lambda hosts: [*ring.reduce_scatter_load(hosts), *binomial.gather_load(hosts)],
    ),
)
def reduce_scatter_gather(size: int, root: int = 0) -> Iterator[Step]:
    yield from ring.reduce_scatter(size)
    yield from binomial.gather(size, root)
