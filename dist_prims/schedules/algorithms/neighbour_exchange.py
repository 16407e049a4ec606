"""Neighbour exchange: half the steps of a ring, still between neighbours only.

A ring passes one chunk a step in one direction. Here neighbours *exchange*: even ranks turn to the right, then to the
left, and so on, and after the first step each passes on the two chunks that it got last.

    size 6, step 0    0-1 2-3 4-5    each its own chunk: pairs 01, 23, 45 are known to their members
            step 1    1-2 3-4 5-0    each its pair
            step 2    0-1 2-3 4-5    each the pair it got in step 1

An odd rank out joins by way of its neighbour, which takes its chunk along and hands it what comes in.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_gather"]


def _exchange(even: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rank = np.arange(even)
    return rank, (rank + np.where((rank + step) % 2 == 0, 1, -1)) % even


@algorithm(
    "all_gather",
    name="neighbour_exchange",
    card=Card(
        "(n - n%2)/2 + 2*(n%2)*min(n-1, 1)",
        "(n - 1 + (n%2)*max(0, n - max(0, 4-n)))/n",
        "middling data, even sizes, neighbours near by",
        "Chen, Zhang, Zhang et al. 2005 (Open MPI)",
    ),
)
def all_gather(size: int) -> Iterator[Step]:
    even, last = size - size % 2, size - size % 2 - 1
    odd_one_out = size % 2 == 1 and size > 1
    if odd_one_out:
        yield Step(src=even, dst=last, chunk=even)
    newest = np.arange(even) // 2  # the pair of chunks that a rank got last; at first its own
    for step in range(even // 2):
        rank, peer = _exchange(even, step)
        exchange = _pairs(rank, peer, newest, even, odd_one_out) if step else _own(rank, peer, even, odd_one_out)
        told = [[last], [last - 1]][step] if step < 2 else [2 * newest[last], 2 * newest[last] + 1]
        yield Step.concat([exchange, Step(src=last, dst=even, chunk=told)] if odd_one_out else [exchange])
        newest = newest[peer] if step else newest
    if odd_one_out:
        told = [last - 1] if even == 2 else [2 * newest[last], 2 * newest[last] + 1]
        yield Step(src=last, dst=even, chunk=told)


def _own(rank: NDArray[np.int64], peer: NDArray[np.int64], even: int, odd_one_out: bool) -> Step:
    guest = [Step(src=even - 1, dst=peer[even - 1], chunk=even)] if odd_one_out else []
    return Step.concat([Step(rank, peer, rank), *guest])


def _pairs(
    rank: NDArray[np.int64], peer: NDArray[np.int64], newest: NDArray[np.int64], even: int, odd_one_out: bool
) -> Step:
    guest = rank[newest == even // 2 - 1] if odd_one_out else rank[:0]
    return Step.concat([Step(rank, peer, 2 * newest), Step(rank, peer, 2 * newest + 1), Step(guest, peer[guest], even)])
