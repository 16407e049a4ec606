"""Exercise: all-reduce by recursive doubling."""

from __future__ import annotations

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="All-reduce in log2(size) steps",
    task="""
A ring needs 2 * (size - 1) steps, each with the latency of a message: too many for small data. Do it in log2(size)
steps for sizes that are powers of two. Each rank has one chunk, the whole buffer.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step, ceil_log2


def all_reduce(size):
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        ...  # yield Step(src=rank, dst=..., chunk=0, reduce=True)
""",
    hints=(
        "After step k each rank must hold the sum of 2**(k+1) ranks, so the sum doubles.",
        "Two ranks exchange their sums; both then hold the same one. In the next step they must meet ranks with "
        "other sums.",
        "In step k rank r exchanges with rank r ^ (1 << k).",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(answer, "all_reduce", (1, 2, 4, 8, 16, 32), chunks=lambda size: 1, steps=ceil_log2)
