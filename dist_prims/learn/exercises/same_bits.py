"""Exercise: an all-reduce whose ranks end with the same bits."""

from __future__ import annotations

from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Repair replicas that drift apart",
    task="""
This all-reduce is found in tutorials: whole buffers travel round the ring, and every rank adds what it gets. The sum
is complete on every rank, but each rank adds in another order. Floats are rounded after every addition, so the
results differ in the last bits, and the replicas of a model drift apart. Change it so that all ranks have the same
bits.

Chunk 0 is the buffer, chunk 1 is scratch memory. Any correct schedule is accepted, of any length.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def all_reduce(size):
    rank = np.arange(size)
    following = (rank + 1) % size
    if size > 1:
        yield Step(src=rank, dst=following, chunk=0, into=1)
    for _ in range(size - 2):
        add = Step(src=rank, dst=rank, chunk=1, into=0, reduce=True)
        yield Step.concat([Step(src=rank, dst=following, chunk=1), add])
    if size > 1:
        yield Step(src=rank, dst=rank, chunk=1, into=0, reduce=True)
""",
    hints=(
        "If one rank alone makes the sum, there is one order.",
        "A reduce to one rank, then a broadcast from it.",
        "For r in 1 to size - 1: rank r sends chunk 0 to rank 0 with reduce=True. Then rank 0 sends chunk 0 to "
        "every other rank.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(answer, "all_reduce", range(1, 8), chunks=lambda size: 1, scratch=1)
