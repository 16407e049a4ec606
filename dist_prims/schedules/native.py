"""Conversion of a schedule to the lists of numbers that the C++ executor takes.

>>> from dist_prims.schedules import build
>>> ring = build("all_reduce", "ring", 3)
>>> *_, chunks, scratch, steps, ranks = to_native(ring, rank=0, low=0, high=1 << 20, name="ring")
>>> chunks, scratch, len(steps), ranks
(3, 0, 4, 3)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Message, compile_program
from .schedule import Schedule

__all__: list[str] = []

FOLLOWED = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter")  # by the C++ executor
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
    """The program of ``rank`` in the form of the C++ executor, for data of ``low`` to ``high`` bytes.

    ``rank_at``: the group's rank for each rank of the schedule; by default they are the same.
    """
    ranks = tuple(range(schedule.size)) if rank_at is None else tuple(rank_at)
    name = name if segments == 1 else f"{name} x{segments}"
    scratch = schedule.contract.total - schedule.chunks
    return low, high, name, segments, schedule.chunks, scratch, _steps(schedule, rank, ranks), schedule.size


@functools.lru_cache(maxsize=32)
def _steps(schedule: Schedule, rank: int, ranks: tuple[int, ...]) -> list[Any]:
    """The part of ``rank`` in each step, which is the same for all sizes of the data."""
    program = compile_program(schedule, ranks.index(rank))
    steps: list[Any] = [([], [], [])] * len(schedule.steps)
    place = _places(schedule, ranks)

    def messages(given: Sequence[Message]) -> list[Any]:
        return [(ranks[each.peer], place[list(each.chunks)], place[list(each.pieces)]) for each in given]

    for action in program.actions:
        writes = [
            (
                place[w.into],
                place[w.piece],
                w.copy,
                [(-1, place[s.index]) if s.peer is None else (ranks[s.peer], s.index) for s in w.sources],
                w.terms,
            )
            for w in action.writes
        ]
        steps[action.step] = (messages(action.sends), messages(action.receives), writes)
    return steps


def _places(schedule: Schedule, ranks: Sequence[int]) -> NDArray[np.int64]:
    """The executor's number for each chunk: its blocks are ordered by the ranks of the group, not of the schedule."""
    place = np.arange(schedule.contract.total)
    if schedule.collective in ("all_gather", "reduce_scatter"):
        block = schedule.chunks // schedule.size
        data = place[: schedule.chunks]
        place[: schedule.chunks] = np.asarray(ranks)[data // block] * block + data % block
    return place
