"""Phases: parts that schedules have in common, such as an all-gather within every host.

Hierarchical algorithms return phases instead of generating steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .schedule import CountedStep, Step

__all__: list[str] = []


@dataclass(frozen=True)
class Phase:
    """A part of a schedule that other schedules may have too, so that its load on a topology is counted only once.

    ``make(*given)`` generates the steps. Each of their chunks stands for ``width`` consecutive chunks of the schedule.
    Phases are equal if they have the same steps apart from the width.

    >>> phase = Phase(lambda src: iter([Step(src=src, dst=5, chunk=1)]), (3,), width=2)
    >>> [step.rows() for step in phase]
    [[(3, 5, 2, 2, False), (3, 5, 3, 3, False)]]
    """

    make: Callable[..., Iterator[Step]]
    given: tuple[Any, ...]
    width: int = field(default=1, compare=False)

    def __iter__(self) -> Iterator[Step]:
        for step in self.make(*self.given):
            yield widened(step, self.width)


Phases = tuple[Phase, ...]


def widened(step: Step, width: int) -> Step:
    """The step with ``width`` consecutive chunks in place of each."""
    if width == 1:
        return step
    rows, span = step.narrow

    def every_row() -> Step:
        src, dst, reduce = (np.repeat(column, width) for column in (step.src, step.dst, step.reduce))
        chunk, into = ((column[:, None] * width + np.arange(width)).ravel() for column in (step.chunk, step.into))
        return Step(src, dst, chunk, reduce, into)

    return CountedStep(rows, width if span is None else span * width, every_row)
