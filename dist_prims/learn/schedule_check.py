"""Checks of answers that are schedules: the proof, then limits on steps and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from ..schedules import Schedule, ScheduleError
from ..schedules.contract import ROOTED, contract
from ..schedules.cost import busiest_sender
from ..schedules.schedule import Steps
from .answer import Answer
from .exercise import WrongAnswerError

__all__: list[str] = []

Limit = Callable[[int], int | Fraction]


def schedule_of(
    answer: Answer, collective: str, size: int, chunks: int, scratch: int = 0, root: int | None = None
) -> Schedule:
    """The schedule of the learner's generator function, which has the name of the collective and keeps its contract."""
    steps = answer.steps(collective, size, root)
    own = contract(collective, size, chunks, root, scratch, same_bits=collective != "barrier")
    return Schedule(collective, "answer", size, chunks, own, Steps(lambda: iter(steps)), root)


def check_schedules(
    answer: Answer,
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
        for root in sorted({0, size // 2, size - 1}) if collective in ROOTED else (None,):
            last = schedule_of(answer, collective, size, chunks(size), scratch, root)
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
