"""Exercise: the first half of ring all-reduce."""

from __future__ import annotations

from fractions import Fraction

from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Reduce-scatter on a ring",
    task="""
The data of every rank is cut into ``size`` chunks, 0 to size - 1. At the end rank r holds the sum of all ranks in
chunk r. Every rank sends only to the next one, one chunk a step: size - 1 steps.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def reduce_scatter(size):
    rank = np.arange(size)
    for step in range(size - 1):
        ...  # yield Step(src=rank, dst=(rank + 1) % size, chunk=..., reduce=True)
""",
    hints=(
        "Follow one chunk backwards: chunk r must end on rank r, so the last rank but one that adds to it is rank"
        " r - 1.",
        "In each step rank r sends on the chunk to which it has just added.",
        "In the first step rank r sends chunk r - 1, in the next one r - 2, always modulo size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(
        answer,
        "reduce_scatter",
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: size - 1,
        sent=lambda size: Fraction(size - 1, size),
    )
