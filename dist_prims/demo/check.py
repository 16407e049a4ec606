"""Check of every registered algorithm on the ranks, against the results of the group's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives as ours
from .._console import Console
from ..collectives.flat import cut
from ..schedules import algorithms
from ..schedules.contract import COLLECTIVES

__all__: list[str] = []

_COUNT = 257  # elements of the block of a rank: a prime, so no number of ranks divides it

Function = Callable[..., Any]


def check_algorithms(console: Console) -> None:
    console.title("Every algorithm, against the group's own collectives")
    for collective in COLLECTIVES:
        call, function, reference = _CASES[collective]
        mine = torch.arange(_COUNT * dist.get_world_size()).mul_(dist.get_rank() + 1)
        expected = reference(mine.clone())
        names = algorithms(collective)
        wrong = [name for name in names if not torch.equal(call(function, mine.clone(), algorithm=name), expected)]
        console.check(not wrong, f"{collective}: {', '.join(wrong or names)}")


# The forms of a call: each makes the outputs, calls the function, and returns the result of this rank. ``how`` is the
# algorithm for dist_prims, and empty for torch.distributed.


def _in_place(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    function(tensor, **how)
    return tensor


def _from_root(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    function(tensor, _root(), **how)
    return tensor


def _to_root(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    kept = tensor.clone()
    function(tensor, _root(), **how)
    return tensor if dist.get_rank() == _root() else kept  # the tensors of the other ranks are undefined


def _gather(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    size = dist.get_world_size()
    blocks = list(torch.zeros(size, _COUNT * size, dtype=torch.int64)) if dist.get_rank() == _root() else None
    function(tensor, blocks, _root(), **how)
    return torch.cat(blocks) if blocks else tensor


def _scatter(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    output = torch.zeros(_COUNT, dtype=tensor.dtype)
    blocks = cut(tensor, [_COUNT] * dist.get_world_size()) if dist.get_rank() == _root() else None
    function(output, blocks, _root(), **how)
    return output


def _into(
    make_output: Callable[[torch.Tensor], torch.Tensor], function: Function, tensor: torch.Tensor, **how: Any
) -> torch.Tensor:
    output = make_output(tensor)
    function(output, tensor, **how)
    return output


def _barrier(function: Function, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    function(**how)
    return tensor


def _root() -> int:
    return dist.get_world_size() - 1


def _of_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows


def _prefix(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sum over the first ``ranks`` ranks; for 0 ranks the tensor itself, as an exclusive scan leaves it."""
    rows = _of_all_ranks(tensor)[:ranks]
    return torch.stack(rows).sum(0) if rows else tensor


def _own_block_of_sum(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return cut(tensor, [_COUNT] * dist.get_world_size())[dist.get_rank()]


_to_block = partial(_into, lambda tensor: tensor.new_zeros(_COUNT))
_to_all_blocks = partial(_into, lambda tensor: tensor.new_zeros(len(tensor) * dist.get_world_size()))
_to_each_rank = partial(_into, torch.zeros_like)

# For each collective, the form of the call, the function of dist_prims, and the reference: the call of the group.
_CASES: dict[str, tuple[Function, Function, Function]] = {
    "all_reduce": (_in_place, ours.all_reduce, partial(_in_place, dist.all_reduce)),
    "reduce_scatter": (_to_block, ours.reduce_scatter, _own_block_of_sum),
    "all_gather": (_to_all_blocks, ours.all_gather, lambda tensor: torch.cat(_of_all_ranks(tensor))),
    "broadcast": (_from_root, ours.broadcast, partial(_from_root, dist.broadcast)),
    "reduce": (_to_root, ours.reduce, partial(_to_root, dist.reduce)),
    "gather": (_gather, ours.gather, partial(_gather, dist.gather)),
    "scatter": (_scatter, ours.scatter, partial(_scatter, dist.scatter)),
    "all_to_all": (_to_each_rank, ours.all_to_all, partial(_to_each_rank, dist.all_to_all_single)),
    "barrier": (_barrier, ours.barrier, partial(_barrier, dist.barrier)),
    "scan": (_in_place, ours.scan, lambda tensor: _prefix(tensor, dist.get_rank() + 1)),
    "exclusive_scan": (
        partial(_in_place, exclusive=True),
        ours.scan,
        lambda tensor: _prefix(tensor, dist.get_rank()),
    ),
}
