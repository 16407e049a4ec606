"""The student's side of a distillation: an iterator of batches with the teacher's answers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .messages import DistillationError, DistillationMessage, Messages, as_tuple
from .teacher import answer

if TYPE_CHECKING:
    from .roles import Distillation

__all__: list[str] = []

_Batch = TypeVar("_Batch")
# The timeout for reporting a failure. The teacher may wait for another student, which waits for this rank in an
# all-reduce: then no rank receives the report, and only raising the error here ends them all.
_REPORT_TIMEOUT = timedelta(seconds=5)


class Student(Generic[_Batch]):
    """An iterator of (batch, answer of the teacher); the answer is a tensor if it has one tensor, otherwise a tuple.

    Use it in a ``with`` statement: its end reports an early stop, or an error, to the teacher. Students may have uneven
    numbers of batches.
    """

    def __init__(
        self,
        batches: Iterable[_Batch],
        ask: Callable[[_Batch], Any],
        distillation: Distillation,
        teacher: Callable[..., Any] | None,
    ) -> None:
        self._batches, self._ask, self._teacher = iter(batches), ask, teacher
        self._classes, self._ahead = distillation.classes, distillation.ahead
        self._messages: Messages = distillation._messages
        self._peer = distillation.teacher_of(distillation._group.rank())
        self._rank = distillation._group.rank()
        self._waiting: deque[_Batch] = deque()  # batches whose requests were sent
        self._within = self._ended = False

    def __enter__(self) -> Student[_Batch]:
        self._within = True
        return self

    def __iter__(self) -> Iterator[tuple[_Batch, Any]]:
        if not self._within:
            raise RuntimeError(
                "student: iterate within `with ... as answered:`, so that the end is reported to the teacher"
            )
        if self._teacher is not None:
            for batch in self._batches:
                yield batch, _one(answer(self._teacher, as_tuple(self._ask(batch), "a request"), self._classes))
            return
        while self._request_ahead():
            message = self._messages.receive(self._peer)
            batch = self._waiting.popleft()
            if message.tensors is None:
                raise DistillationError(message.failure)
            yield batch, _one(message.tensors)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._within = False
        if self._teacher is not None or self._messages.broken:
            return
        failure, limit = None, None
        if error is not None and not isinstance(error, GeneratorExit):
            failure, limit = f"rank {self._rank}, a student, failed: {type(error).__name__}: {error}", _REPORT_TIMEOUT
        # The program sees the first error, not that of the report.
        with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
            if failure and not self._ended:
                self._waiting.clear()  # the teacher sends nothing after a failure
            self._end(failure, limit)
            while self._waiting:
                self._waiting.popleft()
                self._messages.receive(self._peer, limit)

    def _request_ahead(self) -> bool:
        """Send requests up to the limit; return whether a request is unanswered."""
        while not self._ended and len(self._waiting) <= self._ahead:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._end(None)
                break
            self._messages.send(self._peer, DistillationMessage(as_tuple(self._ask(batch), "a request")))
            self._waiting.append(batch)
        return bool(self._waiting)

    def _end(self, failure: str | None, limit: timedelta | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._messages.send(self._peer, DistillationMessage(failure=failure), limit)


def _one(tensors: tuple[Any, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors
