"""Incremental reduction: a bucket in shared memory that is summed while it fills.

Each rank sums one share of every bucket and writes the sums to all ranks. No other rank reads a rank's own part of its
own share: so that part is not copied to the bucket. The gradient stays where backward has made it (a deferred input)
until the other ranks have brought theirs, which is checked whenever a gradient arrives. Then it is added, mostly from
the cache, and its memory is freed for the next gradient::

    rank 0's bucket   | sums: 0 defers its part | 0's part, for 1 to add  |
    rank 1's bucket   | 1's part, for 0 to add  | sums: 1 defers its part |    in the end each half is sums in both

So with one peer a rank copies one half of its gradients to the bucket, and adds the other half from where it is. No
rank waits: gradients that come too late are added when the bucket is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .._backend import IncrementalTensor

__all__: list[str] = []

_LARGE = 4 << 20  # bytes; a small bucket is still in the cache when all of it is there


class IncrementalSum:
    """A bucket whose gradients are added as they arrive."""

    def __init__(self, tensor: IncrementalTensor, views: Sequence[torch.Tensor]) -> None:
        self._tensor = tensor  # see csrc/torch/backend/incremental_tensor.h
        self._numbers = {id(view): number for number, view in enumerate(views) if view.numel()}

    @staticmethod
    def of(
        flat: torch.Tensor, views: Sequence[torch.Tensor], before: IncrementalSum | None, limit: int, backend: Any
    ) -> IncrementalSum | None:
        """The sum of a bucket with this memory; None if the backend cannot sum it in place, or the bucket is small. The
        rest of the bucket ``before`` is added when gradients come to this one. All buckets together defer ``limit``
        bytes of gradients at most."""
        if flat.nbytes < _LARGE or backend.size() == 1:
            return None
        tensor = backend.incremental_reduce(flat, limit, before and before._tensor)
        return IncrementalSum(tensor, views) if tensor else None

    def put(self, view: torch.Tensor, gradient: torch.Tensor | None, factor: float) -> bool:
        """Add a gradient, times ``factor``; the caller writes to it no more. False, and nothing is done, if there is no
        gradient, if it is its place in the bucket, or has another memory layout, or if the place has no elements."""
        number = self._numbers.get(id(view))
        if gradient is None or gradient is view or number is None:
            return False
        return self._tensor.put(number, view, gradient, factor)

    def is_shown(self) -> bool:
        """Whether other ranks may have read some of its gradients."""
        return self._tensor.is_shown()

    def send(self, ahead: bool) -> dist.Work:
        """Finish the sum of a full bucket: at once, or, if ``ahead``, by the end of the work."""
        return self._tensor.all_reduce(ahead)

    def forget(self) -> None:
        """Discard the gradients, unless other ranks may have read some: that cannot be undone."""
        if not self.is_shown():
            self._tensor.forget()
