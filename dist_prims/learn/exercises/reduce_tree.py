"""Exercise: reduce along a binomial tree."""

from __future__ import annotations

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Reduce along a tree",
    task="""
Every rank has a buffer (chunk 0). At the end the root holds the sum of all, in ceil_log2(size) steps.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time. ``reduce=True`` adds to the chunk at the destination in place of replacing it.
""",
    template="""
from dist_prims.schedules import Step, ceil_log2


def reduce(size, root):
    for step in range(ceil_log2(size)):
        ...  # yield Step(src=..., dst=..., chunk=0, reduce=True)
""",
    hints=(
        "A reduce is a broadcast backwards: turn every arrow round, and the order of the steps.",
        "A rank that has sent its sum must not be added again: it is done.",
        "Step k: place p + 2**k sends to place p, for every p that is a multiple of 2**(k+1); place p is rank "
        "(root + p) % size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(answer, "reduce", range(1, 18), chunks=lambda size: 1, steps=ceil_log2)
