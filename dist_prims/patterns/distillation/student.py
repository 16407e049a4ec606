"""The student's side."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .messages import LessonFailed, Message, Messages, as_tuple
from .teacher import answer

if TYPE_CHECKING:
    from .roles import Distillation

__all__ = ["Lessons"]

_Batch = TypeVar("_Batch")
# The teacher may be waiting for another student, and that one for us, who have failed, in an all-reduce: then nobody
# hears us, and only the error, when it leaves here, ends them all.
_TO_BE_HEARD = timedelta(seconds=5)


class Lessons(Generic[_Batch]):
    """Iterates (batch, what the teacher says of it): a tensor if it says one thing, otherwise a tuple.

    Within ``with``: so the teacher hears of it when the student stops early, and why. Students may have uneven numbers
    of batches.
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
        self._waiting: deque[_Batch] = deque()  # batches that were asked for
        self._within = self._ended = False

    def __enter__(self) -> Lessons[_Batch]:
        self._within = True
        return self

    def __iter__(self) -> Iterator[tuple[_Batch, Any]]:
        if not self._within:
            raise RuntimeError("lessons: iterate within `with ... as lessons:`, so that the teacher hears of your end")
        if self._teacher is not None:
            for batch in self._batches:
                yield batch, _one(answer(self._teacher, as_tuple(self._ask(batch), "a request"), self._classes))
            return
        while self._ask_ahead():
            message = self._messages.receive(self._peer)
            batch = self._waiting.popleft()
            if message.tensors is None:
                raise LessonFailed(message.failure)
            yield batch, _one(message.tensors)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._within = False
        if self._teacher is not None or self._messages.broken:
            return
        told, limit = None, None
        if error is not None and not isinstance(error, GeneratorExit):
            told, limit = f"rank {self._rank}, a student, failed: {type(error).__name__}: {error}", _TO_BE_HEARD
        # What failed first is what the program is to see.
        with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
            if told and not self._ended:
                self._waiting.clear()  # who hears of a failure says no more
            self._end(told, limit)
            while self._waiting:
                self._waiting.popleft()
                self._messages.receive(self._peer, limit)

    def _ask_ahead(self) -> bool:
        """Ask for as much as may be asked for; whether there is anything to wait for."""
        while not self._ended and len(self._waiting) <= self._ahead:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._end(None)
                break
            self._messages.send(self._peer, Message(as_tuple(self._ask(batch), "a request")))
            self._waiting.append(batch)
        return bool(self._waiting)

    def _end(self, failure: str | None, limit: timedelta | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._messages.send(self._peer, Message(failure=failure), limit)


def _one(tensors: tuple[Any, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors
