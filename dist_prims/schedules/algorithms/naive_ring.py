"""Naive ring all-reduce without chunks, as in beginners' tutorials: the counterexample to :mod:`.ring`.

In every step each rank sends a whole buffer to the next rank. It adds each buffer that it receives to its sum, and
forwards *the buffer*, not the sum:

    size 3       rank 0            rank 1            rank 2
    step 0       gets b2           gets b0           gets b1
    step 1       sum a0+b2         sum a1+b0         sum a2+b1         and the buffers move one rank further
    step 2       (a0+b2)+b1        (a1+b0)+b2        (a2+b1)+b0        three ranks, three orders of addition

Every rank receives every buffer once, so the sums are complete. The algorithm has two faults:

- Each rank sends n-1 buffers; with chunks a ring sends less than 2.
- Each rank adds in an order of its own, so the results may differ in the last bits and the replicas of a model drift
  apart. The proof reports it, and the algorithm must be registered with ``replicas="may differ"``.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []

SUM, BUFFER = 0, 1  # chunk numbers: the result, and the buffer that is forwarded


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices; the last step is local, so it has no message."""
    yield EqualSteps(hosts.size - 1, [shifted(hosts.size, 1, reduce=True)])
    yield EqualSteps(int(hosts.size > 1), [])


@algorithm(
    "all_reduce",
    name="naive_ring",
    chunks=1,
    scratch=1,
    replicas="may differ",
    card=Card(
        "n*min(n-1, 1)",
        "n-1",
        "never; its replicas may differ",
        "the ring of PyTorch's first tutorial on it",
        load=_load,
    ),
)
def all_reduce(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    right = (rank + 1) % size
    add = Step(src=rank, dst=rank, chunk=BUFFER, into=SUM, reduce=True)  # the buffer received in the previous step
    if size > 1:
        yield Step(src=rank, dst=right, chunk=SUM, into=BUFFER)
        for _ in range(size - 2):
            yield Step.concat([Step(src=rank, dst=right, chunk=BUFFER), add])
        yield add
