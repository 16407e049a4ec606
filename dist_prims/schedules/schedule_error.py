"""The error in a schedule: a counterexample, with the chunks that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__: list[str] = []


class Mark(NamedTuple):
    """A wrong chunk of a rank after a step: the ranks missing from its sum, and those counted twice or not demanded."""

    step: int
    rank: int
    chunk: int
    missing: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()


class ScheduleError(ValueError):
    """Error in a schedule; the message is a counterexample.

    ``step``: the number of the first wrong step, None if the error is in no step. ``marks``: the wrong chunks.

    >>> from dist_prims.schedules import Step, algorithm, build, unregister
    >>> @algorithm("broadcast", name="forgets_the_last", chunks=1)
    ... def forgets_the_last(size, root):
    ...     for rank in range(1, size - 1):
    ...         yield Step(src=root, dst=rank, chunk=0)
    >>> try:
    ...     build("broadcast", "forgets_the_last", size=3).verify()
    ... except ScheduleError as error:
    ...     print(str(error).replace(". ", ".\\n"))
    at the end rank 2 must hold piece 0 in chunk 0; it holds nothing.
    The ranks still hold all parts of it after the last step: a transfer to rank 2 is missing
    >>> unregister("broadcast", "forgets_the_last")
    """

    def __init__(self, message: str, step: int | None = None, marks: Sequence[Mark] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.marks = tuple(marks)
