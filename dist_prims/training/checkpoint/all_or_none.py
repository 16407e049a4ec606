"""Ranks that succeed or fail together: whoever cannot write or read tells the others, and all raise.

One rank with a full disk would otherwise raise alone, and the others would wait for it in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["READING", "CheckpointError", "Damaged", "together"]

T = TypeVar("T")
WRITING = "make room and see that every rank may write there"
READING = "see that every rank can read there, and try again"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on this rank or another. Those that were there are as they were."""


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed, or the disk does not give it back."""


_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "Damaged": Damaged}


def together(operation: str, act: Callable[[], T], group: dist.ProcessGroup, remedy: str = WRITING) -> list[T]:
    """What ``act()`` returns on each rank, once it has on all; if it raises on any, the same kind of error on all.

    ``remedy`` is what the error advises where a file is the trouble.

    >>> together("example", lambda: 3, dist.group.WORLD)
    [3]
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # the others must hear of it
        failure = error
    told = (result, None) if failure is None else (None, (type(failure).__name__, _words(failure, remedy)))
    everyones: list[Any] = [told]
    if group.size() > 1:
        everyones = [None] * group.size()
        dist.all_gather_object(everyones, told, group)
    failed = [(rank, *words) for rank, (_, words) in enumerate(everyones) if words is not None]
    if failed:
        # Damage first: with the checkpoint before this one there may be nothing wrong at all.
        rank, kind, words = min(failed, key=lambda each: each[1] != "Damaged")
        try:
            raise _KINDS.get(kind, CheckpointError)(
                f"{operation}: rank {group.rank()}: rank {rank}: {words}"
                if rank != group.rank()
                else f"{operation}: rank {rank}: {words}"
            ) from failure
        finally:
            failure = None  # its traceback has this frame, and would keep all that act has read
    return [result for result, _ in everyones]


def _words(failure: Exception, remedy: str) -> str:
    if isinstance(failure, ValueError | CheckpointError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}" + f"; {remedy}" * isinstance(failure, OSError)
