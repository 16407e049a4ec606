"""Two rings at once, one each way round: both directions of every link carry half of the data.

The ring uses a link in one direction only. Where links are full duplex, half of the chunks can run the other way
meanwhile, and a step takes half the time. In the model of ``cost``, where a rank has one port, it costs the bytes of
the ring and twice its messages; on a ring of real links it wins.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_reduce"]


@algorithm(
    "all_reduce",
    name="bidirectional_ring",
    chunks=lambda size: 2 * size,
    card=Card(
        "2*(n-1)", "2*(n-1)/n", "large data on a ring of full-duplex links", "NCCL's rings; Patarasu and Yuan 2009"
    ),
)
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(size - 1):
        clockwise = Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size, reduce=True)
        counter = Step(src=rank, dst=(rank - 1) % size, chunk=size + (rank + step) % size, reduce=True)
        yield Step.concat([clockwise, counter])
    for step in range(size - 1):
        clockwise = Step(src=rank, dst=(rank + 1) % size, chunk=(rank + 1 - step) % size)
        counter = Step(src=rank, dst=(rank - 1) % size, chunk=size + (rank - 1 + step) % size)
        yield Step.concat([clockwise, counter])
