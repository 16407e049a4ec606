"""Blocking gradient averaging for synchronous data-parallel training: after it, every rank takes the same step.

One all-reduce a parameter pays the latency hundreds of times a step, so gradients travel packed in flat buckets. A
parameter may have no gradient on some ranks (a branch that their batch did not take): those count as zeros, since ranks
that skip a parameter would pair the wrong messages from there on. First the ranks agree on which gradients exist.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import all_reduce
from ..collectives.algorithm_choice import CHEAPEST
from ..collectives.flat import cut
from ..errors import MismatchError
from .gradients.bucket_layout import plan
from .gradients.initial_sync import dtensor_refusal, is_dtensor

__all__: list[str] = []

_NONE, _DENSE, _SPARSE, _PARTS = range(4)


def average_gradients(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_mb: float = 25,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> None:
    """Replace each gradient by its mean over the ranks; call it between ``backward()`` and ``step()``.

    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> average_gradients(model)
    >>> model.weight.grad
    tensor([[3., 3.]])

    Parameters without a gradient on any rank keep none. Memory beside the model: one bucket. The other
    arguments are those of :func:`dist_prims.all_reduce`.
    """
    if bucket_mb <= 0:
        raise ValueError(f"average_gradients: bucket_mb={bucket_mb} must be positive")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = _agree([_kind(parameter) for _, parameter in named], named, group)
    if _PARTS in kinds:
        raise ValueError(dtensor_refusal(dist.get_rank(group), "average_gradients", named[kinds.index(_PARTS)][0]))
    if _SPARSE in kinds:
        name = named[kinds.index(_SPARSE)][0]
        raise ValueError(
            f"average_gradients: parameter {name!r} has a sparse gradient, on this rank or another; "
            "make its layer with sparse=False, or average it by itself after .to_dense()"
        )
    taking_part = [parameter for (_, parameter), kind in zip(named, kinds, strict=True) if kind == _DENSE]
    options = {"algorithm": algorithm, "segment_bytes": segment_bytes, **parameters}
    for numbers in plan(taking_part, range(len(taking_part)), int(bucket_mb * 2**20)):
        _average([taking_part[number] for number in numbers], group, options)


def _kind(parameter: torch.nn.Parameter) -> int:
    if is_dtensor(parameter):
        return _PARTS
    if parameter.grad is None:
        return _NONE
    return _SPARSE if parameter.grad.layout != torch.strided else _DENSE


def _agree(kinds: list[int], named: list[tuple[str, torch.nn.Parameter]], group: dist.ProcessGroup | None) -> list[int]:
    """For each parameter the largest kind of any rank; MismatchError on all ranks if their models differ."""
    if not kinds:
        return kinds
    model = zlib.crc32(repr([(name, [*each.shape], each.dtype) for name, each in named]).encode())
    table = torch.tensor([*kinds, model, -model], device=named[0][1].device)
    all_reduce(table, dist.ReduceOp.MAX, group, algorithm=CHEAPEST)  # which compares the numbers of parameters
    *largest, most, least = table.tolist()
    if most != -least:
        raise MismatchError(
            f"average_gradients on rank {dist.get_rank(group)}: the models of two ranks differ in names, shapes or "
            "types of parameters that require a gradient, no gradient was touched; every rank must have the same model"
        )
    return [int(kind) for kind in largest]


def _average(bucket: list[torch.nn.Parameter], group: dist.ProcessGroup | None, options: dict[str, Any]) -> None:
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
    flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
    all_reduce(flat, dist.ReduceOp.AVG, group, **options)
    for gradient, mean in zip(gradients, cut(flat, [each.numel() for each in gradients]), strict=True):
        gradient.detach().copy_(mean.view_as(gradient))
