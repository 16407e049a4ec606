"""Pairwise exchange: all-to-all in n-1 steps, in each of which every rank sends one block and receives one.

If all messages start at once, n-1 messages compete for the port of each rank. Here, in step i, rank r sends its block
to rank r + i and receives one from rank r - i (modulo n). Every port is busy in every step with one block each way,
and i runs over all distances, so every pair is served once.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import FEW_RANKS, EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []

Ints = NDArray[np.int64]


def _steps(size: int, ranks: Ints, senders: Callable[[int], Ints]) -> Iterator[Step]:
    """The steps of ``all_to_all``, with the local copies of ``ranks`` and the messages of ``senders(distance)``."""
    keep = Step(src=ranks, dst=ranks, chunk=ranks, into=size + ranks)
    if size == 1:
        yield keep
    for distance in range(1, size):
        src = senders(distance)
        dst = (src + distance) % size
        move = Step(src=src, dst=dst, chunk=dst, into=size + src)
        yield move if distance > 1 else Step.concat([keep, move])


def _rows_of_rank(size: int, rank: int) -> Iterator[Step]:
    """The rows of ``all_to_all`` that concern one rank, in their order in each step."""
    return _steps(size, np.array([rank]), lambda distance: np.array(sorted((rank, (rank - distance) % size))))


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """Between equal hosts there are three kinds of distances: less than a host, whole hosts, and all others.

    All distances of one of the last two kinds have the same load, so one of them stands for all. Between many unequal
    hosts all ranks send to other hosts at every distance of at least a host, so one distance stands for all.
    """
    size, ranks, number = hosts.size, max(hosts.ranks), len(hosts.ranks)
    near = (*range(1, ranks), *range(max(size - ranks + 1, ranks), size))
    if 1 in (ranks, number):
        rounds = [(size - 1, 1)]
    elif len(set(hosts.ranks)) == 1:
        rounds = [*((1, distance) for distance in near)]
        rounds += [(number - 1, ranks), (max(number - 2, 0) * (ranks - 1), ranks + 1)]
    elif size <= FEW_RANKS:
        rounds = [(1, distance) for distance in range(1, size)]
    else:
        rounds = [*((1, distance) for distance in near), (size - 1 - len(near), ranks + 1)]
    yield from (EqualSteps(times, [shifted(size, distance)]) for times, distance in rounds)


@algorithm(
    "all_to_all",
    name="pairwise",
    card=Card("max(n-1, 1)", "(n-1)/n", "large blocks", "Thakur, Rabenseifner and Gropp 2005", load=_load),
    part=_rows_of_rank,
)
def all_to_all(size: int) -> Iterator[Step]:
    ranks = np.arange(size)
    return _steps(size, ranks, lambda distance: ranks)
