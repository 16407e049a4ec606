"""Operators registered with torch: implementation, shape of the result, and derivative in terms of the operators.

    forward            backward
    all_reduce sum     all_reduce sum
    all_gather         reduce_scatter sum
    all_to_all         all_to_all, the splits swapped
    broadcast          reduce to the root

An operator takes the name of the group, because a graph can contain a string but no group, and looks the group up when
it runs. Splits apply to the first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_compat import group_named
from .inductor_order import keep_order, register_lowerings
from .runtime import GroupCall

__all__: list[str] = []


@torch.library.custom_op("dist_prims::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    call = GroupCall("all_reduce", group, x)
    result, reduce_op = call.operand(x, op)
    call.all_reduce(result, reduce_op)
    return result


@torch.library.custom_op("dist_prims::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, splits: Sequence[int], group: str) -> torch.Tensor:
    call = GroupCall("all_gather", group, x)
    call.check_splits("splits", splits, sum(splits))
    mine = splits[call.rank]
    call.check(len(x) == mine, f"this rank has {len(x)} rows, and its part of splits={list(splits)} is {mine}")
    result = x.new_empty(sum(splits), *x.shape[1:])
    call.all_gather(result, x.contiguous(), splits)
    return result


@torch.library.custom_op("dist_prims::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, op: str, splits: Sequence[int], group: str) -> torch.Tensor:
    call = GroupCall("reduce_scatter", group, x)
    call.check_splits("splits", splits, len(x))
    operand, reduce_op = call.operand(x, op)
    result = x.new_empty(splits[call.rank], *x.shape[1:])
    call.reduce_scatter(result, operand, reduce_op, splits)
    return result


@torch.library.custom_op("dist_prims::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> torch.Tensor:
    call = GroupCall("all_to_all", group, x)
    call.check_splits("send", send, len(x))
    call.check_splits("receive", receive, sum(receive))
    result = x.new_empty(sum(receive), *x.shape[1:])
    call.all_to_all(result, x.contiguous(), list(receive), list(send))
    return result


@torch.library.custom_op("dist_prims::broadcast", mutates_args=())
def broadcast(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    call = GroupCall("broadcast", group, x)
    result, _ = call.operand(x, "sum")
    call.broadcast(result, root)
    return result


@torch.library.custom_op("dist_prims::reduce", mutates_args=())
def reduce(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    call = GroupCall("reduce", group, x)
    result, _ = call.operand(x, "sum")
    call.reduce(result, root)
    return result if call.rank == root else result.zero_()


def _fake_result(x: torch.Tensor, rows: int | torch.SymInt | None = None) -> torch.Tensor:
    register_lowerings()
    return x.new_empty(x.shape if rows is None else (rows, *x.shape[1:]))


all_reduce.register_fake(lambda x, op, group: _fake_result(x))
all_gather.register_fake(lambda x, splits, group: _fake_result(x, sum(splits)))
reduce_scatter.register_fake(lambda x, op, splits, group: _fake_result(x, splits[_rank(group)]))
all_to_all.register_fake(lambda x, send, receive, group: _fake_result(x, sum(receive)))
broadcast.register_fake(lambda x, root, group: _fake_result(x))
reduce.register_fake(lambda x, root, group: _fake_result(x))


def _rank(group: str) -> int:
    return group_named(group).rank()


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.arguments = inputs


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *ctx.arguments = inputs
    if ctx.arguments[0] in ("max", "min", "product"):
        ctx.save_for_backward(x, output)


def _derivative_of_all_reduce(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    op, group = ctx.arguments
    if op in ("sum", "avg"):
        return all_reduce(gradient, op, group), None, None
    x, output = ctx.saved_tensors
    if op == "product":  # of all other ranks; not output / x, because x may be 0
        rank, rows = _rank(group), all_gather(x.unsqueeze(0), [1] * _size(group), group)
        others = torch.cat([rows[:rank], rows[rank + 1 :]]).prod(0)
        return all_reduce(gradient, "sum", group) * others.conj(), None, None
    is_extreme = x == output  # ranks with the extreme value share the gradient
    total, holders = all_reduce(torch.stack([gradient, is_extreme.to(gradient.dtype)]), "sum", group)
    return is_extreme * (total / holders), None, None  # no value equals NaN: NaN on every rank, as in torch.amax


def _derivative_of_all_gather(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    splits, group = ctx.arguments
    return reduce_scatter(gradient, "sum", splits, group), None, None


def _derivative_of_reduce_scatter(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    op, splits, group = ctx.arguments
    if op not in ("sum", "avg"):
        remedy = "use all_reduce, which has one, and this rank's part of its result"
        raise ValueError(f"dist_prims.ops.reduce_scatter on rank {_rank(group)}: op={op!r} has no gradient; {remedy}")
    share = gradient if op == "sum" else gradient / len(splits)
    return all_gather(share, splits, group), None, None, None


def _derivative_of_all_to_all(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    send, receive, group = ctx.arguments
    return all_to_all(gradient, receive, send, group), None, None, None


def _derivative_of_broadcast(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce(gradient, *ctx.arguments), None, None


def _derivative_of_reduce(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return broadcast(gradient, *ctx.arguments), None, None


def _size(group: str) -> int:
    return group_named(group).size()


all_reduce.register_autograd(_derivative_of_all_reduce, setup_context=_save_operands)
all_gather.register_autograd(_derivative_of_all_gather, setup_context=_save_arguments)
reduce_scatter.register_autograd(_derivative_of_reduce_scatter, setup_context=_save_arguments)
all_to_all.register_autograd(_derivative_of_all_to_all, setup_context=_save_arguments)
broadcast.register_autograd(_derivative_of_broadcast, setup_context=_save_arguments)
reduce.register_autograd(_derivative_of_reduce, setup_context=_save_arguments)
for _operator in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce):
    keep_order(_operator)
