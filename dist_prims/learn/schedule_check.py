"""Checks of answers that are schedules: the proof, then limits on steps and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from ..schedules import Schedule, ScheduleError, Step
from ..schedules.contract import ROOTED, contract
from ..schedules.cost import busiest_sender
from ..schedules.schedule import Steps
from .exercise import WrongAnswerError

__all__: list[str] = []

MOST_STEPS = 2000
Limit = Callable[[int], int | Fraction]


def schedule_of(
    make: Callable[..., Iterator[Step]], collective: str, size: int, chunks: int, scratch: int = 0, root: int = 0
) -> Schedule:
    """The schedule that a learner's generator function yields, with the contract of the collective."""
    rooted = {"root": root} if collective in ROOTED else {}
    made = make(size, **rooted)
    if not hasattr(made, "__iter__"):
        raise WrongAnswerError(f"{_name(make)}({size}) returns {made!r}; it must yield steps")
    steps = list(itertools.islice(made, MOST_STEPS + 1))
    for number, step in enumerate(steps):
        if not isinstance(step, Step):
            raise WrongAnswerError(f"{size} ranks: step {number} is {step!r}; yield Step(src=..., dst=..., chunk=...)")
    if len(steps) > MOST_STEPS:
        raise WrongAnswerError(f"{size} ranks: there are more than {MOST_STEPS} steps; does the loop end?")
    own = contract(collective, size, chunks, root, scratch, same_bits=collective != "barrier")
    return Schedule(collective, _name(make), size, chunks, own, Steps(lambda: iter(steps)), rooted.get("root"))


def _name(make: Any) -> str:
    return getattr(make, "__name__", "answer")


def check_schedules(
    make: Callable[..., Iterator[Step]],
    collective: str,
    sizes: Sequence[int],
    *,
    chunks: Callable[[int], int],
    scratch: int = 0,
    steps: Limit | None = None,
    sent: Limit | None = None,
) -> str:
    """Prove the schedule for every size (and some roots), and compare steps and bytes with their limits."""
    last: Schedule | None = None
    for size in sizes:
        for root in sorted({0, size // 2, size - 1}) if collective in ROOTED else (0,):
            last = schedule_of(make, collective, size, chunks(size), scratch, root)
            _prove(last)
            if steps and len(last.steps) > steps(size):
                raise WrongAnswerError(
                    f"{size} ranks: the result is right, but takes {len(last.steps)} steps; {steps(size)} are enough",
                    last,
                )
            if sent and busiest_sender(last) > sent(size):
                raise WrongAnswerError(
                    f"{size} ranks: the result is right, but a rank sends {busiest_sender(last)} of the data; "
                    f"{sent(size)} is enough",
                    last,
                )
    assert last is not None
    return f"proved for {', '.join(map(str, sizes))} ranks; with {last.size} ranks it takes {len(last.steps)} steps"


def _prove(schedule: Schedule) -> None:
    root = f", root {schedule.root}" if schedule.root is not None else ""
    try:
        schedule.verify()
    except ScheduleError as error:
        raise WrongAnswerError(f"{schedule.size} ranks{root}: {error}", schedule) from error
