"""The types of the collectives: mypy checks this file as strictly as the package, and nothing runs it.

The type of an asynchronous call was that of a work or None, so ``work.wait()`` was an error of the type checker.
"""

# mypy: strict-optional

from __future__ import annotations

import torch
from typing_extensions import assert_type

import dist_prims
from dist_prims.collectives.call import AnyWork


def an_asynchronous_call_returns_a_work(data: torch.Tensor, parts: list[torch.Tensor], flag: bool) -> None:
    for work in (
        dist_prims.all_reduce(data, async_op=True, output=data),
        dist_prims.reduce_scatter(data, parts, async_op=True),
        dist_prims.all_gather(parts, data, async_op=True, algorithm="ring"),
        dist_prims.all_to_all(data, data, async_op=True),
        dist_prims.scan(data, async_op=True),
        dist_prims.barrier(async_op=True),
        dist_prims.broadcast(data, 0, async_op=True),
        dist_prims.reduce(data, 0, async_op=True),
        dist_prims.gather(data, parts, 0, async_op=True),
        dist_prims.scatter(data, parts, 0, async_op=True),
    ):
        assert_type(work, AnyWork)
        work.wait()
    assert_type(dist_prims.all_reduce(data, async_op=flag), AnyWork | None)
