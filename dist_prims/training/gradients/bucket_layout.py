"""Layout of buckets: the place of each gradient, and the memory.

Buckets are sent in their order, the same on every rank, each as soon as it is full. So the order should be the one in
which backward fills them: at first the reversed order of the parameters, later the order that rank 0 has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...backend import empty
from ...torch_compat import backend_of
from ..compression.compressor import Bucket

__all__: list[str] = []


@dataclass
class BucketLayout:
    """The buckets, and the place of each parameter, by its number."""

    buckets: list[Bucket]
    members: list[list[int]]  # of each bucket: its parameters
    place: dict[int, tuple[int, torch.Tensor]]  # of each parameter: its bucket, and its gradient there


def fill_buckets(parameters: Sequence[torch.Tensor], order: Sequence[int], limit: int) -> list[list[int]]:
    """The numbers of the parameters in each bucket: of one dtype and device, in the order of ``order``, with at most
    ``limit`` bytes, or one parameter. Buckets are in the order in which they are full.

    >>> fill_buckets([torch.ones(2), torch.ones(2), torch.ones(2).double()], [2, 1, 0], limit=8)
    [[2], [1], [0]]
    >>> fill_buckets([torch.ones(2), torch.ones(2).double(), torch.ones(2)], [0, 1, 2], limit=16)
    [[1], [0, 2]]
    """
    buckets: list[tuple[int, list[int]]] = []  # of each the place in ``order`` at which it is full, and its parameters
    latest: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # the bucket that is filled, and its bytes
    for position, number in enumerate(order):
        parameter = parameters[number]
        kind = parameter.dtype, parameter.device
        bucket, nbytes = latest.get(kind, (len(buckets), 0))
        if nbytes and nbytes + parameter.nbytes > limit:
            bucket, nbytes = len(buckets), 0
        if bucket == len(buckets):
            buckets.append((position, []))
        buckets[bucket] = (position, [*buckets[bucket][1], number])
        latest[kind] = bucket, nbytes + parameter.nbytes
    return [numbers for _, numbers in sorted(buckets)]


def lay_out(parameters: Sequence[torch.Tensor], members: list[list[int]], group: dist.ProcessGroup) -> BucketLayout:
    """Buckets in fresh memory. Gradients that the parameters have move there, bucket by bucket, so that old buckets go
    as new ones come; a caller that keeps the old ones keeps all of their memory."""
    layout = BucketLayout([], members, {})
    for index, numbers in enumerate(members):
        first = parameters[numbers[0]]
        flat = _memory(sum(parameters[number].numel() for number in numbers), first, group)
        views = []
        begin = 0
        for number in numbers:
            parameter = parameters[number]
            view = _shaped(flat[begin : begin + parameter.numel()], parameter)
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view
            begin += parameter.numel()
            views.append(view)
            layout.place[number] = index, view
        layout.buckets.append(Bucket(index, flat, views))
    return layout


def _memory(count: int, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Memory of a bucket: shared memory, where the backend reduces it without a copy."""
    if like.device.type == "cpu" and our_backend(group):
        return empty(count, like.dtype)
    return torch.empty(count, dtype=like.dtype, device=like.device)


def our_backend(group: dist.ProcessGroup) -> Any:
    """The group's backend for the CPU if it is dist_prims, else None."""
    try:
        backend = backend_of(group, torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return None
    return backend if hasattr(backend, "incremental_reduce") else None


def _shaped(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view with the strides of the parameter if these are dense, so that channels_last is kept."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view(parameter.shape)
