"""Proof by symbolic execution that every rank ends with exactly the result that the contract demands.

One pass over the steps (:mod:`.symbolic`) finds every error. The exception is a counterexample: step, rank, chunk, the
ranks whose contributions are missing or counted twice, and the step after which no repair was possible
(:mod:`.repair`).

A test on random data is weaker. It misses a race that does not occur in the test, and two ranks whose results differ
only in the last bit because they added the same numbers in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .order import Order
from .repair import Shortfall, diagnose
from .schedule_error import Mark, ScheduleError
from .steps import ScheduleData
from .sum_numbers import names_of
from .symbolic import NOTHING, State, execute

__all__: list[str] = []


def verify(schedule: ScheduleData) -> None:
    """Raise ScheduleError unless every rank ends with exactly the result that the contract demands."""
    state = execute(schedule)
    shortfalls = [found for rank in range(schedule.size) for found in _shortfalls(schedule, state, rank)]
    if shortfalls:
        raise diagnose(schedule, shortfalls)
    if schedule.contract.same_bits:
        _check_same_bits(schedule, state)


def error_of(schedule: ScheduleData) -> ScheduleError | None:
    """The error that :func:`verify` raises; None for a right schedule."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return error
    return None


def _shortfalls(schedule: ScheduleData, state: State, rank: int) -> Iterator[Shortfall]:
    """The output chunks of a rank that do not hold the right piece of exactly the right ranks."""
    end = schedule.contract.end(rank)
    number, piece = state.sum[rank, end.chunk], state.piece[rank, end.chunk]
    # 1. Chunks that hold nothing, or another piece than the contract demands.
    for at in np.flatnonzero((number == NOTHING) | (piece != end.piece)).tolist():
        has = "nothing" if number[at] == NOTHING else f"piece {piece[at]}"
        what = f"at the end rank {rank} must hold piece {end.piece[at]} in chunk {end.chunk[at]}; it holds {has}"
        yield Shortfall(rank, int(end.chunk[at]), int(end.piece[at]), _bits(end.first[at], end.last[at]), 0, what)
    # 2. Chunks with the right piece, whose sum misses a rank or has one too many. Chunks with the same sum and the same
    #    demanded ranks are of one kind, and are compared once.
    right_piece = np.flatnonzero((number != NOTHING) & (piece == end.piece))
    kinds, kind = np.unique(np.stack([number, end.first, end.last])[:, right_piece], axis=1, return_inverse=True)
    for which, (total, first, last) in enumerate(kinds.T.tolist()):
        demanded, held = _bits(first, last), state.sums.ranks[total]
        missing, extra = demanded & ~held, held & ~demanded
        if not missing and not extra:
            continue
        lost = f"{names_of(missing)} is missing" if missing else f"{names_of(extra)} does not belong there"
        for at in right_piece[np.ravel(kind) == which].tolist():
            chunk = int(end.chunk[at])
            what = f"at the end rank {rank}, chunk {chunk}: {lost}"
            yield Shortfall(rank, chunk, int(end.piece[at]), demanded, held, what)


def _bits(first: int, last: int) -> int:
    """The set of ranks first..last-1, as bits."""
    return (1 << int(last)) - (1 << int(first))


def _check_same_bits(schedule: ScheduleData, state: State) -> None:
    """Check that ranks which end with the same sum added it in the same order; otherwise replicas drift apart."""
    ends = [schedule.contract.end(rank) for rank in range(schedule.size)]
    demanded = np.concatenate([np.stack([end.piece, end.first, end.last]) for end in ends], axis=1)
    chunk = np.concatenate([end.chunk for end in ends])
    number = np.concatenate([state.sum[rank, end.chunk] for rank, end in enumerate(ends)])
    rank = np.repeat(np.arange(schedule.size), [len(end.chunk) for end in ends])
    order = np.lexsort(demanded)  # outputs of which the contract demands the same become neighbours
    demanded, number, rank, chunk = demanded[:, order], number[order], rank[order], chunk[order]
    differs = np.flatnonzero((demanded[:, 1:] == demanded[:, :-1]).all(0) & (number[1:] != number[:-1]))
    if differs.size:
        one, two = int(differs[0]), int(differs[0]) + 1
        raise ScheduleError(
            f"piece {demanded[0, one]} is {Order(state.sums, int(number[one]))} on rank {rank[one]} but "
            f"{Order(state.sums, int(number[two]))} on rank {rank[two]}: the same sum in another order, so the last "
            'bits may differ. Add in one order everywhere, or register the algorithm with replicas="may differ"',
            len(schedule.steps) - 1,
            [Mark(len(schedule.steps) - 1, int(rank[at]), int(chunk[at])) for at in (one, two)],
        )
