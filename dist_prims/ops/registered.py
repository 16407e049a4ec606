"""The operators as torch sees them: what they compute, the shape of it, and the derivative, itself made of them.

    forward            backward
    all_reduce sum     all_reduce sum
    all_gather         reduce_scatter sum
    all_to_all         all_to_all, the splits swapped
    broadcast          reduce to the root

They take the group by its name, a string, which is all that a graph can hold, and find it when they run. The first
dimension is the one that is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_compat import group_named
from .inductor_order import keep_order, teach_inductor
from .runtime import Carrier

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


@torch.library.custom_op("dist_prims::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    carrier = Carrier("all_reduce", group, x)
    result, how = carrier.operand(x, op)
    carrier.all_reduce(result, how)
    return result


@torch.library.custom_op("dist_prims::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, splits: Sequence[int], group: str) -> torch.Tensor:
    carrier = Carrier("all_gather", group, x)
    carrier.check_splits("splits", splits, sum(splits))
    mine = splits[carrier.rank]
    carrier.check(len(x) == mine, f"this rank has {len(x)} rows, and its part of splits={list(splits)} is {mine}")
    result = x.new_empty(sum(splits), *x.shape[1:])
    carrier.all_gather(result, x.contiguous(), splits)
    return result


@torch.library.custom_op("dist_prims::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, op: str, splits: Sequence[int], group: str) -> torch.Tensor:
    carrier = Carrier("reduce_scatter", group, x)
    carrier.check_splits("splits", splits, len(x))
    operand, how = carrier.operand(x, op)
    result = x.new_empty(splits[carrier.rank], *x.shape[1:])
    carrier.reduce_scatter(result, operand, how, splits)
    return result


@torch.library.custom_op("dist_prims::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> torch.Tensor:
    carrier = Carrier("all_to_all", group, x)
    carrier.check_splits("send", send, len(x))
    carrier.check_splits("receive", receive, sum(receive))
    result = x.new_empty(sum(receive), *x.shape[1:])
    carrier.all_to_all(result, x.contiguous(), list(receive), list(send))
    return result


@torch.library.custom_op("dist_prims::broadcast", mutates_args=())
def broadcast(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    carrier = Carrier("broadcast", group, x)
    result, _ = carrier.operand(x, "sum")
    carrier.broadcast(result, root)
    return result


@torch.library.custom_op("dist_prims::reduce", mutates_args=())
def reduce(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    carrier = Carrier("reduce", group, x)
    result, _ = carrier.operand(x, "sum")
    carrier.reduce(result, root)
    return result if carrier.rank == root else result.zero_()


def _like(x: torch.Tensor, rows: int | torch.SymInt | None = None) -> torch.Tensor:
    teach_inductor()
    return x.new_empty(x.shape if rows is None else (rows, *x.shape[1:]))


all_reduce.register_fake(lambda x, op, group: _like(x))
all_gather.register_fake(lambda x, splits, group: _like(x, sum(splits)))
reduce_scatter.register_fake(lambda x, op, splits, group: _like(x, splits[_rank(group)]))
all_to_all.register_fake(lambda x, send, receive, group: _like(x, sum(receive)))
broadcast.register_fake(lambda x, root, group: _like(x))
reduce.register_fake(lambda x, root, group: _like(x))


def _rank(group: str) -> int:
    return group_named(group).rank()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.how = inputs


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *ctx.how = inputs
    if ctx.how[0] in ("max", "min", "product"):
        ctx.save_for_backward(x, output)


def _from_all_reduce(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    op, group = ctx.how
    if op in ("sum", "mean"):
        return all_reduce(gradient, op, group), None, None
    x, output = ctx.saved_tensors
    if op == "product":  # of all others: x may be 0, so nothing is divided by it
        rank, rows = _rank(group), all_gather(x.unsqueeze(0), [1] * _size(group), group)
        others = torch.cat([rows[:rank], rows[rank + 1 :]]).prod(0)
        return all_reduce(gradient, "sum", group) * others.conj(), None, None
    held = x == output  # who holds the extreme shares the gradient with all others that do
    total, holders = all_reduce(torch.stack([gradient, held.to(gradient.dtype)]), "sum", group)
    return held * (total / holders), None, None  # a NaN is held by nobody: NaN on every rank, as of torch.amax


def _from_all_gather(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    splits, group = ctx.how
    return reduce_scatter(gradient, "sum", splits, group), None, None


def _from_reduce_scatter(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    op, splits, group = ctx.how
    if op not in ("sum", "mean"):
        remedy = "use all_reduce, which has one, and take this rank's part of its result"
        raise ValueError(f"dist_prims.ops.reduce_scatter on rank {_rank(group)}: op={op!r} has no gradient; {remedy}")
    share = gradient if op == "sum" else gradient / len(splits)
    return all_gather(share, splits, group), None, None, None


def _from_all_to_all(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    send, receive, group = ctx.how
    return all_to_all(gradient, receive, send, group), None, None, None


def _from_broadcast(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce(gradient, *ctx.how), None, None


def _from_reduce(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return broadcast(gradient, *ctx.how), None, None


def _size(group: str) -> int:
    return group_named(group).size()


all_reduce.register_autograd(_from_all_reduce, setup_context=_keep_operands)
all_gather.register_autograd(_from_all_gather, setup_context=_keep)
reduce_scatter.register_autograd(_from_reduce_scatter, setup_context=_keep)
all_to_all.register_autograd(_from_all_to_all, setup_context=_keep)
broadcast.register_autograd(_from_broadcast, setup_context=_keep)
reduce.register_autograd(_from_reduce, setup_context=_keep)
for _operator in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce):
    keep_order(_operator)
