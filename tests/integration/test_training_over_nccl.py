"""Training with CUDA tensors: pipelines, joined averagers and sharded parameters, over NCCL and over "dist_prims".

The backend "dist_prims" gives CUDA tensors to NCCL, and keeps those on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import REASON, device, on_ranks
from pipelines import a_batch, backward_order, stages_of, unsplit
from torch.nn import functional as F

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training.gradients import GradientAverager
from dist_prims.training.pipeline.processes import Pipeline
from dist_prims.training.sharding import ShardedParameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")]

CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # convolutions and products of a GPU are rounded otherwise


def pipelines() -> None:
    for name in pipeline_plans():
        plan = pipeline_plan(name, dist.get_world_size(), 5)
        stages, whole = ([each.to(device()) for each in stages_of(plan.stages)] for _ in range(2))
        pipeline = Pipeline(stages, plan, loss=F.mse_loss)
        inputs, targets = (each.to(device()) for each in a_batch())
        for _ in range(2):
            loss = pipeline.step(inputs.clone(), targets)
            wanted = unsplit(whole, inputs.clone(), targets, 5, backward_order(plan))
            torch.testing.assert_close(loss, wanted.float(), **CLOSE)
        for number, module in pipeline.stages.items():
            for mine, its in zip(module.parameters(), whole[number].parameters(), strict=True):
                assert (mine.grad is None) == (its.grad is None), (name, number)
                if its.grad is not None:
                    torch.testing.assert_close(mine.grad, its.grad, **CLOSE)


def joins() -> None:
    """Rank r has r + 1 batches. A rank that is done adds nothing; the mean is over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(2, 1, bias=False).to(device())
    averager = GradientAverager(model, overlap=True)
    with averager.join():
        for step in range(rank + 1):
            model.zero_grad()
            model(torch.full((1, 2), float(rank), device=device())).sum().backward()
            assert model.weight.grad.tolist() == [[sum(range(step, size)) / size] * 2], step


def sharded_parameters() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device())
    model = copy.deepcopy(plain)
    sharded = ShardedParameters(model)
    optimizers = torch.optim.SGD(sharded.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(dist.get_world_size(), 4, 5).to(device())
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x[dist.get_rank()]).square().mean().backward()
        plain(x.flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, found in sharded.state_dict().items():
        torch.testing.assert_close(found, plain.state_dict()[name], **CLOSE)


def averages_and_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for here in ("cpu", device()):
        total = torch.full((1031,), float(rank), device=here)
        dist.all_reduce(total)
        assert total.eq(size * (size - 1) / 2).all()
        parts = torch.empty(size, device=here)
        dist_prims.all_gather(parts, torch.tensor([float(rank)], device=here))
        assert parts.tolist() == list(range(size))
        model = torch.nn.Linear(3, 2).to(here)
        model(torch.ones(1, 3, device=here) * rank).sum().backward()
        dist_prims.average_gradients(model)
        assert model.weight.grad.tolist() == [[(size - 1) / 2] * 3] * 2


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "dist_prims"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("body", [pipelines, joins, sharded_parameters, averages_and_collectives])
def test_with_cuda_tensors(body: Callable[[], None], size: int, backend: str) -> None:
    on_ranks(size, body, backend)
