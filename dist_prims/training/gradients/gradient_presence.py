"""Per-step agreement: which parameters have a gradient, on this rank and on any other, at the end of a backward.

A rank whose batch does not take a branch has no gradient for it, while another rank has one. A parameter that is frozen
on one rank only, or sparse on one only, would make the ranks differ from then on. One small all-reduce (MAX) shows all
of it: four numbers for each parameter, one of them this rank's number (from 1), the others 0. An error can so name a
rank for each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...errors import MismatchError

__all__: list[str] = []

FROZEN, NONE, DENSE, SPARSE = 0, 1, 2, 3
_KINDS = 4


def kind_of(parameter: torch.Tensor) -> int:
    if not parameter.requires_grad:
        return FROZEN
    if parameter.grad is None:
        return NONE
    return DENSE if parameter.grad.layout == torch.strided else SPARSE


@dataclass
class Presence:
    """For each kind and parameter: the highest rank, from 1, whose parameter is of that kind; 0 if none is."""

    rows: list[list[int]]

    def of_kind(self, kind: int) -> set[int]:
        """The parameters that are of this kind on any rank."""
        return {number for number, rank in enumerate(self.rows[kind]) if rank}

    def trainable(self) -> set[int]:
        return {number for number, rank in enumerate(self.rows[FROZEN]) if not rank}

    def check(self, names: Sequence[str], rank: int) -> None:
        for name, frozen, none, dense, sparse in zip(names, *self.rows, strict=True):
            if frozen and (free := max(none, dense, sparse)):
                raise MismatchError(
                    f"rank {rank}: GradientAverager: parameter {name!r} has requires_grad=True on rank {free - 1} and "
                    f"False on rank {frozen - 1}; freeze and unfreeze it on every rank before the same step"
                )
            if dense and sparse:
                raise MismatchError(
                    f"rank {rank}: GradientAverager: parameter {name!r} has a dense gradient on rank {dense - 1} and a "
                    f"sparse one on rank {sparse - 1}; make its layer with sparse=False"
                )


class Agreement:
    """One exchange. On a CPU the constructor waits for it; on a GPU it is asynchronous, and read() waits."""

    def __init__(self, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._table = mine.clone()
        is_async = self._table.is_cuda
        alone = group.size() == 1
        self._work = None if alone else dist.all_reduce(self._table, dist.ReduceOp.MAX, group, async_op=is_async)
        self._copied: torch.cuda.Event | None = None

    def arrive(self) -> None:
        """Wait for the exchange; on a GPU only the stream waits."""
        if self._work is not None:
            self._work.wait()
        if self._table.is_cuda:
            self._table = self._table.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Presence:
        if self._copied is not None:
            self._copied.synchronize()
        return Presence(self._table.view(_KINDS, -1).tolist())

    @staticmethod
    def table(kinds: Sequence[int | None], rank: int, device: torch.device) -> torch.Tensor:
        """This rank's contribution; ``None``: it has no information on a parameter."""
        rows = [[(rank + 1) * (kind == row) for kind in kinds] for row in range(_KINDS)]
        return torch.tensor(rows, dtype=torch.int32, device=device)
