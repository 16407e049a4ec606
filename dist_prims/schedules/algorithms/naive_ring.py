"""The unchunked ring that tutorials begin with, kept beside the real one: the naive twin.

Every rank sends its whole buffer to the next, which adds it to its sum and passes *the buffer* on:

    size 3       rank 0            rank 1            rank 2
    step 0       gets b2           gets b0           gets b1
    step 1       sum a0+b2         sum a1+b0         sum a2+b1         and the buffers move one rank further
    step 2       (a0+b2)+b1        (a1+b0)+b2        (a2+b1)+b0        three ranks, three orders of addition

Two faults to learn from. It sends n-1 buffers a rank where the chunked ring sends less than 2. And each rank adds in an
order of its own, so that the results may differ in the last bits and replicas of a model drift apart: the proof says
so, and the algorithm has to be registered with ``replicas="may differ"``.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_reduce"]

SUM, PASSING = 0, 1


@algorithm(
    "all_reduce",
    name="naive_ring",
    chunks=1,
    scratch=1,
    replicas="may differ",
    card=Card("n*min(n-1, 1)", "n-1", "never; its replicas may differ", "the ring of PyTorch's first tutorial on it"),
)
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    right = (rank + 1) % size
    add = Step(src=rank, dst=rank, chunk=PASSING, into=SUM, reduce=True)  # what came in the step before
    if size > 1:
        yield Step(src=rank, dst=right, chunk=SUM, into=PASSING)
        for _ in range(size - 2):
            yield Step.concat([Step(src=rank, dst=right, chunk=PASSING), add])
        yield add
