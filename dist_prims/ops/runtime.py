"""Runtime of the operators: the collective over the backend of the group.

Over the backend dist_prims and NCCL the operators call ``torch.distributed``: dist_prims compares the calls of all
ranks before it touches data, and calls of NCCL are asynchronous. gloo and other backends do not compare calls, so there
the operators run a schedule of :mod:`dist_prims.collectives`, which does. The comparison covers operation, dtype and
counts. The comparison does not detect different shapes with the same number of elements, nor "sum" on one rank and
"avg" on another, which is a sum of values that each rank has divided. Roots are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives
from ..collectives.algorithm_choice import CHEAPEST
from ..torch_compat import all_gather_single, backend_of, group_named, reduce_scatter_single

__all__: list[str] = []

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # of values that have been divided, so that float16 does not overflow
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class GroupCall:
    """One call of an operator in a group. The tensors belong to the operator alone, so that it may overwrite them."""

    def __init__(self, what: str, group: str, like: torch.Tensor) -> None:
        self.group = group_named(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.what = f"dist_prims.ops.{what} on rank {self.rank}"
        self._native = like.is_cuda or backend_of(self.group, like.device).name() == "dist_prims"

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ValueError(f"{self.what}: {problem}")

    def check_splits(self, name: str, splits: Sequence[int], rows: int) -> None:
        self.check(len(splits) == self.size, f"{name}={list(splits)} must have a number for each of {self.size} ranks")
        self.check(min(splits) >= 0, f"{name}={list(splits)} must be numbers from 0")
        self.check(sum(splits) == rows, f"{name}={list(splits)} add up to {sum(splits)}; there are {rows} rows")

    def operand(self, x: torch.Tensor, op: str) -> tuple[torch.Tensor, Any]:
        """Return a copy of ``x`` to reduce, and the reduction."""
        self.check(op in _OPS, f"op={op!r}: there are {', '.join(map(repr, _OPS))}")
        if op == "avg":
            is_number = x.is_floating_point() or x.is_complex()
            self.check(
                is_number, f"op='avg' of {x.dtype}: the average is not supported for integers; use 'sum' and divide"
            )
            return _copy(x).div_(self.size), _OPS[op]
        return _copy(x), _OPS[op]

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        if self._native:
            dist.all_reduce(tensor, op, self.group)
        else:
            collectives.all_reduce(tensor, op, self.group, algorithm=CHEAPEST)

    def all_gather(self, output: torch.Tensor, x: torch.Tensor, splits: Sequence[int]) -> None:
        is_even = len(set(splits)) == 1
        if not self._native:
            collectives.all_gather(_parts(output, splits), x, self.group, algorithm=CHEAPEST)
        elif is_even:
            all_gather_single(output, x, group=self.group)
        else:
            dist.all_gather(_parts(output, splits), x, group=self.group)

    def reduce_scatter(self, output: torch.Tensor, x: torch.Tensor, op: Any, splits: Sequence[int]) -> None:
        is_even = len(set(splits)) == 1
        if not self._native:
            collectives.reduce_scatter(output, _parts(x, splits), op, self.group, algorithm=CHEAPEST)
        elif is_even:
            reduce_scatter_single(output, x, op=op, group=self.group)
        else:
            dist.reduce_scatter(output, _parts(x, splits), op=op, group=self.group)

    def all_to_all(self, output: torch.Tensor, x: torch.Tensor, receive: list[int], send: list[int]) -> None:
        if self._native:
            dist.all_to_all_single(output, x, receive, send, group=self.group)
        else:
            collectives.all_to_all(output, x, receive, send, self.group, algorithm=CHEAPEST)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self._native:
            dist.broadcast(tensor, self._global_rank(root), self.group)
        else:
            collectives.broadcast(tensor, self._global_rank(root), self.group, algorithm=CHEAPEST)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        if self._native:
            dist.reduce(tensor, self._global_rank(root), group=self.group)
        else:
            collectives.reduce(tensor, self._global_rank(root), group=self.group, algorithm=CHEAPEST)

    def _global_rank(self, root: int) -> int:
        self.check(0 <= root < self.size, f"root {root} is out of range; the group's ranks are 0 to {self.size - 1}")
        return dist.get_global_rank(self.group, root)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _parts(tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(tensor, list(splits)))
