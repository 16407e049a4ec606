"""Collectives as operators for compiled graphs: functional, differentiable, with shapes known to the compiler.

Each function returns a new tensor and is one registered operator of the namespace ``dist_prims``. A model that calls it
compiles into one graph (``fullgraph=True``), including the backward pass, can be exported, and runs over any backend.

The operators differentiate the *sum of the losses of all ranks*. A loss that every rank computes from the result of an
``all_reduce`` therefore counts once for each rank. With ``op="avg"`` it counts once.

The derivative of an operator is a collective too. So on every rank the argument must require a gradient, and every rank
must do the backward pass through the result: a rank that does not use the result ``y`` adds ``0 * y.sum()`` to its
loss. If a rank does not, the others wait for it until the timeout of the group.

A compiler may move or remove an operator without side effects, and each rank compiles its own graph: where the graphs
differ slightly, rank 0 could begin with a collective that rank 1 calls last, which is a deadlock. Each operator
therefore has PyTorch's effect ORDERED: the compiler passes a token from each operator to the next one of the program,
in the forward and in the backward pass, and so keeps their order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.utils._pytree import tree_map

from .collectives.call import group_of
from .torch_compat import all_gather_single, group_named, reduce_scatter_single

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def all_reduce(x: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Reduce the tensors of all ranks by "sum", "avg", "max", "min" or "product"; every rank gets the result.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> all_reduce(x, "avg").sum().backward()
    >>> x.grad
    tensor([1., 1.])

    "avg" divides each input by the number of ranks before it adds, so that float16 does not overflow. Only "sum" and
    "avg" have a gradient.
    """
    members = _group(group)
    return _all_reduce(*_as_sum(x, op, members), members.group_name)  # type: ignore[no-any-return]


