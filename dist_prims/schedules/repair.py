"""Diagnosis of a wrong schedule: the first step after which no further step could make its result right.

A wrong result shows at the end, but its cause is earlier: some step replaced the last copy of a contribution, or added
to it a contribution that does not belong there. A sum cannot be taken apart again. So a demanded sum can still be made
exactly when disjoint sums that some ranks hold add up to it:

    demanded: r0+r1+r2     held somewhere: r0+r1, r2          one more addition makes it
    demanded: r0+r1+r2     held somewhere: r0+r1, r1+r2       nothing makes it: r1 would count twice

A sum that has become impossible stays impossible, so the first such step is well defined.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .schedule_error import Mark, ScheduleError
from .steps import ScheduleData, Step
from .sum_numbers import names_of, ranks_of
from .symbolic import NOTHING, State, symbolic_states

__all__: list[str] = []

_MOST_CHOICES = 10_000  # in the search for disjoint sums; real schedules need a few


@dataclass(frozen=True)
class Shortfall:
    """An output chunk that does not hold the demanded sum.

    ``demanded``: the ranks of the demanded sum, as bits; ``held``: the ranks of the piece's sum in the chunk, 0 if it
    holds nothing or another piece.
    """

    rank: int
    chunk: int
    piece: int
    demanded: int
    held: int
    what: str

    def mark(self, step: int) -> Mark:
        """The chunk as it is after the last step."""
        missing, extra = self.demanded & ~self.held, self.held & ~self.demanded
        return Mark(step, self.rank, self.chunk, ranks_of(missing), ranks_of(extra))


def diagnose(schedule: ScheduleData, shortfalls: Sequence[Shortfall]) -> ScheduleError:
    """The error for the shortfall that became irreparable first, with the step that caused it."""
    targets = {(shortfall.piece, shortfall.demanded): shortfall for shortfall in reversed(shortfalls)}  # first of each
    before: State | None = None
    for number, step, state in symbolic_states(schedule):
        if before is not None:
            overwritten = set(before.piece[step.dst, step.into].tolist())
            for (piece, demanded), target in targets.items():
                if piece in overwritten and not _can_be_made(state, piece, demanded, schedule.contract.counts_once):
                    cause, cause_marks = _cause(before, state, step, number, piece, demanded)
                    marks = [*cause_marks, *(shortfall.mark(len(schedule.steps) - 1) for shortfall in shortfalls)]
                    return ScheduleError(f"{target.what}. {cause}", number, marks)
        before = State(state.piece.copy(), state.sum.copy(), state.sums)
    first, last = shortfalls[0], len(schedule.steps) - 1
    return ScheduleError(
        f"{first.what}. The ranks still hold all parts of it after the last step: a transfer to rank {first.rank} "
        "is missing",
        last if last >= 0 else None,
        [shortfall.mark(last) for shortfall in shortfalls],
    )


def _sums_of(state: State, piece: int) -> NDArray[np.int64]:
    """The numbers of the distinct sums of a piece on all ranks."""
    return np.unique(state.sum[(state.piece == piece) & (state.sum != NOTHING)])


def _can_be_made(state: State, piece: int, demanded: int, counts_once: bool) -> bool:
    held = (state.sums.ranks[number] for number in _sums_of(state, piece).tolist())
    useful = sorted({ranks for ranks in held if ranks & ~demanded == 0}, key=int.bit_count, reverse=True)
    if counts_once:
        return _is_disjoint_union(useful, demanded)
    return demanded == _union(useful)


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _is_disjoint_union(sets: Sequence[int], demanded: int) -> bool:
    """Whether ``demanded`` is the union of some disjoint sets; True if the search exceeds ``_MOST_CHOICES``."""
    if _union(sets) != demanded:
        return False
    unfinished, seen = [demanded], {demanded}  # sets of ranks that are still to be covered
    while unfinished:
        left = unfinished.pop()
        lowest = left & -left  # one of the disjoint sets must contain the lowest rank that is left
        for ranks in sets:
            if ranks & lowest and ranks & ~left == 0:
                if ranks == left or len(seen) > _MOST_CHOICES:
                    return True
                if left ^ ranks not in seen:
                    seen.add(left ^ ranks)
                    unfinished.append(left ^ ranks)
    return False


def _cause(
    before: State, after: State, step: Step, number: int, piece: int, demanded: int
) -> tuple[str, tuple[Mark, ...]]:
    """The transfer of the step that overwrote the last copy of a needed sum, in words, and the mark of its chunk."""
    left = {after.sums.ranks[number_of_sum] for number_of_sum in _sums_of(after, piece).tolist()}
    for src, dst, _, into, reduce in step.rows():
        value = int(before.sum[dst, into])
        ranks = before.sums.ranks[value] if value != NOTHING and before.piece[dst, into] == piece else 0
        if ranks and ranks & ~demanded == 0 and ranks not in left:
            verb = "adds to" if reduce else "replaces"
            now = after.sums.ranks[int(after.sum[dst, into])] if after.piece[dst, into] == piece else 0
            return (
                f"It cannot be repaired after step {number}: there the transfer from rank {src} to rank {dst} {verb} "
                f"the last copy of {names_of(ranks)}, in chunk {into} of rank {dst}",
                (Mark(number, dst, into, ranks_of(ranks & ~now), ranks_of(now & ~demanded)),),
            )
    return f"It cannot be repaired after step {number}", ()
