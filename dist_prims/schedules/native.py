"""A schedule in numbers, as the executor in C++ takes it.

>>> from dist_prims.schedules import build
>>> ring = build("all_reduce", "ring", 3)
>>> *_, chunks, scratch, steps, ranks = to_native(ring, rank=0, low=0, high=1 << 20, name="ring")
>>> chunks, scratch, len(steps), ranks
(3, 0, 4, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Message, compile_program
from .schedule import Schedule

__all__ = ["FOLLOWED", "NativeForm", "to_native"]

FOLLOWED = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter")  # the collectives it executes
# low, high, name, segments, chunks, scratch, steps, ranks
NativeForm = tuple[int, int, str, int, int, int, list[Any], int]


def to_native(
    schedule: Schedule,
    rank: int,
    low: int,
    high: int,
    name: str,
    segments: int = 1,
    rank_at: Sequence[int] | None = None,
) -> NativeForm:
    """A schedule in numbers, as the executor in C++ takes it; ``rank_at``: the rank of each seat."""
    seats = range(schedule.size) if rank_at is None else rank_at
    program = compile_program(schedule, seats.index(rank))
    steps: list[Any] = [([], [], [])] * len(schedule.steps)
    place = _places(schedule, seats)

    def messages(given: Sequence[Message]) -> list[Any]:
        return [(seats[each.peer], place[list(each.chunks)], place[list(each.pieces)]) for each in given]

    for action in program.actions:
        writes = [
            (
                place[w.into],
                place[w.piece],
                w.copy,
                [(-1, place[s.index]) if s.peer is None else (seats[s.peer], s.index) for s in w.sources],
                w.terms,
            )
            for w in action.writes
        ]
        steps[action.step] = (messages(action.sends), messages(action.receives), writes)
    name = name if segments == 1 else f"{name} x{segments}"
    scratch = schedule.contract.total - schedule.chunks
    return low, high, name, segments, schedule.chunks, scratch, steps, schedule.size


def _places(schedule: Schedule, seats: Sequence[int]) -> NDArray[np.int64]:
    """The chunk numbers of the executor: blocks lie in the order of ranks, and are those of seats in the schedule."""
    place = np.arange(schedule.contract.total)
    if schedule.collective in ("all_gather", "reduce_scatter"):
        block = schedule.chunks // schedule.size
        data = place[: schedule.chunks]
        place[: schedule.chunks] = np.asarray(seats)[data // block] * block + data % block
    return place