def all_gather(x: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, which must have the same shape, along ``dim`` on every rank.

    >>> all_gather(torch.ones(2, 3), dim=1).shape
    torch.Size([2, 3])
    """
    return _all_gather(x.movedim(dim, 0), _group(group).group_name).movedim(0, dim)  # type: ignore[no-any-return]


def reduce_scatter(
    x: torch.Tensor, op: str = "sum", dim: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce the tensors of all ranks; rank r gets part r of the result, which is split evenly along ``dim``.

    >>> reduce_scatter(torch.ones(4, 3)).shape
    torch.Size([4, 3])
    """
    members = _group(group)
    return _reduce_scatter(*_as_sum(x.movedim(dim, 0), op, members), members.group_name).movedim(0, dim)  # type: ignore[no-any-return]


def all_to_all(
    x: torch.Tensor,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Exchange rows of ``x`` between all ranks.

    The rows are split evenly, or ``send[r]`` rows go to rank r and ``receive[r]`` rows come from it.

    >>> all_to_all(torch.arange(3.0), send=[3], receive=[3])
    tensor([0., 1., 2.])
    """
    members = _group(group)
    if send is None and receive is None:
        send = receive = [x.shape[0] // members.size()] * members.size()
    if send is None or receive is None:
        raise ValueError(f"dist_prims.ops on rank {members.rank()}: give both send={send} and receive={receive}")
    return _all_to_all(x, list(send), list(receive), members.group_name)  # type: ignore[no-any-return]


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return group_of(group, "dist_prims.ops")


def _as_sum(x: torch.Tensor, op: str, group: dist.ProcessGroup) -> tuple[torch.Tensor, str]:
    """Return the tensor to reduce and the operation: an average is the sum of quotients."""
    return (x / group.size(), "sum") if op == "avg" else (x, op)


_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "max", "min", "product")}


def _contiguous_copy(x: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of ``x`` to reduce with ``_OPS[op]``."""
    if op not in _OPS:
        raise ValueError(
            f"dist_prims.ops on rank {group.rank()}: op={op!r}: op must be one of 'avg', {str([*_OPS])[1:-1]}"
        )
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("dist_prims::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    process_group = group_named(group)
    result = _contiguous_copy(x, op, process_group)
    dist.all_reduce(result, _OPS[op], process_group)
    return result


@torch.library.custom_op("dist_prims::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    process_group = group_named(group)
    result = x.new_empty(x.shape[0] * process_group.size(), *x.shape[1:])
    all_gather_single(result, x.contiguous(), group=process_group)
    return result


@torch.library.custom_op("dist_prims::reduce_scatter", mutates_args=())
def _reduce_scatter(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    process_group = group_named(group)
    result = x.new_empty(x.shape[0] // process_group.size(), *x.shape[1:])
    reduce_scatter_single(result, _contiguous_copy(x, op, process_group), op=_OPS[op], group=process_group)
    return result


@torch.library.custom_op("dist_prims::all_to_all", mutates_args=())
def _all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> torch.Tensor:
    result = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), list(receive), list(send), group=group_named(group))
    return result


def _fake(x: torch.Tensor, *shape: int | torch.SymInt) -> torch.Tensor:
    """The result of an operator without its values, for the compiler."""
    _register_lowerings()  # here, because Inductor is loaded late, and asks for shapes before it lowers an operator
    return x.new_empty(shape)


_all_reduce.register_fake(lambda x, op, group: _fake(x, *x.shape))
_all_gather.register_fake(lambda x, group: _fake(x, x.shape[0] * group_named(group).size(), *x.shape[1:]))
_reduce_scatter.register_fake(lambda x, op, group: _fake(x, x.shape[0] // group_named(group).size(), *x.shape[1:]))
_all_to_all.register_fake(lambda x, send, receive, group: _fake(x, sum(receive), *x.shape[1:]))


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.arguments, ctx.group = inputs


def _group_if_sum(ctx: Any) -> str:
    if ctx.arguments != ["sum"]:
        raise ValueError(f"dist_prims.ops: op={ctx.arguments[0]!r} has no gradient; use 'sum', or reduce x.detach()")
    return str(ctx.group)


_DERIVATIVES = {
    _all_reduce: lambda ctx, gradient: (_all_reduce(gradient, "sum", _group_if_sum(ctx)), None, None),
    _all_gather: lambda ctx, gradient: (_reduce_scatter(gradient, "sum", ctx.group), None),
    _reduce_scatter: lambda ctx, gradient: (_all_gather(gradient, _group_if_sum(ctx)), None, None),
    _all_to_all: lambda ctx, gradient: (_all_to_all(gradient, *ctx.arguments[::-1], ctx.group), None, None, None),
}
for _operator, _derivative in _DERIVATIVES.items():
    _operator.register_autograd(_derivative, setup_context=_save_arguments)
    _operator.register_effect(EffectType.ORDERED)


def _register_lowerings() -> None:
    """Make Inductor, if it is loaded, keep the order of the operators.

    Up to torch 2.13 Inductor stores the tokens under the name of a buffer, but looks for them under the name of an
    operation, finds none, and loses the order (github.com/pytorch/pytorch/pull/189209). These lowerings store the
    tokens under the name of the operation as well.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    for operator in [each._opoverload for each in _DERIVATIVES] if lowering else []:
        if operator not in lowering.lowerings:
            lowering.register_lowering(operator, type_promotion_kind=None)(_lowering_after_previous(operator))


def _lowering_after_previous(operator: Any) -> Any:
    """Make the function that replaces a call of the operator by Inductor's operations."""

    def lower(*args: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        # 1. The operations before this one, and the last of them that has the effect.
        begin, previous = len(V.graph.operations), V.graph.effectful_ops.get(EffectType.ORDERED)
        # 2. This operator adds its own operations.
        result = ir.FallbackKernel.create(operator, *args)
        # 3. Each added operation comes after the previous operation with the effect.
        for operation in V.graph.operations[begin:] if previous else []:
            V.graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())  # type: ignore[union-attr]
        return tree_map(lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, result)

    return lower
