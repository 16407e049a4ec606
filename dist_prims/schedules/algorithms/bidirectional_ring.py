"""Bidirectional ring all-reduce: two rings in opposite directions, each carrying half of the data.

A ring uses each link in one direction only. On full-duplex links a second ring can run in the other direction at the
same time. The data is cut into 2n chunks: chunks 0..n-1 travel clockwise as in :mod:`.ring`, chunks n..2n-1 travel
counter-clockwise. In step k of the reduce-scatter rank r sends chunk r-k to rank r+1 and chunk n + (r+k) to rank r-1
(both modulo n), and adds what it receives; the n-1 steps of the all-gather follow.

Each direction is correct because each one is a ring. Cost: 2(n-1) steps of 1/(2n) of the data in each direction. A
full-duplex ring takes half the time of a single ring. The cost model gives each rank one port, so there it costs the
same bytes as the ring and twice the messages.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size = hosts.size
    for reduce in (True, False):
        both = [shifted(size, distance, reduce=reduce) for distance in (1, -1)]
        yield EqualSteps(size - 1, both if size > 2 else [shifted(size, 1, chunks=2, reduce=reduce)])


@algorithm(
    "all_reduce",
    name="bidirectional_ring",
    chunks=lambda size: 2 * size,
    card=Card(
        "2*(n-1)",
        "2*(n-1)/n",
        "large data on a ring of full-duplex links",
        "NCCL's rings; Patarasu and Yuan 2009",
        load=_load,
    ),
)
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    following, preceding = (rank + 1) % size, (rank - 1) % size
    src, dst = np.concatenate([rank, rank]), np.concatenate([following, preceding])
    for step in range(size - 1):
        clockwise, counter = (rank - step) % size, size + (rank + step) % size
        yield Step(src, dst, chunk=np.concatenate([clockwise, counter]), reduce=True)
    for step in range(size - 1):
        clockwise, counter = (following - step) % size, size + (preceding + step) % size
        yield Step(src, dst, chunk=np.concatenate([clockwise, counter]))
