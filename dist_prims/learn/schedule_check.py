"""Checks of answers that are schedules: the proof, then limits on steps and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from ..schedules import Schedule, ScheduleError, Step
from ..schedules.contract import ROOTED, contract
from ..schedules.cost import busiest_sender
from ..schedules.steps import Steps
from .answer import Answer
from .exercise import WrongAnswerError

__all__: list[str] = []

Limit = Callable[[int], int | Fraction]


def proved_schedule(
    answer: Answer, collective: str, size: int, chunks: int, scratch: int = 0, root: int | None = None
) -> Schedule:
    """Ask for the steps of the learner's generator function, and prove them; WrongAnswerError if they are wrong.

    The function has the name of the collective. Every call asks the answer again, and the answer may reply with other
    steps. Judge the schedule of one call only.
    """
    steps = answer.steps(collective, size, root)
    own = contract(collective, size, chunks, root, scratch, same_bits=collective != "barrier")
    schedule = Schedule(collective, "answer", size, chunks, own, Steps(lambda: iter(steps)), root)
    try:
        schedule.verify()
    except ScheduleError as error:
        of_root = f", root {root}" if root is not None else ""
        raise WrongAnswerError(f"{size} ranks{of_root}: {error}", schedule) from error
    return schedule


def check_schedules(
    answer: Answer,
    collective: str,
    sizes: Sequence[int],
    *,
    chunks: Callable[[int], int],
    scratch: int = 0,
    steps: Limit | None = None,
    sent: Limit | None = None,
    one_port: bool = False,
) -> str:
    """Prove the schedule for every size (and some roots), and compare steps and bytes with their limits.

    ``one_port``: a rank sends at most one message a step, and receives at most one.
    """
    last: Schedule | None = None
    for size in sizes:
        for root in sorted({0, size // 2, size - 1}) if collective in ROOTED else (None,):
            last = proved_schedule(answer, collective, size, chunks(size), scratch, root)
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
            if one_port and any(_messages(step) > 1 for step in last.steps):
                raise WrongAnswerError(f"{size} ranks: a rank sends or receives two messages in one step", last)
    assert last is not None
    return f"proved for {', '.join(map(str, sizes))} ranks; with {last.size} ranks it takes {len(last.steps)} steps"


def _messages(step: Step) -> int:
    """The most messages that a rank sends, or receives, in a step."""
    pairs = {(src, dst) for src, dst, *_ in step.rows() if src != dst}
    ends = [Counter(pair[end] for pair in pairs) for end in (0, 1)]
    return max((count for each in ends for count in each.values()), default=0)
