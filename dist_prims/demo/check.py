"""Check of every registered algorithm on the ranks, against the results of the group's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives as ours
from .._console import Console
from ..collectives.flat import cut
from ..schedules import algorithms
from ..schedules.contract import COLLECTIVES

__all__: list[str] = []

_COUNT = 257  # a prime: no number of ranks divides it

Run = Callable[..., torch.Tensor]


def check_algorithms(console: Console) -> None:
    console.title("Every algorithm, against the group's own collectives")
    for collective in COLLECTIVES:
        run, reference = _CASES[collective]
        mine = torch.arange(_COUNT * dist.get_world_size()).mul_(dist.get_rank() + 1)
        expected = reference(mine.clone())
        names = algorithms(collective)
        wrong = [name for name in names if not torch.equal(run(mine.clone(), algorithm=name), expected)]
        console.check(not wrong, f"{collective}: {', '.join(wrong or names)}")


def _root() -> int:
    return dist.get_world_size() - 1


def _blocks() -> list[torch.Tensor] | None:
    """A receive buffer for each rank on the root, None on the other ranks."""
    size = dist.get_world_size()
    return list(torch.zeros(size, _COUNT * size, dtype=torch.int64)) if dist.get_rank() == _root() else None


def _gather(function: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    blocks = _blocks()
    function(tensor, blocks, _root(), **how)
    return torch.cat(blocks) if blocks else tensor


def _scatter(function: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    output = torch.zeros(_COUNT, dtype=tensor.dtype)
    blocks = cut(tensor, [_COUNT] * dist.get_world_size()) if dist.get_rank() == _root() else None
    function(output, blocks, _root(), **how)
    return output


def _all_gather(function: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    output = torch.zeros(len(tensor) * dist.get_world_size(), dtype=tensor.dtype)
    function(output, tensor, **how)
    return output


def _in_place(function: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **how: Any) -> torch.Tensor:
    function(tensor, *arguments, **how)
    return tensor


def _to_root(function: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    kept = tensor.clone()
    function(tensor, _root(), **how)
    return tensor if dist.get_rank() == _root() else kept  # the tensors of the other ranks are undefined


def _from(function: Callable[..., Any], output: torch.Tensor, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    function(output, tensor, **how)
    return output


def _of_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows


def _barrier(function: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    function(**how)
    return tensor


def _prefix(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sum over the first ``ranks`` ranks; for 0 ranks the tensor itself, as an exclusive scan leaves it."""
    rows = _of_all_ranks(tensor)[:ranks]
    return torch.stack(rows).sum(0) if rows else tensor


def _own_share(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return cut(tensor, [_COUNT] * dist.get_world_size())[dist.get_rank()]


# For each collective, the call of dist_prims and the reference call of the group.
_CASES: dict[str, tuple[Run, Run]] = {
    "all_reduce": (
        lambda tensor, **how: _in_place(ours.all_reduce, tensor, **how),
        lambda tensor: _in_place(dist.all_reduce, tensor),
    ),
    "reduce_scatter": (
        lambda tensor, **how: _from(ours.reduce_scatter, tensor.new_zeros(_COUNT), tensor, **how),
        _own_share,
    ),
    "all_gather": (
        lambda tensor, **how: _all_gather(ours.all_gather, tensor, **how),
        lambda tensor: torch.cat(_of_all_ranks(tensor)),
    ),
    "broadcast": (
        lambda tensor, **how: _in_place(ours.broadcast, tensor, _root(), **how),
        lambda tensor: _in_place(dist.broadcast, tensor, _root()),
    ),
    "reduce": (
        lambda tensor, **how: _to_root(ours.reduce, tensor, **how),
        lambda tensor: _to_root(dist.reduce, tensor),
    ),
    "gather": (
        lambda tensor, **how: _gather(ours.gather, tensor, **how),
        lambda tensor: _gather(dist.gather, tensor),
    ),
    "scatter": (
        lambda tensor, **how: _scatter(ours.scatter, tensor, **how),
        lambda tensor: _scatter(dist.scatter, tensor),
    ),
    "all_to_all": (
        lambda tensor, **how: _from(ours.all_to_all, torch.zeros_like(tensor), tensor, **how),
        lambda tensor: _from(dist.all_to_all_single, torch.zeros_like(tensor), tensor),
    ),
    "barrier": (
        lambda tensor, **how: _barrier(ours.barrier, tensor, **how),
        lambda tensor: _barrier(dist.barrier, tensor),
    ),
    "scan": (
        lambda tensor, **how: _in_place(ours.scan, tensor, **how),
        lambda tensor: _prefix(tensor, dist.get_rank() + 1),
    ),
    "exclusive_scan": (
        lambda tensor, **how: _in_place(ours.scan, tensor, exclusive=True, **how),
        lambda tensor: _prefix(tensor, dist.get_rank()),
    ),
}
