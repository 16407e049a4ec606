"""The types of the collectives: mypy checks this file as strictly as the package, and nothing runs it."""

# mypy: strict-optional

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import assert_type

import dist_prims


def a_call_returns_a_work_of_torch_or_none(data: torch.Tensor, parts: list[torch.Tensor], flag: bool) -> None:
    for work in (
        dist_prims.all_reduce(data, async_op=True, output=data),
        dist_prims.reduce_scatter(data, parts, async_op=True),
        dist_prims.all_gather(parts, data, async_op=True, algorithm="ring"),
        dist_prims.all_to_all(data, data, async_op=True),
        dist_prims.scan(data, async_op=True),
        dist_prims.barrier(async_op=True),
        dist_prims.broadcast(data, 0, async_op=True),
        dist_prims.reduce(data, 0, async_op=flag),
        dist_prims.gather(data, parts, 0, async_op=True),
        dist_prims.scatter(data, parts, 0, async_op=True),
    ):
        assert_type(work, dist.Work | None)
