"""Pairwise exchange: all-to-all in n - 1 rounds, each rank sending one block and receiving one.

Everything at once makes n - 1 messages pile up at a rank's port. In round i rank r sends to the rank i places on and
receives from the rank i places before: every port is busy in every round, with one block each way.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_to_all"]


@algorithm(
    "all_to_all",
    name="pairwise",
    card=Card("max(n-1, 1)", "(n-1)/n", "large blocks", "Thakur, Rabenseifner and Gropp 2005"),
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
