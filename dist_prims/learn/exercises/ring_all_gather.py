"""Exercise: the second half of ring all-reduce."""

from __future__ import annotations

from fractions import Fraction

from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="All-gather on a ring",
    task="""
Rank r starts with chunk r. At the end every rank has all chunks. Every rank sends only to the next one, one chunk a
step: size - 1 steps.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def all_gather(size):
    rank = np.arange(size)
    for step in range(size - 1):
        ...  # yield Step(src=rank, dst=(rank + 1) % size, chunk=...)
""",
    hints=(
        "In the first step a rank can send its own chunk only.",
        "In each further step it sends the chunk that it has just got.",
        "In step k rank r sends chunk (r - k) % size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(
        answer,
        "all_gather",
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: size - 1,
        sent=lambda size: Fraction(size - 1, size),
    )
