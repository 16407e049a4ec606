"""The exercises: their form, the list of them, and the check of a learner's file."""

from __future__ import annotations

import importlib
import runpy
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedules import Schedule

__all__: list[str] = []

Answer = Mapping[str, Any]  # the names that the learner's file defines

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


def check(number: int, path: Path) -> str:
    """Check a learner's file and return what is right about it; WrongAnswerError if it is wrong."""
    try:
        answer = runpy.run_path(str(path), run_name="__dist_prims_learn__")
        return exercise(number).check(answer)
    except (WrongAnswerError, OSError):
        raise
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
        where = f"line {lines[-1]}: " if lines else ""  # the text of a syntax error has its line
        raise WrongAnswerError(f"{where}{type(error).__name__}: {error}") from error


def function(answer: Answer, name: str) -> Callable[..., Any]:
    """The function of an answer with a name."""
    found = answer.get(name)
    if not callable(found):
        raise WrongAnswerError(f"the file does not define the function {name}")
    return found  # type: ignore[no-any-return]
