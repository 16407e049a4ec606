"""Dissemination: a barrier in log2 n steps for any size.

In step k rank r tells the rank 2^k places on of everybody it has heard of. After ceil(log2 n) steps everyone has heard
of everyone; of some twice, which an arrival, unlike a number in a sum, can stand.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__ = ["barrier"]


@algorithm(
    "barrier",
    name="dissemination",
    card=Card("L", "0", "always", "Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988"),
)
def barrier(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        yield Step(src=rank, dst=(rank + (1 << step)) % size, chunk=0, reduce=True)
