"""File operations that succeed or fail on all ranks together.

Without this a rank whose disk is full would raise alone, and the other ranks would wait for it in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...agreement import gather_values

__all__: list[str] = []

T = TypeVar("T")
WRITING = "free disk space, and check that every rank may write there"
READING = "check that every rank can read there, and try again"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, on this rank or another. Earlier checkpoints are unchanged.

    >>> import tempfile
    >>> from dist_prims.training.checkpoint import Checkpoints
    >>> class Broken:
    ...     def state_dict(self):
    ...         raise RuntimeError("the state is lost")
    ...     def load_state_dict(self, state):
    ...         pass
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         Checkpoints(folder, {"broken": Broken()}).save(10)
    ...     except CheckpointError as error:
    ...         print(error)
    Checkpoints.save of step 10: rank 0: RuntimeError: the state is lost
    """


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated or changed, or the disk cannot read it.

    >>> import pathlib, tempfile, torch, warnings
    >>> from dist_prims.training.checkpoint import Checkpoints
    >>> warnings.simplefilter("ignore")  # a warning for each damaged checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(folder, {"weight": torch.zeros(2)})
    ...     _ = checkpoints.save(10)
    ...     for file in pathlib.Path(folder).rglob("*.pt"):
    ...         _ = file.write_bytes(b"")
    ...     try:
    ...         checkpoints.restore()
    ...     except DamagedCheckpointError as error:
    ...         print(str(error).replace(folder, "folder").partition(";")[0])
    Checkpoints.restore from folder: rank 0: every checkpoint is damaged
    >>> warnings.resetwarnings()
    """


_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "DamagedCheckpointError": DamagedCheckpointError}


def together(operation: str, act: Callable[[], T], group: dist.ProcessGroup, remedy: str = WRITING) -> list[T]:
    """The results of ``act()`` of all ranks; if it raises on any rank, every rank raises the same kind of error. The
    results must be plain values (see plain_values.py).

    ``remedy``: the advice in the error text after an OSError.

    >>> together("example", lambda: 3, dist.group.WORLD)
    [3]
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # to be sent to the other ranks
        failure = error
    mine = (result, None) if failure is None else (None, (type(failure).__name__, _text(failure, remedy)))
    found: list[Any] = gather_values(mine, group)
    failed = [(rank, *error) for rank, (_, error) in enumerate(found) if error is not None]
    if failed:
        # Damage comes first: the caller then tries the checkpoint before this one.
        rank, kind, text = min(failed, key=lambda each: each[1] != "DamagedCheckpointError")
        try:
            raise _KINDS.get(kind, CheckpointError)(
                f"{operation}: rank {group.rank()}: rank {rank}: {text}"
                if rank != group.rank()
                else f"{operation}: rank {rank}: {text}"
            ) from failure
        finally:
            failure = None  # its traceback refers to this frame, and would keep everything that act() has read
    return [result for result, _ in found]


def _text(failure: Exception, remedy: str) -> str:
    if isinstance(failure, ValueError | CheckpointError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}" + f"; {remedy}" * isinstance(failure, OSError)
