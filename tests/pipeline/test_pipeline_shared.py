"""Tensors that several stages of a pipeline share: refused where ranks would train copies apart, else allowed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan
from dist_prims.training import DevicePipeline, Pipeline
from dist_prims.training.pipeline import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")
SAME = "pipeline: weight in stage 0 and weight in stage 1 are the same tensor, which would get only a part"


def tied(count: int, first: int = 0, second: int = 1) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(4, 4) for _ in range(count)]
    made[second].weight = made[first].weight
    return made


def test_ranks_do_not_train_copies_of_a_parameter() -> None:
    """Each rank once trained its copy of a tied weight with a part of the gradient, and the copies differed."""

    class Head(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(output @ self.weight, target)

    def body() -> None:
        with pytest.raises(ValueError, match=SAME):
            Pipeline(tied(2), loss=F.mse_loss)
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        with pytest.raises(ValueError, match=r"weight in stage 0 and loss\.weight in stage 1 are the same tensor"):
            Pipeline(layers, loss=Head(layers[0].weight))
        norm = nn.BatchNorm1d(4, affine=False)
        with pytest.raises(
            ValueError, match=r"running_mean in stage 0 and running_mean in stage 1 .* running statistic"
        ):
            Pipeline([norm, norm], loss=F.mse_loss)
        Pipeline([norm.eval(), norm], loss=F.mse_loss)
        dist.barrier()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_frozen_shared_parameter_may_not_be_trained_later() -> None:
    def body() -> None:
        layers = tied(2)
        layers[0].weight.requires_grad_(False)
        pipeline = Pipeline(layers, loss=F.mse_loss, num_microbatches=2)
        x = torch.ones(4, 4)
        loss = pipeline.step(x, x)
        torch.testing.assert_close(loss, F.mse_loss(nn.Sequential(*layers)(x), x).detach())
        layers[0].weight.requires_grad_(dist.get_rank() == 1)
        with pytest.raises(StageFailedError, match=f"rank 1: step failed: ValueError: {SAME}"):
            pipeline.step(x, x)
        assert pipeline.evaluate(x, x) == loss

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_stages_of_one_rank_may_share_a_trained_parameter(name: str) -> None:
    def body() -> None:
        plan = pipeline_plan(name, 2, 4)
        mine = [stage for stage in range(plan.stages) if plan.rank_of[stage] == 0]
        layers = tied(plan.stages, *mine[:2])
        whole: Any = copy.deepcopy(nn.Sequential(*layers))
        pipeline = Pipeline(layers, plan, loss=F.mse_loss)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        pipeline.step(x, y)
        F.mse_loss(whole(x), y).backward()
        for number, stage in pipeline.stages.items():
            torch.testing.assert_close(stage.weight.grad, whole[number].weight.grad)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
    layers = tied(2)
    whole, x = copy.deepcopy(nn.Sequential(*layers)), torch.ones(4, 4)
    DevicePipeline(layers, devices=["cpu"] * 2, loss=F.mse_loss).step(x, x)
    F.mse_loss(whole(x), x).backward()
    torch.testing.assert_close(layers[0].weight.grad, whole[0].weight.grad)
