"""Distillation with teachers on ranks of their own: which teacher serves which student, and how far it works ahead.

::

    student   request 0, 1 | learn 0  | request 2 | learn 1  | request 3 | learn 2 |
    teacher                | answer 1 |           | answer 2 |           | answer 3 |

A student sends the request for batch t + 1 before it learns from batch t: so the teacher's work overlaps with the
student's, and each step takes as long as the slower of the two. Both sides send and receive in the order of the
picture, so nothing deadlocks even where a send waits for its receiver, as with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...agreement import check_same
from ...collectives.call import group_of
from ...torch_compat import device_types
from .messages import Messages
from .student import Student
from .teacher import Teacher

__all__: list[str] = []

_Batch = TypeVar("_Batch")


class Distillation:
    """Roles in a group: the last ``teachers`` ranks are teachers, the others students; student s has teacher
    s % ``teachers``.

    >>> distillation = Distillation(classes=3, teachers=0)  # each student has the teacher on its own rank
    >>> teacher, student = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    >>> with distillation.student([(torch.ones(4, 2), "labels")], teacher) as answered:
    ...     for (inputs, labels), logits in answered:
    ...         print(labels, student(inputs).shape, logits.shape)
    labels torch.Size([4, 3]) torch.Size([4, 3])

    Every rank of the group makes a Distillation, with the number of ``classes`` of its own model. If two ranks give
    different numbers, all raise MismatchError. ``students`` is the students' group, for a GradientAverager; it is None
    on a teacher. Unless ``teachers`` is 0 it is a new group with the backend and timeout of ``group``; a program that
    makes many destroys it after use with ``torch.distributed.destroy_process_group``. ``ahead``: the number of requests
    beyond the current batch. ``device``: the device of messages; for NCCL, this rank's CUDA device.
    """

    def __init__(
        self,
        classes: int,
        teachers: int = 1,
        group: dist.ProcessGroup | None = None,
        *,
        ahead: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group = group_of(group, "Distillation")
        self.classes, self.teachers, self.ahead = classes, teachers, ahead
        found = _device(device)
        # A rank with a wrong device takes part in the check.
        self._device = found or torch.device(device_types(self._group)[-1])
        size = self._group.size()
        text = f"classes={classes}, teachers={teachers}, ahead={ahead}, device={found.type if found else device}"
        remedy = "Give models of the same classes on all ranks, and the same arguments"
        check_same(f"Distillation({text})", remedy, self._group, self._device)
        if found is None:
            raise ValueError(
                f"rank {self._group.rank()}: Distillation({text}): give a device such as 'cpu' or 'cuda:0'"
            )
        if classes < 1 or ahead < 0 or teachers < 0 or 2 * teachers > size:
            raise ValueError(
                f"rank {self._group.rank()}: Distillation({text}) in a group of {size}: classes must be 1 or more, "
                "ahead 0 or more, teachers at most half of the ranks; with teachers=0 each student has its own teacher"
            )
        self._messages = Messages(self._group, self._device)
        learners = self._learners() if teachers else self._group
        self.students = None if self.is_teacher else learners

    def _learners(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(self._group)[: -self.teachers],
            timeout=self._messages.timeout,
            backend=dist.get_backend(self._group),
            # Ranks outside of a sub-group do not call this.
            use_local_synchronization=self._group.size() < dist.get_world_size(),
        )
        return found

    @property
    def is_teacher(self) -> bool:
        return self._group.rank() >= self._group.size() - self.teachers

    def teacher_of(self, student: int) -> int:
        """The rank of a student's teacher in the group."""
        return self._group.size() - self.teachers + student % self.teachers if self.teachers else student

    def students_of(self, teacher: int) -> list[int]:
        """The ranks of a teacher's students in the group."""
        return [rank for rank in range(self._group.size() - self.teachers) if self.teacher_of(rank) == teacher]

    def teach(self, teacher: Callable[..., Any]) -> int:
        """Answer this teacher's students, without a gradient, until all have ended; return the number of batches.

        The teacher is called with the tensors of a request and returns a tensor, the logits, or a tuple of tensors that
        begins with the logits. A module is set to ``eval()``. An error of the teacher is raised here, and on the
        students as :class:`DistillationError`. An error of a student is raised here and on the other students as
        :class:`DistillationError`. If these wait for the failed student in an all-reduce, it raises after 5 seconds,
        and they report that its process has ended.
        """
        if not self.is_teacher:
            raise ValueError(
                f"rank {self._group.rank()}: teach() is for the last {self.teachers} ranks; call student()"
            )
        return Teacher(teacher, self.students_of(self._group.rank()), self).run()

    def student(
        self,
        batches: Iterable[_Batch],
        teacher: Callable[..., Any] | None = None,
        ask: Callable[[_Batch], Any] = lambda batch: batch[0],  # type: ignore[index]
    ) -> Student[_Batch]:
        """A student's batches, each with the teacher's answer; see :class:`Student`.

        ``ask``: the function from a batch to the request; by default its first element, the inputs. If the teacher
        has the data, too, send sample numbers instead. ``teacher`` is needed, and used, only with ``teachers=0``.
        """
        if self.is_teacher:
            raise ValueError(
                f"rank {self._group.rank()}: student() is for students, and this rank is a teacher; call teach()"
            )
        if self.teachers == 0 and teacher is None:
            raise ValueError("student: with teachers=0 give each student its own teacher: student(batches, teacher)")
        return Student(batches, ask, self, None if self.teachers else teacher)


def _device(given: torch.device | str) -> torch.device | None:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        return None
