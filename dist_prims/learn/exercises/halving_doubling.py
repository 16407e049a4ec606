"""Exercise: all-reduce by halving and doubling."""

from __future__ import annotations

from fractions import Fraction

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Few steps and few bytes: halving and doubling",
    task="""
Recursive doubling has few steps, but sends the whole buffer in each. A ring sends little, but has many steps. Have
both, for sizes that are powers of two: 2 * log2(size) steps, and no rank sends more than 2 * (size - 1) / size of the
data. The data of each rank is cut into ``size`` chunks.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step, ceil_log2


def all_reduce(size):
    for step in reversed(range(ceil_log2(size))):
        ...  # halves: exchange half of the chunks that the pair still shares, with reduce=True
    for step in range(ceil_log2(size)):
        ...  # doubling: give back what has been completed
""",
    hints=(
        "First half: a reduce-scatter. Two ranks at distance size/2 exchange halves: each keeps the half in which"
        " its own number is.",
        "After all halvings rank r holds the complete chunk r. The second half is the same backwards, without reduce.",
        "Distance d = 1 << step. Rank r sends to r ^ d the chunks c with c // d == (r ^ d) // d; then back: those"
        " with c // d == r // d.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(
        answer,
        "all_reduce",
        (1, 2, 4, 8, 16),
        chunks=lambda size: size,
        steps=lambda size: 2 * ceil_log2(size),
        sent=lambda size: Fraction(2 * (size - 1), size),
    )
