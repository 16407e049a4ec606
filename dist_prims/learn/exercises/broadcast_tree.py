"""Exercise: broadcast along a binomial tree."""

from __future__ import annotations

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="Broadcast in a logarithmic number of steps",
    task="""
The root has a buffer (chunk 0), which all ranks must get. One rank sending to all others one after the other takes
size - 1 steps. Do it in ceil_log2(size) steps, for any size and any root.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step, ceil_log2


def broadcast(size, root):
    for step in range(ceil_log2(size)):
        ...  # yield Step(src=..., dst=..., chunk=0)
""",
    hints=(
        "In every step all ranks that have the data can send it on: their number doubles.",
        "Number the ranks from the root: place p is rank (root + p) % size. Before step k the places 0 to 2**k - "
        "1 have the data.",
        "In step k place p sends to place p + 2**k, for every p < 2**k with p + 2**k < size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(answer, "broadcast", range(1, 18), chunks=lambda size: 1, steps=ceil_log2)
