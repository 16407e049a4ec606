"""Exercise: an all-reduce for two hosts that beats the flat ring."""

from __future__ import annotations

import numpy as np

from ...schedules import build
from ...schedules.topology import Level, Topology
from ..answer import Answer
from ..exercise import Exercise, WrongAnswerError
from ..schedule_check import proved_schedule

__all__: list[str] = []

CLUSTER = Topology((3, 3), Level(1e-6, 1e-11), Level(20e-6, 1e-9))
NBYTES = 64e6

EXERCISE = Exercise(
    title="All-reduce for 2 hosts with 3 ranks each",
    task="""
Ranks 0 to 2 are on one host, 3 to 5 on another. Within a host a byte is 100 times cheaper than between the hosts,
where all ranks of a host share one link. A flat ring sends 5/3 of the data over that link in each direction. Write an
all-reduce of 64 MB for these 6 ranks that takes at most 0.7 of the time of the flat ring, by the cost model. The data
is cut into 6 chunks.

``yield Step(src=..., dst=..., chunk=...)`` is one step; with ``reduce=True`` the chunks are added at the destination.
""",
    template="""
from dist_prims.schedules import Step


def all_reduce(size):  # size is 6
    ...
""",
    hints=(
        "Every byte that crosses the link should be a sum over a whole host.",
        "First a reduce-scatter within each host, then the hosts exchange sums, then an all-gather within each host.",
        "Let rank i of each host (i = 0, 1, 2) own chunks 2i and 2i+1. The owners with the same i then exchange "
        "their chunks with reduce=True, in one step.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    schedule = proved_schedule(answer, "all_reduce", CLUSTER.size, CLUSTER.size)
    ring = build("all_reduce", "ring", CLUSTER.size).cost(NBYTES, topology=CLUSTER)
    ratio = schedule.cost(NBYTES, topology=CLUSTER) / ring
    if ratio > 0.7:
        from_first = [(step.src < 3) & (step.dst >= 3) for step in schedule.steps]
        sent = sum(int(np.count_nonzero(each)) for each in from_first)
        raise WrongAnswerError(
            f"the result is right, but it takes {ratio:.2f} of the time of the flat ring. Host 0 sends "
            f"{sent} chunks to host 1; 6 are enough",
            schedule,
        )
    return f"proved, and {ratio:.2f} of the time of the flat ring"
