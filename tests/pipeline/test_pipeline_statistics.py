"""Running statistics of norms in a pipeline: those of one update with the statistics of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training import DevicePipeline, Pipeline
from dist_prims.training.pipeline import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")
MICROS = 5


class Own(nn.BatchNorm2d):
    """A class of a program's own, whose momentum is that of a mean over all batches."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Functional(nn.Module):
    """No norm by its class, called twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.variance: torch.Tensor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.batch_norm(2 * x, self.mean, self.variance, training=self.training, momentum=0.3) + 1
        return x


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.inner, x, use_reentrant=False)


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm2d(3),
    lambda: Own(3),
    lambda: Functional(3),
    lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    lambda: Checkpointed(nn.BatchNorm2d(3)),
    lambda: nn.BatchNorm2d(3, track_running_stats=False),
    lambda: nn.BatchNorm2d(3).eval(),
]


def a_norm_of(norm: int, micro: int) -> torch.Tensor:
    """Inputs that differ from micro-batch to micro-batch."""
    torch.manual_seed(10 * norm + micro)
    return torch.randn(2, 3, 2, 2) * (1 + micro) + torch.randn(3, 1, 1) * micro


def stages_of(count: int, norm: int) -> list[nn.Module]:
    """Each a norm that sees the same whether or not those before it saw micro-batches: these only learn beside it."""
    torch.manual_seed(0)
    return [Beside(NORMS[norm]()) for _ in range(count)]


class Beside(nn.Module):
    """Passes on its input and adds to what is learned from: so what comes to a norm does not depend on other norms."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), norm

    def forward(self, x: torch.Tensor, learned: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.norm(self.layer(x))
        return x, found if learned is None else learned + found


def loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[1], target)


def in_one_piece(stages: list[nn.Module], x: torch.Tensor) -> None:
    with torch.no_grad():
        state: Any = (x,)
        for stage in stages:
            state = stage(*state)


def compare(own: Mapping[int, nn.Module], whole: list[nn.Module]) -> None:
    for number, stage in own.items():
        for name, buffer in stage.named_buffers():
            its = whole[number].get_buffer(name)
            torch.testing.assert_close(buffer, its, rtol=1e-5, atol=1e-4, msg=(name + ": {}").format)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("norm", range(len(NORMS)))
@pytest.mark.parametrize("checkpoint", [False, True])
def test_statistics_are_those_of_the_batch_in_one_piece(norm: int, checkpoint: bool) -> None:
    """They moved once a micro-batch, and further where a forward was computed again."""
    for name in pipeline_plans()[(norm + checkpoint) % 3 :: 3]:  # each plan with most norms, and with both
        plan = pipeline_plan(name, 2, MICROS)
        mine = stages_of(plan.stages, norm)
        whole = copy.deepcopy(mine)
        pipeline = DevicePipeline(mine, plan, devices=["cpu"] * 2, loss=loss, checkpoint=checkpoint)
        for count in (MICROS, 3):
            inputs = torch.cat([a_norm_of(norm, micro) for micro in range(count)])
            if count < MICROS:
                inputs = inputs[::2]  # a batch of fewer items than micro-batches
            pipeline.step(inputs, inputs)
            in_one_piece(whole, inputs)
            compare(pipeline.stages, whole)
        pipeline.evaluate(inputs, inputs)  # still in training, as the modules are
        in_one_piece(whole, inputs)
        compare(pipeline.stages, whole)


def test_statistics_across_ranks() -> None:
    def body() -> None:
        for name in pipeline_plans():
            plan = pipeline_plan(name, 2, MICROS)
            mine = stages_of(plan.stages, 0)
            whole = copy.deepcopy(mine)
            pipeline = Pipeline(mine, plan, loss=loss)
            inputs = torch.cat([a_norm_of(0, micro) for micro in range(MICROS)])
            for _ in range(2):
                pipeline.step(inputs, inputs)
                in_one_piece(whole, inputs)
            pipeline.eval().evaluate(inputs, inputs)
            compare(pipeline.stages, whole)
            assert all(stage.get_buffer("norm.num_batches_tracked") == 2 for stage in pipeline.stages.values())

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_step_that_fails_moves_no_statistics() -> None:
    def body() -> None:
        mine = stages_of(2, 0)
        whole = copy.deepcopy(mine)
        pipeline = Pipeline(mine, "1f1b", loss=loss, num_microbatches=MICROS)
        inputs = torch.cat([a_norm_of(0, micro) for micro in range(MICROS)])
        with pytest.raises(StageFailedError, match="must match the size"):
            pipeline.step(inputs, torch.cat([inputs, inputs], 1))
        compare(pipeline.stages, whole)
        pipeline.step(inputs, inputs)
        in_one_piece(whole, inputs)
        compare(pipeline.stages, whole)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_modules_stay_the_programs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    modules, state = list(model.modules()), list(model.state_dict())
    pipeline = DevicePipeline([model[:2], model[2:]], devices=["cpu"] * 2, loss=F.mse_loss, num_microbatches=2)
    x = torch.randn(4, 3, 2, 2)
    pipeline.step(x, x)
    assert list(model.modules()) == modules
    assert list(model.state_dict()) == state
    assert type(model[1]) is nn.BatchNorm2d
    assert not vars(model[1]).keys() - vars(nn.BatchNorm2d(3)).keys()
    model.eval()
    before = model[1].running_mean.clone()
    pipeline.evaluate(x, x)
    assert torch.equal(model[1].running_mean, before)


def test_an_evaluation_in_inference_mode_between_steps() -> None:
    mine = stages_of(2, 0)
    whole = copy.deepcopy(mine)
    pipeline = DevicePipeline(mine, devices=["cpu"] * 2, loss=loss, num_microbatches=MICROS)
    inputs = torch.cat([a_norm_of(0, micro) for micro in range(MICROS)])
    for _ in range(2):
        with torch.inference_mode():
            expected = pipeline.evaluate(inputs, inputs)
        torch.testing.assert_close(pipeline.step(inputs, inputs), expected)
        for _ in range(2):
            in_one_piece(whole, inputs)
    compare(pipeline.stages, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.slow), "zb_h1"])
def test_compiled_stages(name: str) -> None:
    torch.manual_seed(0)
    mine = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)]
    plain = copy.deepcopy(mine)
    compiled: list[Any] = [torch.compile(stage, backend="eager") for stage in mine]
    inputs = torch.randn(16, 4)
    losses = []
    for stages in (compiled, plain):
        pipeline = DevicePipeline(stages, name, devices=["cpu"] * 2, loss=F.mse_loss, num_microbatches=4)
        losses.append([pipeline.step(inputs, inputs) for _ in range(2)])
    torch.testing.assert_close(*losses)
    compare(dict(enumerate(mine)), list(plain))
    for one, other in zip(nn.ModuleList(mine).parameters(), nn.ModuleList(plain).parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
