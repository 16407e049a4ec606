"""Run a schedule on NumPy arrays in one process: what every rank would have, without any rank.

It is the plainest executor there is, and the oracle for the others: read the whole step, then write it row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .schedule import Schedule

__all__ = ["simulate"]


def simulate(schedule: Schedule, inputs: Sequence[Any], op: Callable[[Any, Any], Any] = np.add) -> list[Any]:
    """``inputs[rank]``: the rank's chunks of input, in order, as rows of an array; returns the outputs, likewise.

    >>> from dist_prims.schedules import build
    >>> ring = build("all_reduce", "ring", size=2)
    >>> simulate(ring, [[[1], [2]], [[10], [20]]])[0].tolist()
    [[11], [22]]
    """
    held: list[dict[int, Any]] = []
    for rank in range(schedule.size):
        chunks = schedule.contract.start(rank).chunk.tolist()
        if len(inputs[rank]) != len(chunks):
            raise ValueError(f"simulate: rank {rank} has {len(inputs[rank])} chunks of input; {len(chunks)} are needed")
        held.append({chunk: np.asarray(data) for chunk, data in zip(chunks, inputs[rank], strict=True)})
    for step in schedule.steps:
        rows = step.rows()
        moved = [held[src][chunk] for src, _, chunk, _, _ in rows]
        for (_, dst, _, into, reduce), data in zip(rows, moved, strict=True):
            held[dst][into] = op(held[dst][into], data) if reduce else data
    ends = (schedule.contract.end(rank).chunk.tolist() for rank in range(schedule.size))
    return [np.array([held[rank][chunk] for chunk in chunks]) for rank, chunks in enumerate(ends)]
