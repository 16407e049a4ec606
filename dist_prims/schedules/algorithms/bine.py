"""Bine trees (binomial negabinary): all-gather and reduce-scatter between peers that are near each other.

A butterfly exchanges with ranks 1, 2, 4, ... away. Bine counts distances in base -2, as Swing does: 1, -1, 3, -5, 11,
... to the left and to the right in turn. The peers of a step are about two thirds as far apart as in a butterfly, so
fewer messages leave a host. That matters most if the hosts have different numbers of ranks, for which the hierarchical
all-gather and reduce-scatter do not exist:

    all-gather, size 8    step 0: 0-3 2-5 4-7 6-1    step 1: 0-7 2-1 4-3 6-5    step 2: 0-1 2-3 4-5 6-7
                          1 chunk each               2 chunks each              4 chunks each, to a neighbour

All-gather exchanges with the furthest peer first, while a rank has one chunk only. Reduce-scatter runs the same steps
backwards and adds. :mod:`.swing` has the peers, :mod:`._butterfly` the exchanges; the all-reduce of the paper is Swing.

An odd size has one surplus rank: rank 0 sends the chunk of that rank with its own, and all chunks to it at the end.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, backwards
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from . import _butterfly as butterfly
from .swing import EVEN, even, peers

__all__: list[str] = []

SOURCE = "De Sensi et al., Bine trees, SC 2025"


def _sent_for_surplus(n: int) -> int:
    """The chunks that rank 0 sends because of the surplus rank of an odd size, which adds to what the card counts.

    Rank 0 sends the chunk of the surplus rank to each peer that does not have it yet, and n - 1 chunks to that rank.
    """
    if n == even(n):
        return 0
    has_chunk, receivers = np.arange(even(n)) == 0, 0
    for peer in reversed(peers(even(n))):
        receivers += not has_chunk[peer[0]]
        has_chunk = has_chunk | has_chunk[peer]
    return n - 1 + receivers


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices. ``size - p`` is 1 or 0: whether the steps of a surplus rank exist."""
    size, p = hosts.size, even(hosts.size)
    yield EqualSteps(size - p, [[MessageSet(p, size, -p)]])
    yield from butterfly.swing_gather(p, size - p)
    yield EqualSteps(size - p, [[MessageSet(0, 1, p, chunks=p)]])


@algorithm(
    "all_gather",
    name="bine",
    card=Card(
        "E + 2*(n-e)",
        "(e-1 + s)/n",
        "uneven hosts, small and medium data",
        SOURCE,
        {**EVEN, "s": _sent_for_surplus},
        _load,
    ),
)
def all_gather(size: int) -> Iterator[Step]:
    p = even(size)
    own = np.eye(p, size, dtype=bool)
    if p < size:
        yield Step(src=p, dst=0, chunk=p)
        own[0, p] = True
    yield from butterfly.gather(peers(p), own)
    if p < size:
        yield Step(src=0, dst=p, chunk=np.arange(p))


@algorithm(
    "reduce_scatter",
    name="bine",
    card=Card(
        "E + 2*(n-e)",
        "(n-1)/n",
        "uneven hosts, small and medium data",
        SOURCE,
        EVEN,
        lambda hosts: backwards(_load(hosts)),
    ),
)
def reduce_scatter(size: int) -> Iterator[Step]:
    for step in reversed(list(all_gather(size))):
        yield step.backwards()
