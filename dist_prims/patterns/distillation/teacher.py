"""The teacher's side of a distillation: answers the requests of its students, round by round.

A round answers one request of every student that has one. The teacher computes all answers first. Then, student by
student, it receives the next request and sends the answer. It thus computes while its students learn, and a late
student does not delay the work for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .messages import DistillationError, DistillationMessage, as_tuple

if TYPE_CHECKING:
    from .roles import Distillation

__all__: list[str] = []


def answer(teacher: Callable[..., Any], request: tuple[torch.Tensor, ...], classes: int) -> tuple[torch.Tensor, ...]:
    """The teacher's answer to a request; ValueError if its first tensor does not have ``classes`` columns.

    >>> answer(torch.nn.Linear(2, 3), (torch.ones(4, 2),), 3)[0].shape
    torch.Size([4, 3])
    """
    if isinstance(teacher, torch.nn.Module):
        teacher.eval()
    with torch.no_grad():
        outputs = as_tuple(teacher(*request), "the teacher's answer")
    if not outputs[0].dim() or outputs[0].shape[-1] != classes:
        raise ValueError(
            f"the teacher gives logits of shape {tuple(outputs[0].shape)}, and its students have {classes} classes"
        )
    return outputs


class Teacher:
    """The loop of one teacher, from the first request of its students to the end of the last."""

    def __init__(self, teacher: Callable[..., Any], students: list[int], distillation: Distillation) -> None:
        self._teacher, self._classes = teacher, distillation.classes
        self._messages, self._ahead = distillation._messages, distillation.ahead
        self._rank = distillation._group.rank()
        self._asked: dict[int, deque[tuple[torch.Tensor, ...]]] = {student: deque() for student in students}
        self._active = set(students)  # students that may send requests
        self._failure: Exception | None = None
        self._count = 0

    def run(self) -> int:
        for student in self._asked:
            self._receive(student, 1)
        while any(self._asked.values()):
            answers = {student: self._answer(student) for student, asked in self._asked.items() if asked}
            for student, found in answers.items():
                self._receive(student, 1 + self._ahead)
                if self._asked[student]:
                    self._asked[student].popleft()
                    self._send(student, found)
            for student in self._asked:
                self._receive(student, 1)
        if self._failure is not None:
            raise self._failure
        return self._count

    def _receive(self, student: int, count: int) -> None:
        """Receive until a student has ``count`` open requests, or has ended; a failure discards its requests."""
        while student in self._active and len(self._asked[student]) < count:
            message = self._messages.receive(student)
            if message.tensors is not None:
                self._asked[student].append(message.tensors)
                continue
            self._active.discard(student)
            if message.failure is not None:
                self._asked[student].clear()
                self._failure = self._failure or DistillationError(message.failure)

    def _answer(self, student: int) -> DistillationMessage:
        if self._failure is None:
            try:
                return DistillationMessage(answer(self._teacher, self._asked[student][0], self._classes))
            except Exception as error:  # sent to the students
                self._failure = error
        return DistillationMessage(failure=self._failure_text())

    def _send(self, student: int, found: DistillationMessage) -> None:
        if self._failure is None:
            try:
                self._messages.send(student, found)
                self._count += 1
                return
            except Exception as error:
                if self._messages.broken:
                    raise
                self._failure = error
        self._messages.send(student, DistillationMessage(failure=self._failure_text()))

    def _failure_text(self) -> str:
        if isinstance(self._failure, DistillationError):
            return str(self._failure)
        return f"rank {self._rank}, a teacher, failed: {type(self._failure).__name__}: {self._failure}"
