"""Recursive halving and doubling: as few bytes as a ring, in 2 log2 n steps instead of 2(n-1).

Halving (reduce-scatter): in step k each rank exchanges with the rank at distance p/2^(k+1). It sends the half of its
current chunks that the peer keeps, and adds what it receives to the half that it keeps. The distances halve, and so
does the data; after log2 p steps each rank holds one chunk, reduced over all ranks. Doubling (all-gather) runs the
same exchanges backwards. :mod:`._butterfly` has the argument for correctness.

    size 4, step 0    0 <-> 2    1 <-> 3    2 chunks each way: 0 and 1 keep chunks 0-1, 2 and 3 keep chunks 2-3
            step 1    0 <-> 1    2 <-> 3    1 chunk each way: rank r now has chunk r of all ranks
            step 2    0 <-> 1    2 <-> 3    1 chunk back
            step 3    0 <-> 2    1 <-> 3    2 chunks back

If the size is not a power of two, the ranks above the largest power of two p first add their data to a partner, and
receive the result from it at the end: two further steps with the whole buffer, which a ring does not have.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, backwards, exchanged
from ..cost_card import Card, floor_pow2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from . import _butterfly as butterfly

__all__: list[str] = []

SOURCE = "Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005"


def halves(p: int) -> list[int]:
    """p/2, p/4, ..., 1, for a power of two."""
    return [p >> step for step in range(1, p.bit_length())]


def distances(p: int) -> list[NDArray[np.int64]]:
    """The peers of every rank at distance p/2, p/4, ..., 1."""
    return [np.arange(p) ^ distance for distance in halves(p)]


def _all_reduce_load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size, p = hosts.size, floor_pow2(hosts.size)
    far = halves(p)
    yield EqualSteps(int(size > p), [[MessageSet(p, size, -p, chunks=p, reduce=True)]])
    yield from (EqualSteps(1, [exchanged(p, distance, chunks=distance, reduce=True)]) for distance in far)
    yield from (EqualSteps(1, [exchanged(p, distance, chunks=distance)]) for distance in reversed(far))
    yield EqualSteps(int(size > p), [[MessageSet(0, size - p, p, chunks=p)]])


def _all_gather_load(hosts: Hosts) -> Iterator[LoadItem]:
    size, p = hosts.size, floor_pow2(hosts.size)
    surplus = size - p
    yield EqualSteps(int(surplus > 0), [[MessageSet(p, size, -p)]])
    for step in range(p.bit_length() - 1):
        # A group of ``distance`` ranks holds their chunks, and the chunks of the surplus ranks whose partners they are:
        # below ``whole`` a surplus rank for each rank, in the next group for some of its ranks, above it for none.
        distance = 1 << step
        whole = surplus // distance * distance
        end = whole + distance
        sections = ((0, whole, 2 * distance), (whole, end, distance + surplus % distance), (end, p, distance))
        moves = [exchanged(last, distance, chunks, first=first) for first, last, chunks in sections if first < last]
        yield EqualSteps(1, [[move for section in moves for move in section]])
    yield EqualSteps(int(surplus > 0), [[MessageSet(0, surplus, p, chunks=size)]])


@algorithm(
    "all_reduce",
    name="halving_doubling",
    chunks=floor_pow2,
    card=Card(
        "2*l + 2*min(n-p, 1)",
        "2*(p-1)/p + min(n-p, 1)",
        "medium and large data, powers of two",
        SOURCE,
        load=_all_reduce_load,
    ),
)
def all_reduce(size: int) -> Iterator[Step]:
    p = floor_pow2(size)
    yield from butterfly.all_reduce(size, p, distances(p))


def _with_surplus(size: int) -> NDArray[np.bool_]:
    """The chunks of each rank of the butterfly: its own, and the chunk of the surplus rank whose partner it is."""
    p = floor_pow2(size)
    own: NDArray[np.bool_] = np.arange(size) % p == np.arange(p)[:, None]
    return own


@algorithm(
    "reduce_scatter",
    name="halving",
    card=Card(
        "l + 2*min(n-p, 1)",
        "(n - 1 + min(n-p, 1))/n",
        "medium data",
        SOURCE,
        load=lambda hosts: backwards(_all_gather_load(hosts)),
    ),
)
def reduce_scatter(size: int) -> Iterator[Step]:
    p = floor_pow2(size)
    yield from butterfly.fold(size, p, np.arange(size))
    yield from butterfly.reduce_scatter(distances(p), _with_surplus(size))
    if p < size:
        surplus = np.arange(p, size)
        yield Step(src=surplus - p, dst=surplus, chunk=surplus)


def _chunks_of_rank_0(n: int) -> int:
    """The chunks that rank 0, the busiest rank, sends in the all-gather.

    In each step the chunks of its group of 1, 2, 4, ... ranks and their surplus ranks; at the end all chunks to its own
    surplus rank, if it has one.
    """
    surplus = n - floor_pow2(n)
    groups = (1 << step for step in range(n.bit_length() - 1))
    return sum(ranks + min(ranks, surplus) for ranks in groups) + (n if surplus else 0)


@algorithm(
    "all_gather",
    name="doubling",
    card=Card(
        "l + 2*min(n-p, 1)", "g/n", "small data, powers of two", SOURCE, {"g": _chunks_of_rank_0}, _all_gather_load
    ),
)
def all_gather(size: int) -> Iterator[Step]:
    p = floor_pow2(size)
    if p < size:
        surplus = np.arange(p, size)
        yield Step(src=surplus, dst=surplus - p, chunk=surplus)
    yield from butterfly.gather(distances(p), _with_surplus(size))
    yield from butterfly.unfold(size, p, np.arange(size))
