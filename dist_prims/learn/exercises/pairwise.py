"""Exercise: all-to-all by pairwise exchange."""

from __future__ import annotations

from ..answer import Answer
from ..exercise import Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []

EXERCISE = Exercise(
    title="All-to-all, one block at a time",
    task="""
Every rank has a block for each rank: block d in chunk d. At the end chunk size + s holds the block that came from
rank s, its own included. Take size - 1 steps (one step for 1 rank), and let each rank send at most one message a
step: otherwise messages compete for its port.

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time. ``into=...`` is the chunk number at the destination. ``Step.concat([one, other])`` joins transfers to one
step.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def all_to_all(size):
    rank = np.arange(size)
    own = Step(src=rank, dst=rank, chunk=rank, into=size + rank)  # a local copy
    ...
""",
    hints=(
        "In step k let every rank send to the rank at distance k.",
        "Rank r sends the block for rank d, which is in its chunk d, and it arrives as the block from rank r.",
        "dst = (rank + k) % size; Step(src=rank, dst=dst, chunk=dst, into=size + rank) for k from 1 on; the first"
        " one with own.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    return check_schedules(
        answer,
        "all_to_all",
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: max(size - 1, 1),
        one_port=True,
    )
