"""A model for the tests of ``training.sharding``, and the plain run that a sharded one must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import dist_prims


def loss_of(model: torch.nn.Module, step: int, rank: int, branch: int | None = None) -> torch.Tensor:
    x = torch.randint(7, (5,), generator=torch.Generator().manual_seed(100 * step + rank))
    y = model(x, rank % 2 if branch is None else branch)
    return torch.nn.functional.cross_entropy(y, (x + 1) % 7)


def average(model: torch.nn.Module) -> None:
    """As plain as can be, and in the order of DistributedDataParallel: divided, then added."""
    for parameter in model.parameters():
        there = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(there)
        if there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def alike(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor], exact: bool = True) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}))


def spawn(body: Callable[..., Any], size: int, *args: Any, backend: str = "dist_prims") -> list[Any]:
    return dist_prims.spawn(body, size, args, backend=backend, timeout=60)


def nbytes(tensors: Iterable[Any]) -> int:
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (value for each in optimizer.state.values() for value in each.values() if value.dim())
