"""Checks of a learner's answer that is a schedule: the proof, then limits on its steps and on the data it sends."""

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

Limit = Callable[[int], int | Fraction]  # by the number of ranks


def proved_schedule(
    answer: Answer, collective: str, size: int, chunks: int, scratch: int = 0, root: int | None = None
) -> Schedule:
    """Ask for the steps of the learner's generator function, and prove them; WrongAnswerError if they are wrong.

    Each call asks the answer again, and the answer may reply with other steps: use one schedule for all checks.

    Args:
        answer: has the generator function, under the name of the ``collective``.
        size: the number of ranks.
        chunks, scratch: the numbers of chunks of the data, and of further chunks for intermediate results.
        root: of a collective with a root.
    """
    steps = answer.steps(collective, size, root)
    goal = contract(collective, size, chunks, root, scratch, same_bits=collective != "barrier")
    schedule = Schedule(collective, "answer", size, chunks, goal, Steps(lambda: iter(steps)), root)
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
    """Prove the schedule for every size (and some roots), and compare it with limits. Return what is proved.

    Args:
        answer, collective, scratch: see :func:`proved_schedule`.
        sizes: the numbers of ranks.
        chunks: the number of chunks.
        steps: the most steps.
        sent: the most data that a rank sends, in units of the whole data: 1 is the length of the buffer.
        one_port: whether a rank may send at most one message in a step, and receive at most one.
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
    """The most messages that a rank sends, or receives, in a step: the chunks for one receiver are one message."""
    messages = {(sender, receiver) for sender, receiver, *_ in step.rows() if sender != receiver}
    sent, received = (Counter(message[end] for message in messages) for end in (0, 1))
    return max((*sent.values(), *received.values()), default=0)
