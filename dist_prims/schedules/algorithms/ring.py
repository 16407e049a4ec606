"""Ring: every rank sends to the next rank only, and every link is busy in every step.

Sending the whole buffer round would move ``n-1`` buffers a rank. The idea: cut it into n chunks and let chunk c start
its journey at rank c. In n-1 steps it passes every rank, each adding its own, and is complete at rank c-1:

    size 3       rank 0              rank 1              rank 2
    start        a0    b0    c0      a1    b1    c1      a2    b2    c2
    step 0       a0    b0   [c20]   [a01]  b1    c1      a2   [b12]  c2        0 sends a to 1, 1 sends b, 2 sends c
    step 1       a0   [b120] c20     a01   b12  [c201]  [a012] b12   c2        rank r completes chunk r+1
    ------------------------------------------------------------------- reduce-scatter above, all-gather below
    step 2      [a012] b120  c20     a01  [b120] c201    a012  b12  [c201]
    step 3       a012  b120 [c201]  [a012] b120  c201    a012 [b120] c201

Each step moves 1/n of the data, so a rank sends 2(n-1)/n of it in all: no algorithm sends less. The price is 2(n-1)
steps, each waiting for a neighbour: a long time to say little.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

SOURCE = "Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009"


@algorithm("all_reduce", name="ring", card=Card("2*(n-1)", "2*(n-1)/n", "large data, few ranks or slow links", SOURCE))
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size, reduce=True)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank + 1 - step) % size)


@algorithm("reduce_scatter", name="ring", card=Card("n-1", "(n-1)/n", "large data", SOURCE))
def reduce_scatter(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(size - 1):  # one rank earlier than in all_reduce, so that rank r completes chunk r
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - 1 - step) % size, reduce=True)


@algorithm("all_gather", name="ring", card=Card("n-1", "(n-1)/n", "large data", SOURCE))
def all_gather(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size)
