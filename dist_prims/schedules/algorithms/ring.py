"""Ring: all-reduce, reduce-scatter and all-gather in which every rank sends to the next rank only.

Sending whole buffers round the ring would move n-1 buffers a rank. Instead the data is cut into n chunks, and chunk c
starts at rank c. Reduce-scatter: in step k rank r sends chunk r-k to rank r+1 and adds what it receives (all modulo
n). In n-1 steps a chunk visits every rank, each of which adds its own data once, so it is complete at rank c-1.
All-gather: the complete chunks travel round once more and replace the partial ones.

    size 3       rank 0              rank 1              rank 2
    start        a0    b0    c0      a1    b1    c1      a2    b2    c2
    step 0       a0    b0   [c20]   [a01]  b1    c1      a2   [b12]  c2        0 sends a to 1, 1 sends b, 2 sends c
    step 1       a0   [b120] c20     a01   b12  [c201]  [a012] b12   c2        rank r completes chunk r+1
    ------------------------------------------------------------------- reduce-scatter above, all-gather below
    step 2      [a012] b120  c20     a01  [b120] c201    a012  b12  [c201]
    step 3       a012  b120 [c201]  [a012] b120  c201    a012 [b120] c201

Every link is busy in every step with 1/n of the data, so a rank sends 2(n-1)/n of the data: no algorithm sends less.
The price is 2(n-1) steps, each of which waits for a neighbour: a ring is slow for small data.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []


# The load is for prices on any number of ranks and hosts: the steps below in closed form. See closed_form_load.py.
def all_gather_load(hosts: Hosts, reduce: bool = False) -> list[LoadItem]:
    return [EqualSteps(hosts.size - 1, [shifted(hosts.size, 1, reduce=reduce)])]


reduce_scatter_load = partial(all_gather_load, reduce=True)


def all_reduce_load(hosts: Hosts) -> list[LoadItem]:
    return reduce_scatter_load(hosts) + all_gather_load(hosts)


SOURCE = "Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009"


@algorithm(
    "all_reduce",
    name="ring",
    card=Card("2*(n-1)", "2*(n-1)/n", "large data, few ranks or slow links", SOURCE, load=all_reduce_load),
)
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    following = (rank + 1) % size
    for step in range(size - 1):
        yield Step(src=rank, dst=following, chunk=(rank - step) % size, reduce=True)
    for step in range(size - 1):
        yield Step(src=rank, dst=following, chunk=(following - step) % size)


@algorithm("reduce_scatter", name="ring", card=Card("n-1", "(n-1)/n", "large data", SOURCE, load=reduce_scatter_load))
def reduce_scatter(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    following = (rank + 1) % size
    for step in range(size - 1):  # shifted by one rank against all_reduce, so that rank r completes chunk r
        yield Step(src=rank, dst=following, chunk=(rank - 1 - step) % size, reduce=True)


@algorithm("all_gather", name="ring", card=Card("n-1", "(n-1)/n", "large data", SOURCE, load=all_gather_load))
def all_gather(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    following = (rank + 1) % size
    for step in range(size - 1):
        yield Step(src=rank, dst=following, chunk=(rank - step) % size)
