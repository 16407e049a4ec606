"""The compiled extension of the backend, and tensors in memory that the ranks of a host share.

>>> import dist_prims
>>> gradient = dist_prims.empty((3, 2), torch.float32).fill_(1)
>>> dist_prims.all_reduce(gradient)
>>> gradient.tolist()
[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from multiprocessing import parent_process, util
from typing import Any

import torch

from .torch_adapter import load

__all__: list[str] = []


def empty(shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate a tensor in memory that the other ranks of this host can map.

    An all_reduce reads and writes such tensors in place, without a copy, if the tensors of all ranks are in such
    memory. The call is not a collective. The memory is freed with the tensor. If an all_reduce of the tensor fails,
    other than with a MismatchError, the tensor keeps its address but becomes ordinary memory of this process, so that a
    late rank cannot write to it. A process that is forked from this one must not use the tensor: the memory is not
    mapped there.

    >>> gradient = empty((2, 3)).fill_(1)
    >>> torch.distributed.all_reduce(gradient)  # in shared memory, if the other ranks pass such tensors, too
    >>> gradient.shape, gradient.dtype
    (torch.Size([2, 3]), torch.float32)
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty: the sizes of a shape must not be negative, and this shape is {tuple(sizes)}")
    tensor: torch.Tensor = extension().empty(sizes, dtype)
    return tensor


@functools.cache
def extension() -> Any:
    """Return the compiled module for this torch; ImportError with a remedy if there is none."""
    module = load().module
    util.register_after_fork(module, _leave_at_end_of_worker)
    _leave_at_end_of_worker(module)  # this process may itself be a worker
    return module


def _leave_at_end_of_worker(module: Any) -> None:
    """Make a forked worker of multiprocessing leave its groups when it ends well, which it does by ``os._exit``.

    multiprocessing runs the finalizers of a worker while it handles the exception of the function, if there is one.
    """

    def leave() -> None:
        error = sys.exc_info()[1]
        if parent_process() and (error is None or (isinstance(error, SystemExit) and not error.code)):
            module.run_exit_actions()

    util.Finalize(None, leave, exitpriority=-1000)
