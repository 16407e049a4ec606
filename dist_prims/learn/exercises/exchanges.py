"""Exercises whose answers are schedules in which pairs of ranks exchange data, and one for two hosts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ...schedules import build, ceil_log2
from ...schedules.topology import Level, Topology
from ..answer import Answer
from ..exercise import STEP, Exercise, WrongAnswerError
from ..schedule_check import check_schedules, proved_schedule

__all__: list[str] = []

RECURSIVE_DOUBLING = Exercise(
    title="All-reduce in log2(size) steps",
    task=f"""
A ring needs 2 * (size - 1) steps, each with the latency of a message: too many for small data. Do it in log2(size)
steps for sizes that are powers of two. Each rank has one chunk, the whole buffer.{STEP}
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
    check=lambda answer: check_schedules(
        answer, "all_reduce", (1, 2, 4, 8, 16, 32), chunks=lambda size: 1, steps=ceil_log2
    ),
)


HALVING_DOUBLING = Exercise(
    title="Few steps and few bytes: halving and doubling",
    task=f"""
Recursive doubling has few steps, but sends the whole buffer in each. A ring sends little, but has many steps. Have
both, for sizes that are powers of two: 2 * log2(size) steps, and no rank sends more than 2 * (size - 1) / size of the
data. The data of each rank is cut into ``size`` chunks.{STEP}
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
    check=lambda answer: check_schedules(
        answer,
        "all_reduce",
        (1, 2, 4, 8, 16),
        chunks=lambda size: size,
        steps=lambda size: 2 * ceil_log2(size),
        sent=lambda size: Fraction(2 * (size - 1), size),
    ),
)


PAIRWISE = Exercise(
    title="All-to-all, one block at a time",
    task=f"""
Every rank has a block for each rank: block d in chunk d. At the end chunk size + s holds the block that came from
rank s, its own included. Take size - 1 steps (one step for 1 rank), and let each rank send at most one message a
step: otherwise messages compete for its port.{STEP}
``into=...`` is the chunk number at the destination. ``Step.concat([one, other])`` joins transfers to one step.
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
    check=lambda answer: check_schedules(
        answer,
        "all_to_all",
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: max(size - 1, 1),
        one_port=True,
    ),
)


DISSEMINATION = Exercise(
    title="A barrier in a logarithmic number of steps, for any size",
    task=f"""
No rank may leave a barrier before every rank has come. Chunk 0 of a rank is what it knows: at first that it has come
itself. At the end every rank must know of all. A transfer with ``reduce=True`` adds all that the sender knows to
what the receiver knows; a rank that is counted twice does no harm here. Take ceil_log2(size) steps, for any size.{STEP}
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
    check=lambda answer: check_schedules(answer, "barrier", range(1, 18), chunks=lambda size: 1, steps=ceil_log2),
)


CLUSTER = Topology((3, 3), Level(1e-6, 1e-11), Level(20e-6, 1e-9))
NBYTES = 64e6

TWO_HOSTS = Exercise(
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
    check=lambda answer: _check_two_hosts(answer),
)


def _check_two_hosts(answer: Answer) -> str:
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
