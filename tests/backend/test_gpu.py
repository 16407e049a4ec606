"""Collectives and gradient averaging on CUDA: skipped, with the reason, where there is none.

On one GPU all ranks share it, which NCCL allows from 2.30 on; on more each rank has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import REASON, device, on_two_ranks

import dist_prims
from dist_prims.schedules import algorithms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")]


def all_reduces() -> None:
    for name in algorithms("all_reduce"):
        for count in (0, 1, 1031):
            for segment_bytes in (0, 64):
                tensor = torch.arange(count, device=device()) + dist.get_rank()
                dist_prims.all_reduce(tensor, algorithm=name, segment_bytes=segment_bytes)
                assert torch.equal(tensor.cpu(), 2 * torch.arange(count) + 1), (name, count)


def other_collectives() -> None:
    rank, here = dist.get_rank(), device()
    output = torch.zeros(4, device=here)
    dist_prims.all_gather(output, torch.full((2,), float(rank), device=here))
    assert output.tolist() == [0, 0, 1, 1]
    mine = torch.zeros(2, device=here)
    dist_prims.reduce_scatter(mine, torch.arange(4.0, device=here))
    assert mine.tolist() == [4.0 * rank, 4.0 * rank + 2]
    swapped = torch.zeros(2, device=here)
    dist_prims.all_to_all(swapped, torch.tensor([2.0 * rank, 2.0 * rank + 1], device=here))
    assert swapped.tolist() == [rank, 2.0 + rank]
    dist_prims.broadcast(mine, src=1)
    assert mine.tolist() == [4.0, 6.0]


def async_work_behind_a_kernel() -> None:
    tensor = torch.ones(1 << 20, device=device())
    for _ in range(20):
        tensor = tensor * 1.0  # still running when the collective is called
    work = dist_prims.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert bool((tensor == 2).all())


def averages() -> None:
    model = torch.nn.Linear(3, 2).to(device())
    model(torch.ones(1, 3, device=device()) * (dist.get_rank() + 1)).sum().backward()
    dist_prims.average_gradients(model)
    assert model.weight.grad.tolist() == [[1.5] * 3] * 2


@pytest.mark.parametrize("body", [all_reduces, other_collectives, async_work_behind_a_kernel, averages])
def test_on_two_ranks(body: Callable[[], None]) -> None:
    on_two_ranks(body)
