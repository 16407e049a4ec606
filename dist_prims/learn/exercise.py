"""The form of an exercise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schedules import Schedule

if TYPE_CHECKING:
    from .answer import Answer

__all__: list[str] = []

# The end of a task whose answer is a schedule.
STEP = """

``yield Step(src=..., dst=..., chunk=...)`` is one step; src and dst may be lists or arrays, for several transfers at
a time."""


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
