"""Before anything is sent: every rank has tensors of the same names, shapes and dtypes, and was told the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MismatchError

__all__ = ["check_alike"]


def check_alike(
    what: str, settings: Sequence[str], named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup
) -> None:
    """Return when all ranks have the same; MismatchError on every rank, with the first difference, when two do not, and
    ValueError when all have a model that is sharded already.

    >>> check_alike("ZeroOptimizer", ["average=True"], torch.nn.Linear(2, 1).named_parameters(), dist.group.WORLD)
    """
    tensors = list(named)
    mine = [*settings, *(_described(name, tensor) for name, tensor in tensors)]
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    for rank, theirs in enumerate(everyones):
        for first, other in zip_longest(everyones[0], theirs, fillvalue="nothing more"):
            if first != other:
                raise MismatchError(
                    f"rank {group.rank()}: {what}: ranks differ, no data was touched. Rank 0 has {first}; rank {rank} "
                    f"has {other}. Build the same model, with the same settings, on every rank"
                )
    if found := next((name for name, tensor in tensors if _is_sharded(tensor)), None):
        raise ValueError(
            f"rank {group.rank()}: {what}: {found!r} is sharded already, by ShardedParameters; remove() first"
        )


def _described(name: str, tensor: torch.Tensor) -> str:
    sharded = ", sharded already" * _is_sharded(tensor)
    return (
        f"tensor {name!r} ({tensor.dtype}, shape {tuple(tensor.shape)}, requires_grad={tensor.requires_grad}{sharded})"
    )


def _is_sharded(tensor: torch.Tensor) -> bool:
    """All of its elements are one: so are parameters that ShardedParameters has let go of."""
    return isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1 and not any(tensor.stride())
