"""Simulation of a schedule in one process: the output of every rank, from NumPy arrays.

It is the simplest executor and the reference for the others: read the whole step, then write it row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .steps import ScheduleData, Step

__all__: list[str] = []

Operation = Callable[[Any, Any], Any]
Held = list[dict[int, Any]]  # of each rank: its chunks by number


def simulate(schedule: ScheduleData, inputs: Sequence[Any], op: Operation = np.add) -> list[Any]:
    """Run a schedule. ``inputs[rank]``: the rank's input chunks, in order, as rows; the outputs have the same form.

    >>> from dist_prims.schedules import build
    >>> ring = build("all_reduce", "ring", size=2)
    >>> simulate(ring, [[[1], [2]], [[10], [20]]])[0].tolist()
    [[11], [22]]
    """
    held = _start(schedule, inputs)
    for step in schedule.steps:
        _apply(step, held, op)
    ends = (schedule.contract.end(rank).chunk.tolist() for rank in range(schedule.size))
    return [np.array([held[rank][chunk] for chunk in chunks]) for rank, chunks in enumerate(ends)]


def states(schedule: ScheduleData, inputs: Sequence[Any], op: Operation = np.add) -> Iterator[tuple[Step, Held]]:
    """Each step, and the chunks that every rank holds after it; the dictionaries are reused and updated in place."""
    held = _start(schedule, inputs)
    for step in schedule.steps:
        _apply(step, held, op)
        yield step, held


def _start(schedule: ScheduleData, inputs: Sequence[Any]) -> Held:
    held: Held = []
    for rank in range(schedule.size):
        chunks = schedule.contract.start(rank).chunk.tolist()
        if len(inputs[rank]) != len(chunks):
            raise ValueError(f"simulate: rank {rank} has {len(inputs[rank])} input chunks; it needs {len(chunks)}")
        held.append({chunk: np.asarray(data) for chunk, data in zip(chunks, inputs[rank], strict=True)})
    return held


def _apply(step: Step, held: Held, op: Operation) -> None:
    rows = step.rows()
    moved = [held[src][chunk] for src, _, chunk, _, _ in rows]
    for (_, dst, _, into, reduce), data in zip(rows, moved, strict=True):
        held[dst][into] = op(held[dst][into], data) if reduce else data
