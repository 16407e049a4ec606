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

from ..agreement import check_lists, gather_values
from ..collectives import all_reduce
from ..collectives.call import group_of
from ..collectives.flat import cut
from .gradients.bucket_layout import fill_buckets
from .gradients.gradient_presence import DENSE, SPARSE, kind_of
from .gradients.initial_sync import dtensor_problem

__all__: list[str] = []

_REMEDY = "Every rank must have the same names, shapes and types of parameters that require a gradient"


def average_gradients(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_mb: float = 25,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> None:
    """Replace each gradient by its mean over the ranks; call it between ``backward()`` and ``step()``.

    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> average_gradients(model)
    >>> model.weight.grad
    tensor([[3., 3.]])

    Parameters without a gradient on any rank keep none. Memory beside the model: one bucket. The other
    arguments have the meaning that they have for :func:`dist_prims.all_reduce`.
    """
    if bucket_mb <= 0:
        raise ValueError(f"average_gradients: bucket_mb={bucket_mb} must be positive")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    members = group_of(group, "average_gradients")
    kinds = _kinds_of_all_ranks(named, members)
    if SPARSE in kinds:
        name = named[kinds.index(SPARSE)][0]
        raise ValueError(
            f"average_gradients: parameter {name!r} has a sparse gradient, on this rank or another; "
            "make its layer with sparse=False, or average it by itself after .to_dense()"
        )
    taking_part = [parameter for (_, parameter), kind in zip(named, kinds, strict=True) if kind == DENSE]
    options = {"algorithm": algorithm, "segment_bytes": segment_bytes}
    for numbers in fill_buckets(taking_part, range(len(taking_part)), int(bucket_mb * 2**20)):
        _average([taking_part[number] for number in numbers], group, options)


def _kinds_of_all_ranks(named: list[tuple[str, torch.nn.Parameter]], group: dist.ProcessGroup) -> list[int]:
    """For each parameter the largest kind of gradient on any rank; every rank raises if their models differ."""
    model = zlib.crc32(repr([(name, [*each.shape], each.dtype) for name, each in named]).encode())
    mine = "".join(str(kind_of(each)) for _, each in named)
    failure = dtensor_problem("average_gradients", named, group)
    models, kinds = zip(*gather_values((model, mine), group, "average_gradients", failure), strict=True)
    texts = [[f"parameters with the checksum {each:08x}"] for each in models]
    check_lists("average_gradients", texts, _REMEDY, group)
    return [max(map(int, of_ranks)) for of_ranks in zip(*kinds, strict=True)]


def _average(bucket: list[torch.nn.Parameter], group: dist.ProcessGroup | None, options: dict[str, Any]) -> None:
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
    flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
    all_reduce(flat, dist.ReduceOp.AVG, group, **options)
    for gradient, mean in zip(gradients, cut(flat, [each.numel() for each in gradients]), strict=True):
        gradient.detach().copy_(mean.view_as(gradient))
