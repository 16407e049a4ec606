"""Pairwise exchange: all-to-all in n-1 steps, in each of which every rank sends one block and receives one.

If all messages start at once, n-1 messages compete for the port of each rank. Here, in step i, rank r sends its block
to rank r + i and receives one from rank r - i (modulo n). Every port is busy in every step with one block each way,
and i runs over all distances, so every pair is served once.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import FEW_RANKS, EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


def _rows_of_rank(size: int, rank: int) -> Iterator[Step]:
    """The rows of ``all_to_all`` that concern one rank, in their order in each step."""
    keep = Step(src=rank, dst=rank, chunk=rank, into=size + rank)
    if size == 1:
        yield keep
    for distance in range(1, size):
        src = np.array(sorted((rank, (rank - distance) % size)))
        dst = (src + distance) % size
        move = Step(src=src, dst=dst, chunk=dst, into=size + src)
        yield move if distance > 1 else Step.concat([keep, move])


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
    rank = np.arange(size)
    keep = Step(src=rank, dst=rank, chunk=rank, into=size + rank)
    if size == 1:
        yield keep
    for distance in range(1, size):
        dst = (rank + distance) % size
        move = Step(src=rank, dst=dst, chunk=dst, into=size + rank)
        yield move if distance > 1 else Step.concat([keep, move])
