"""Exercise: the dissemination barrier."""

from __future__ import annotations

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="A barrier in a logarithmic number of steps, for any size",
    task="""
No rank may leave a barrier before every rank has come. Chunk 0 of a rank is what it knows: at first that it has come
itself. At the end every rank must know of all. A transfer with ``reduce=True`` adds all that the sender knows to
what the receiver knows; a rank that is counted twice does no harm here. Take ceil_log2(size) steps, for any size.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step, ceil_log2


def barrier(size):
    rank = np.arange(size)
    for step in range(ceil_log2(size)):
        ...
""",
    hints=(
        "The pairs of recursive doubling need powers of two. Let each rank send to one and receive from another.",
        "If rank r knows of the 2**k ranks up to itself, from which rank should it receive to know of 2**(k+1)?",
        "In step k rank r sends to rank (r + 2**k) % size.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(answer, "barrier", range(1, 18), chunks=lambda size: 1, steps=ceil_log2)
