"""Symbolic execution of a schedule: its steps run on numbers of sums instead of data.

Each chunk of each rank holds (piece, sum): the piece of the data, and the number of a sum, which stands for the ranks
whose contributions were added and their order (:mod:`.sum_numbers`). A step that is wrong whatever follows it raises
ScheduleError here, with its number, ranks and chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .schedule_error import Mark, ScheduleError
from .steps import ScheduleData, Step
from .sum_numbers import Sums, names_of, ranks_of

__all__: list[str] = []

Ints = NDArray[np.int64]
NOTHING = -1


@dataclass
class State:
    """The content of every chunk of every rank: arrays of shape (size, chunk numbers)."""

    piece: Ints
    sum: Ints
    sums: Sums


def execute(schedule: ScheduleData) -> State:
    """Run the steps and return the last state; ScheduleError for a step that cannot be right."""
    ((_, _, last),) = deque(symbolic_states(schedule), maxlen=1)
    return last


def symbolic_states(schedule: ScheduleData) -> Iterator[tuple[int, Step, State]]:
    """(number, step, state after the step), beginning with -1 and an empty step; the state is updated in place."""
    shape = (schedule.size, schedule.contract.total)
    state = State(np.full(shape, NOTHING), np.full(shape, NOTHING), Sums(schedule.size))
    for rank in range(schedule.size):
        start = schedule.contract.start(rank)
        state.piece[rank, start.chunk] = start.piece
        state.sum[rank, start.chunk] = rank
    yield -1, Step.concat([]), state
    for number, step in enumerate(schedule.steps):
        _check_range(schedule, step, number)
        _run(state, step, number, schedule.contract.counts_once)
        yield number, step, state


def _check_range(schedule: ScheduleData, step: Step, number: int) -> None:
    limits = {"src": schedule.size, "dst": schedule.size, "chunk": schedule.contract.total}
    for name, limit in {**limits, "into": schedule.contract.total}.items():
        column = getattr(step, name)
        wrong = np.flatnonzero((column < 0) | (column >= limit))
        if wrong.size:
            at = int(wrong[0])
            kind = "rank" if name in ("src", "dst") else "chunk"
            raise ScheduleError(
                f"step {number}, row {at}: {name}={column[at]} is out of range; {kind}s are 0..{limit - 1}", number
            )


def _run(state: State, step: Step, number: int, counts_once: bool) -> None:
    """Run one step: read all sources, then write; the rows that write one chunk apply in row order."""
    piece, value = state.piece[step.src, step.chunk], state.sum[step.src, step.chunk]
    _refuse(value == NOTHING, step, number, "reads chunk {chunk} of rank {src}, which holds nothing yet")
    target = step.dst * state.sum.shape[1] + step.into  # the place of the written chunk in the flattened state
    by_target = np.argsort(target, kind="stable")
    position = np.empty(len(step), np.int64)  # 0 for the first row that writes a chunk, 1 for the second, ...
    position[by_target] = place_in_run(target[by_target])
    late_copies = ~step.reduce & (position > 0)
    _refuse(late_copies, step, number, "copies into chunk {into} of rank {dst}, which an earlier row also writes")
    copies = np.flatnonzero(~step.reduce)
    state.piece.flat[target[copies]] = piece[copies]
    state.sum.flat[target[copies]] = value[copies]
    # The first addition to a chunk has position 0, or 1 after a copy. Later ones continue its sum without rounding.
    is_copied = np.isin(target, target[copies])
    for now in range(int(position.max(initial=-1)) + 1):
        adds = np.flatnonzero(step.reduce & (position == now))
        held, added = state.sum.flat[target[adds]], value[adds]
        _check_addition(state, step.take(adds), number, target[adds], piece[adds], added, counts_once)
        state.sum.flat[target[adds]] = state.sums.add(held, added, continues=now > is_copied[adds])


def place_in_run(keys: Ints) -> Ints:
    """For sorted keys, the number of equal keys before each: [4, 4, 7] gives [0, 1, 0]."""
    index = np.arange(len(keys))
    is_start = np.ones(len(keys), np.bool_)
    is_start[1:] = keys[1:] != keys[:-1]
    return index - np.maximum.accumulate(np.where(is_start, index, 0))


def _refuse(wrong: NDArray[np.bool_], step: Step, number: int, what: str, doubled: int = 0) -> None:
    """Raise ScheduleError for the first row of a step that is ``wrong``; ``doubled``: ranks added twice, as bits."""
    if wrong.any():
        at = int(np.argmax(wrong))
        names = {name: int(getattr(step, name)[at]) for name in ("src", "dst", "chunk", "into")}
        transfer = "rank {src} -> rank {dst}" if names["src"] != names["dst"] else "rank {src}, local"
        mark = Mark(number, names["dst"], names["into"], extra=ranks_of(doubled))
        raise ScheduleError(f"step {number}, {transfer}: the transfer {what}".format(**names), number, [mark])


def _check_addition(
    state: State, step: Step, number: int, target: Ints, piece: Ints, added: Ints, counts_once: bool
) -> None:
    held = state.sum.flat[target]
    _refuse(held == NOTHING, step, number, "adds to chunk {into} of rank {dst}, which holds nothing yet")
    other = state.piece.flat[target]
    _refuse(other != piece, step, number, "adds to chunk {into} of rank {dst}, which holds another piece of the data")
    if counts_once:
        ranks = state.sums.ranks
        doubled = [ranks[a] & ranks[b] for a, b in zip(held.tolist(), added.tolist(), strict=True)]
        first_doubled = next((both for both in doubled if both), 0)
        what = f"adds {names_of(first_doubled)} to chunk {{into}} of rank {{dst}}, which already contains it"
        _refuse(np.array([both != 0 for both in doubled], np.bool_), step, number, what, first_doubled)
