"""Conversion of a schedule to the lists of numbers that the C++ executor takes.

>>> from dist_prims.schedules import build
>>> ring = build("all_reduce", "ring", 3)
>>> *_, chunks, scratch, steps, ranks = to_native(ring, rank=0, low=0, high=1 << 20, name="ring")
>>> chunks, scratch, len(steps), ranks
(3, 0, 4, 3)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Message, compile_program
from .steps import ScheduleData
from .trust import name_to_compare

__all__: list[str] = []

_IN_BLOCKS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")  # one for each rank
# The collectives that the C++ executor runs by an algorithm that a call names.
FOLLOWED = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "all_to_all")
# low, high, name, segments, chunks, scratch, steps, ranks
NativeForm = tuple[int, int, str, int, int, int, list[Any], int]


def to_native(
    schedule: ScheduleData,
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
    name = name_to_compare(schedule, name if segments == 1 else f"{name} x{segments}")
    chunks = _data_chunks(schedule)
    scratch = schedule.contract.total - chunks
    return low, high, name, segments, chunks, scratch, _steps(schedule, rank, ranks), schedule.size


def _data_chunks(schedule: ScheduleData) -> int:
    """The number of chunks that are not scratch. An all_to_all has its blocks twice: first sent, then received ones."""
    return schedule.chunks * (2 if schedule.collective == "all_to_all" else 1)


@functools.lru_cache(maxsize=32)
def _steps(schedule: ScheduleData, rank: int, ranks: tuple[int, ...]) -> list[Any]:
    """The part of ``rank`` in each step, which is the same for all sizes of the data."""
    program = compile_program(schedule, ranks.index(rank))
    steps: list[Any] = [([], [], [])] * program.steps
    place, place_of_piece = places(schedule, ranks), _places_of_pieces(schedule, ranks, ranks.index(rank))

    def messages(given: Sequence[Message], direction: int) -> list[Any]:
        """The messages in the order of the distance of the peer, so that no rank is the first that all send to."""
        found = [(ranks[each.peer], place[list(each.chunks)], place_of_piece(each.pieces)) for each in given]
        return sorted(found, key=lambda message: direction * (message[0] - rank) % schedule.size)

    for action in program.actions:
        writes = [
            (
                place[w.into],
                place_of_piece((w.piece,))[0],
                w.copy,
                [(-1, place[s.index]) if s.peer is None else (ranks[s.peer], s.index) for s in w.sources],
                w.terms,
            )
            for w in action.writes
        ]
        steps[action.step] = (messages(action.sends, 1), messages(action.receives, -1), writes)
    return steps


def places(schedule: ScheduleData, ranks: Sequence[int]) -> NDArray[np.int64]:
    """The executor's number for each chunk: its blocks are ordered by the ranks of the group, not of the schedule."""
    place = np.arange(schedule.contract.total)
    if schedule.collective in _IN_BLOCKS:
        length = schedule.chunks // schedule.size
        data = place[: _data_chunks(schedule)]
        side, chunk = np.divmod(data, schedule.chunks)
        place[: len(data)] = side * schedule.chunks + np.asarray(ranks)[chunk // length] * length + chunk % length
    return place


def _places_of_pieces(
    schedule: ScheduleData, ranks: Sequence[int], me: int
) -> Callable[[Sequence[int]], NDArray[np.int64]]:
    """The chunk of rank ``me`` that is as long as each of the given pieces.

    In an all_to_all that is the chunk of the same part of the block that this rank sends or receives. A block that it
    forwards is as long as every other, so the chunk of any block serves.
    """
    place = places(schedule, ranks)
    if schedule.collective != "all_to_all":
        return lambda pieces: place[list(pieces)]
    length = schedule.chunks // schedule.size

    def chunks_of(pieces: Sequence[int]) -> NDArray[np.int64]:
        pair, part = np.divmod(np.asarray(pieces), length)
        src, dst = np.divmod(pair, schedule.size)
        chunks: NDArray[np.int64] = np.where(dst == me, schedule.chunks + src * length, dst * length) + part
        return place[chunks]

    return chunks_of
