"""Exercise: ring all-reduce."""

from __future__ import annotations

from fractions import Fraction

from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Ring all-reduce",
    task="""
Every rank has ``size`` chunks; at the end every rank holds the sum of all ranks in every chunk. Put a reduce-scatter
and an all-gather together: 2 * (size - 1) steps, in which each rank sends one chunk to the next one. No algorithm
sends less.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def all_reduce(size):
    rank = np.arange(size)
    ...
""",
    hints=(
        "The all-gather must begin with the chunk that the rank has completed in the reduce-scatter.",
        "If the reduce-scatter begins with chunk r on rank r, rank r completes chunk (r + 1) % size.",
        "Step k of the first half: chunk (r - k) % size with reduce=True. Step k of the second half: chunk (r + 1"
        " - k) % size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(
        answer,
        "all_reduce",
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: 2 * (size - 1),
        sent=lambda size: Fraction(2 * (size - 1), size),
    )
