"""The end of a backward pass, for all averagers whose parameters got gradients in the pass.

A hook of a parameter sees only the innermost backward: where a backward runs within a backward, it sees the inner one,
which ends before the outer one. At the end of a backward an averager waits for other ranks, on a group of its own.
Which of two averagers gets its first gradient first may differ by rank. If ranks waited in that order, one rank would
wait in the first averager while another waits in the second. So every rank waits in the order of the averagers' names,
which are the same on all ranks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Protocol

from torch.autograd.function import BackwardCFunction

from ...torch_compat import graph_task_id, queue_backward_callback

__all__: list[str] = []

_endings: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()  # by the graph task of autograd
_lock = threading.Lock()  # each device has a thread of autograd
_CALLS = {  # the code of torch that calls the backward of a torch.autograd.Function
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if name in vars(BackwardCFunction)
}


class Averager(Protocol):
    """An object whose end() is called at the end of a backward."""

    name: str

    def end(self) -> None: ...


class Ending:
    """Called once, at the end of a backward; alive until the backward has ended or raised.

    >>> class Named:
    ...     def __init__(self, name): self.name = name
    ...     def end(self): print(self.name)
    >>> ending = Ending()
    >>> ending.add(Named("b")), ending.add(Named("a"))
    (None, None)
    >>> ending()
    a
    b
    """

    def __init__(self) -> None:
        self._averagers: list[Averager] = []

    @classmethod
    def of_this_backward(cls) -> Ending:
        """The instance of the backward that runs; autograd keeps it alive and calls it at the end."""
        task = graph_task_id()
        with _lock:
            ending = _endings.get(task)
            if ending is None:
                ending = _endings[task] = cls()
                queue_backward_callback(ending)
        return ending

    def add(self, averager: Averager) -> None:
        self._averagers.append(averager)

    def __call__(self) -> None:
        """End all averagers, even if one raises, since the other ranks end theirs; then raise the first error."""
        errors = []
        for averager in sorted(self._averagers, key=lambda each: each.name):
            try:
                averager.end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def within_a_backward() -> bool:
    """Whether the backward of a ``torch.autograd.Function`` runs on this thread, as that of
    ``checkpoint(use_reentrant=True)`` does: gradients that are accumulated then come from a backward within it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back
    return False
