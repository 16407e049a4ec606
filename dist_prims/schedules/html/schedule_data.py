"""The data of the page of a schedule, as JSON: steps, what each chunk holds after each step, the proof and the prices.

The proof runs the schedule on numbers of sums instead of data (symbolic.py): a number stands for a piece of the data
added over certain ranks in a certain order, and NOTHING for an empty chunk. Each transfer of a step has, beside its
own values, the piece and the number of the sum that its target chunk holds after the step. So the scripts of the page
show any step without executing the schedule. Transfers and chunks are tables: a list for each column, and the number
of ``rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..draw import caption, describe_contract
from ..proof import error_of
from ..registry import algorithms, lookup
from ..schedule_error import ScheduleError
from ..steps import ScheduleData, Step, Steps, most_steps
from ..symbolic import NOTHING, State, symbolic_states
from .cost_data import cost_data
from .document import Page

__all__: list[str] = []

MOST_TRANSFERS = 60_000
_SCRIPTS = ("format", "elements", "player", "replay", "grid", "chart", "cost", "schedule")


def schedule_page(schedule: ScheduleData) -> Page:
    """The page of a schedule; ValueError if it has too many transfers.

    >>> from dist_prims.schedules import build
    >>> page = schedule_page(build("all_reduce", "ring", size=3))
    >>> page.title, page.data["steps"][0]["chunk"], page.data["proof"]["error"]
    ('all_reduce ring, 3 ranks, 3 chunks, 4 steps', {'from': 0}, None)
    """
    transfers = sum(map(len, schedule.steps))
    if transfers > MOST_TRANSFERS:
        raise ValueError(
            f"page: {schedule.collective} {schedule.algorithm} for {schedule.size} ranks has {transfers:,} transfers; "
            f"a page shows at most {MOST_TRANSFERS:,}; build it for fewer ranks"
        )
    return Page(caption(schedule), _SCRIPTS, _data(schedule))


def _data(schedule: ScheduleData) -> dict[str, Any]:
    error = error_of(schedule)
    start, steps, addends = _run(schedule)
    return {
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "size": schedule.size,
        "total": schedule.contract.total,
        "labels": list(_labels(schedule)),
        "blocks": _blocks(schedule),
        "adds": any(step.reduce.any() for step in schedule.steps),
        "facts": _facts(schedule),
        "start": start,
        "steps": steps,
        "addends": addends,
        "end": [_end(schedule, rank) for rank in range(schedule.size)],
        "proof": _proof(schedule, error),
        "cost": cost_data(schedule if error is None else _in_range(schedule)),
    }


def _proof(schedule: ScheduleData, error: ScheduleError | None) -> dict[str, Any]:
    """The result of the proof. ``step`` is the first wrong step; ``marks`` are the wrong chunks, each with the ranks
    that its sum misses and those that it has too often."""
    marks = [
        {"step": mark.step, "rank": mark.rank, "chunk": mark.chunk, "missing": mark.missing, "extra": mark.extra}
        for mark in (error.marks if error else ())
    ]
    return {
        "error": str(error) if error else None,
        "step": error.step if error else None,
        "marks": marks,
        "sameBits": schedule.contract.same_bits,
        "countsOnce": schedule.contract.counts_once,
    }


def _run(schedule: ScheduleData) -> tuple[dict[str, Any], list[dict[str, Any]], list[list[int]]]:
    """The chunks at the start, the steps, and for each number of a sum the numbers that were added to form it. The
    first step that cannot run is the last of the list."""
    states = symbolic_states(schedule)
    _, _, state = next(states)
    start = _start(state)
    steps: list[dict[str, Any]] = []
    try:
        for _, step, state in states:
            steps.append(_step(step, state))
    except ScheduleError as error:
        steps.append(_wrong_step(schedule, error))
    return start, steps, [list(state.sums.addends(number)) for number in range(len(state.sums.ranks))]


def _start(state: State) -> dict[str, Any]:
    """The table of the chunks that hold something before the first step."""
    rank, chunk = np.nonzero(state.sum != NOTHING)
    return {
        "rank": _column(rank),
        "chunk": _column(chunk),
        "piece": _column(state.piece[rank, chunk]),
        "sum": _column(state.sum[rank, chunk]),
        "rows": len(rank),
    }


def _step(step: Step, state: State) -> dict[str, Any]:
    """The table of the transfers of a step, with what their targets hold in ``state``, the state after the step."""
    after = {"piece": _column(state.piece[step.dst, step.into]), "sum": _column(state.sum[step.dst, step.into])}
    return {**_columns(step), **after}


def _columns(step: Step) -> dict[str, Any]:
    named = {name: _column(getattr(step, name)) for name in ("src", "dst", "chunk", "into")}
    return {**named, "reduce": _column(step.reduce), "rows": len(step)}


def _wrong_step(schedule: ScheduleData, error: ScheduleError) -> dict[str, Any]:
    """The step that cannot run: the rows that can be drawn, with no state after them."""
    step = next(step for number, step in enumerate(schedule.steps) if number == error.step)
    return {**_columns(_rows_in_range(schedule, step)), "piece": None, "sum": None}


def _in_range(schedule: ScheduleData) -> ScheduleData:
    """A wrong schedule without the rows that name a rank or chunk that does not exist: such rows have no price."""

    def steps() -> Iterator[Step]:
        return (_rows_in_range(schedule, step) for step in schedule.steps)

    return replace(schedule, steps=Steps(steps, most_steps(schedule.size)))


def _rows_in_range(schedule: ScheduleData, step: Step) -> Step:
    """The rows of a step whose ranks and chunks exist."""
    ranks, chunks = range(schedule.size), range(schedule.contract.total)
    inside = np.isin(step.src, ranks) & np.isin(step.dst, ranks)
    return step.take(inside & np.isin(step.chunk, chunks) & np.isin(step.into, chunks))


def _end(schedule: ScheduleData, rank: int) -> dict[str, Any]:
    """The table of the chunks that a rank must hold at the end."""
    end = schedule.contract.end(rank)
    columns = {name: _column(getattr(end, name)) for name in ("chunk", "piece", "first", "last")}
    return {**columns, "rows": len(end.chunk)}


def _blocks(schedule: ScheduleData) -> dict[str, int] | None:
    """For an all_to_all, the number of chunks, and how many of them (a part) one rank sends to one rank. The scripts
    compute the source and the destination of a piece from these. None for other collectives."""
    if schedule.collective != "all_to_all":
        return None
    return {"chunks": schedule.chunks, "part": schedule.chunks // schedule.size}


def _labels(schedule: ScheduleData) -> Iterator[str]:
    """A heading for each chunk number. The scratch chunks of a schedule come after its data."""
    if schedule.collective == "all_to_all":
        part = schedule.chunks // schedule.size
        for word in ("to", "from"):
            yield from (f"{word} {chunk // part}" for chunk in range(schedule.chunks))
    else:
        yield from (f"chunk {chunk}" for chunk in range(schedule.chunks))
    yield from (f"scratch {chunk}" for chunk in range(schedule.data_chunks, schedule.contract.total))


def _facts(schedule: ScheduleData) -> list[tuple[str, str]]:
    """The contract and the cost card as pairs of a heading and a text."""
    facts = [*describe_contract(schedule), ("steps", str(len(schedule.steps)))]
    if schedule.algorithm in algorithms(schedule.collective):
        card = lookup(schedule.collective, schedule.algorithm).card
        if card:
            facts += [("wins", card.wins), ("source", card.source)]
    return facts


def _column(values: ArrayLike) -> Any:
    """A column of a table, short: one number if all values are equal, ``{"from": a}`` for a, a+1, a+2, ..., else the
    list.

    >>> _column([3, 3]), _column([4, 5, 6]), _column([1, 0]), _column([])
    (3, {'from': 4}, [1, 0], [])
    """
    array = np.asarray(values, np.int64)
    if not array.size:
        return []
    if (array == array[0]).all():
        return int(array[0])
    if (np.diff(array) == 1).all():
        return {"from": int(array[0])}
    return array.tolist()
