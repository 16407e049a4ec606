"""Batches of fewer items than the plan has micro-batches: the last of an epoch, or a few that are evaluated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipelines import a_batch, compare, stages_of, unsplit
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training import DevicePipeline, GradientAverager, Pipeline

pytestmark = pytest.mark.usefixtures("one_thread")
MICROS = 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "backend"), [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims")])
def test_short_batches_give_what_the_batch_in_one_piece_gives(size: int, backend: str) -> None:
    def body() -> None:
        for name in pipeline_plans():
            plan = pipeline_plan(name, size, MICROS)
            mine, whole = stages_of(plan.stages), stages_of(plan.stages)
            pipeline = Pipeline(mine, plan, loss=F.mse_loss, metrics={"mae": F.l1_loss})
            for count in (9, 3, 1, 9, 3):  # between whole batches, and with layouts that are known
                inputs, targets = a_batch(count)
                loss = pipeline.step(inputs.clone(), targets)
                torch.testing.assert_close(loss, unsplit(whole, inputs.clone(), targets, 1, [0]).float())
                outputs = nn.Sequential(*whole)(inputs.clone()).detach()
                torch.testing.assert_close(pipeline.evaluate(inputs, targets), F.mse_loss(outputs, targets))
                torch.testing.assert_close(pipeline.measured["mae"], F.l1_loss(outputs, targets))
                torch.testing.assert_close(pipeline.forward(inputs, everywhere=True), outputs)
            compare(pipeline.stages, whole, exact=False)

    dist_prims.spawn(body, size, backend=backend, timeout=110)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_short_batches_are_averaged_once(name: str) -> None:
    """A stage is complete after the last micro-batch that there is. The copies may have different numbers of them."""

    def body() -> None:
        plan = pipeline_plan(name, 2, MICROS)
        stages, whole = stages_of(plan.stages), stages_of(plan.stages)
        pipeline = DevicePipeline(stages, plan, devices=["cpu"] * 2, loss=F.mse_loss)
        GradientAverager(nn.ModuleList(stages), bucket_mb=1e-5)
        counts = [3, 5]
        pipeline.step(*a_batch(counts[dist.get_rank()]))
        for count in counts:
            unsplit(whole, *a_batch(count), 1, [0])
        for parameter in nn.ModuleList(whole).parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
        compare(pipeline.stages, whole, exact=False)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
