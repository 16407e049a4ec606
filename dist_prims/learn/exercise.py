"""The exercises: their form, and the list of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schedules import Schedule

if TYPE_CHECKING:
    from .answer import Answer

__all__: list[str] = []

ORDER = (
    "ring_pass",
    "deadlock",
    "broadcast_tree",
    "reduce_tree",
    "ring_reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "same_bits",
    "ring_order",
    "recursive_doubling",
    "crossover",
    "halving_doubling",
    "pairwise",
    "dissemination",
    "two_hosts",
    "shards",
    "one_f_one_b",
    "zero_bubble",
    "desync",
)


class WrongAnswerError(Exception):
    """A wrong answer, with what is wrong; ``schedule`` is the wrong schedule, for a page."""

    def __init__(self, message: str, schedule: Schedule | None = None) -> None:
        super().__init__(message)
        self.schedule = schedule


@dataclass(frozen=True)
class Exercise:
    """An exercise. ``template``: the file to complete; ``check(answer)`` returns what is right about a right answer.

    ``hints`` go from a nudge to nearly the solution.
    """

    title: str
    task: str
    template: str
    hints: tuple[str, ...]
    check: Callable[[Answer], str]

    def text(self, number: int) -> str:
        """The file that the learner completes."""
        return f'"""Exercise {number}: {self.title}\n\n{self.task.strip()}\n"""\n\n{self.template.strip()}\n'


def exercise(number: int) -> Exercise:
    """The exercise with a number, from 1 on.

    >>> exercise(1).title
    'Send around the ring'
    """
    if not 1 <= number <= len(ORDER):
        raise ValueError(f"there is no exercise {number}; the numbers are 1 to {len(ORDER)}")
    found: Exercise = importlib.import_module(f"{__package__}.exercises.{ORDER[number - 1]}").EXERCISE
    return found


def file_name(number: int) -> str:
    """The name of the file of an exercise.

    >>> file_name(3)
    'exercise_03_broadcast_tree.py'
    """
    return f"exercise_{number:02}_{ORDER[number - 1]}.py"
