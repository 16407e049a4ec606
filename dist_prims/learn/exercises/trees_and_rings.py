"""Exercises whose answers are schedules along trees and rings."""

from __future__ import annotations

from fractions import Fraction

from ...schedules import ceil_log2
from ..answer import Answer
from ..exercise import STEP, Exercise
from ..schedule_check import check_schedules

__all__: list[str] = []


def _check_ring(answer: Answer, collective: str, rounds: int) -> str:
    """``rounds``: how often the chunks travel round the ring; a round has size - 1 steps of one chunk a rank."""
    return check_schedules(
        answer,
        collective,
        range(1, 10),
        chunks=lambda size: size,
        steps=lambda size: rounds * (size - 1),
        sent=lambda size: Fraction(rounds * (size - 1), size),
    )


BROADCAST_TREE = Exercise(
    title="Broadcast in a logarithmic number of steps",
    task=f"""
The root has a buffer (chunk 0), which all ranks must get. One rank sending to all others one after the other takes
size - 1 steps. Do it in ceil_log2(size) steps, for any size and any root.{STEP}
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
    check=lambda answer: check_schedules(answer, "broadcast", range(1, 18), chunks=lambda size: 1, steps=ceil_log2),
)


REDUCE_TREE = Exercise(
    title="Reduce along a tree",
    task=f"""
Every rank has a buffer (chunk 0). At the end the root holds the sum of all, in ceil_log2(size) steps.{STEP}
``reduce=True`` adds to the chunk at the destination in place of replacing it.
""",
    template="""
from dist_prims.schedules import Step, ceil_log2


def reduce(size, root):
    for step in range(ceil_log2(size)):
        ...  # yield Step(src=..., dst=..., chunk=0, reduce=True)
""",
    hints=(
        "A reduce is a broadcast backwards: turn every arrow round, and the order of the steps.",
        "A rank that has sent its sum must not be added again: it is done.",
        "Step k: place p + 2**k sends to place p, for every p that is a multiple of 2**(k+1); place p is rank "
        "(root + p) % size.",
    ),
    check=lambda answer: check_schedules(answer, "reduce", range(1, 18), chunks=lambda size: 1, steps=ceil_log2),
)


RING_REDUCE_SCATTER = Exercise(
    title="Reduce-scatter on a ring",
    task=f"""
The data of every rank is cut into ``size`` chunks, 0 to size - 1. At the end rank r holds the sum of all ranks in
chunk r. Every rank sends only to the next one, one chunk a step: size - 1 steps.{STEP}
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
    check=lambda answer: _check_ring(answer, "reduce_scatter", rounds=1),
)


RING_ALL_GATHER = Exercise(
    title="All-gather on a ring",
    task=f"""
Rank r starts with chunk r. At the end every rank has all chunks. Every rank sends only to the next one, one chunk a
step: size - 1 steps.{STEP}
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
    check=lambda answer: _check_ring(answer, "all_gather", rounds=1),
)


RING_ALL_REDUCE = Exercise(
    title="Ring all-reduce",
    task=f"""
Every rank has ``size`` chunks; at the end every rank holds the sum of all ranks in every chunk. Put a reduce-scatter
and an all-gather together: 2 * (size - 1) steps, in which each rank sends one chunk to the next one. No algorithm
sends less.{STEP}
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
    check=lambda answer: _check_ring(answer, "all_reduce", rounds=2),
)


SAME_BITS = Exercise(
    title="Repair replicas that drift apart",
    task="""
This all-reduce is found in tutorials: whole buffers travel round the ring, and every rank adds what it gets. The sum
is complete on every rank, but each rank adds in another order. Floats are rounded after every addition, so the
results differ in the last bits, and the replicas of a model drift apart. Change it so that all ranks have the same
bits.

Chunk 0 is the buffer, chunk 1 is scratch memory. Any correct schedule is accepted, of any length.
""",
    template="""
import numpy as np

from dist_prims.schedules import Step


def all_reduce(size):
    rank = np.arange(size)
    following = (rank + 1) % size
    if size > 1:
        yield Step(src=rank, dst=following, chunk=0, into=1)
    for _ in range(size - 2):
        add = Step(src=rank, dst=rank, chunk=1, into=0, reduce=True)
        yield Step.concat([Step(src=rank, dst=following, chunk=1), add])
    if size > 1:
        yield Step(src=rank, dst=rank, chunk=1, into=0, reduce=True)
""",
    hints=(
        "If one rank alone makes the sum, there is one order.",
        "A reduce to one rank, then a broadcast from it.",
        "For r in 1 to size - 1: rank r sends chunk 0 to rank 0 with reduce=True. Then rank 0 sends chunk 0 to "
        "every other rank.",
    ),
    check=lambda answer: check_schedules(answer, "all_reduce", range(1, 8), chunks=lambda size: 1, scratch=1),
)
