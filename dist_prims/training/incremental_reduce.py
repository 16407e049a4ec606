"""A bucket of lent memory that is summed while it fills.

Ranks that lend each other their memory add up one share of every bucket each, and write the sums into all. A rank's own
part of its share nobody else reads: so it is not copied to the bucket but held, where backward has made it, until the
others have brought theirs. Whether they have is looked up whenever a gradient comes: mostly what is held is then still
in the cache, and its memory is free for the next one::

    rank 0's bucket   | sums: 0 held its part  | 0's part, for 1 to add |
    rank 1's bucket   | 1's part, for 0 to add | sums: 1 held its part  |     in the end each half is sums in both

With one peer a rank so copies one half of the numbers and reads the other half back, where it would copy all and read
all. Nobody waits: what a rank is too late for is added when the bucket is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .._backend import GradualTensor

__all__ = ["Gradual"]

_LARGE = 4 << 20  # bytes; a small bucket is still in the cache when all of it is there


class Gradual:
    """The gradients of a bucket on their way to their sum."""

    def __init__(self, tensor: GradualTensor, views: Sequence[torch.Tensor]) -> None:
        self._tensor = tensor  # see csrc/torch/backend/incremental_tensor.h
        self._numbers = {id(view): number for number, view in enumerate(views) if view.numel()}

    @staticmethod
    def of(
        flat: torch.Tensor, views: Sequence[torch.Tensor], before: Gradual | None, limit: int, backend: Any
    ) -> Gradual | None:
        """None where ranks do not sum a bucket where it lies, or where it is small. What is left of the one before it
        is added when gradients come to this one. All together hold gradients of ``limit`` bytes at most."""
        if flat.nbytes < _LARGE or backend.size() == 1:
            return None
        tensor = backend.gradual(flat, limit, before and before._tensor)
        return Gradual(tensor, views) if tensor else None

    def put(self, view: torch.Tensor, gradient: torch.Tensor | None, share: float) -> bool:
        """Bring a gradient, times ``share``, on its way to its place; it is not to be written any more. False, and no
        more, if it does not lie in memory as its place does."""
        number = self._numbers.get(id(view))
        if gradient is None or gradient is view or number is None:
            return False
        return self._tensor.put(number, view, gradient, share)

    def is_shown(self) -> bool:
        """Whether other ranks may have taken some of it."""
        return self._tensor.is_shown()

    def send(self, ahead: bool) -> dist.Work:
        """All of it is there. When the work is done, which it is at once if this is not ``ahead``, it is summed."""
        return self._tensor.all_reduce(ahead)

    def forget(self) -> None:
        """None of it is there, unless others have seen it: there is no way back then."""
        if not self.is_shown():
            self._tensor.forget()
