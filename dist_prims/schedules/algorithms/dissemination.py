"""Dissemination barrier: ceil(log2 n) steps for any number of ranks.

In step k rank r sends to rank r + 2^k (modulo n) the set of ranks of whose arrival it knows. Before step k rank r knows
of the 2^k ranks r, r-1, ..., so after ceil(log2 n) steps every rank knows of all ranks. If n is not a power of two a
rank learns of some arrivals twice, which is harmless for a barrier, though it would be wrong for a sum.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, shifted
from ..cost_card import Card, ceil_log2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    for step in range(ceil_log2(hosts.size)):
        yield EqualSteps(1, [shifted(hosts.size, 1 << step)])


@algorithm(
    "barrier",
    name="dissemination",
    card=Card(
        "L", "0", "always", "Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988", load=_load
    ),
)
def barrier(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        yield Step(src=rank, dst=(rank + (1 << step)) % size, chunk=0, reduce=True)
