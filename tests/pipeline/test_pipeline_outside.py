"""What learns outside of the stages of a pipeline: its inputs and targets, and a loss with parameters of its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training import DevicePipeline, GradientAverager, Pipeline
from dist_prims.training.pipeline import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")
MICROS, CLASSES, COUNTS = 4, 5, (13, 3)


def stages_of(count: int) -> list[nn.Module]:
    """The first begins in place."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES)) for _ in range(count)]
    made[0].insert(0, nn.ReLU(inplace=True))
    return list(made)


class Margin(nn.Module):
    """A head that learns, as of ArcFace, a temperature, and norms that move."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(1)))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(CLASSES, affine=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.norm(output[..., None].expand(-1, -1, 2))  # of one item, too
        cosine = F.linear(F.normalize(output), F.normalize(self.centers)) - 0.1 * F.one_hot(target, CLASSES)
        return F.cross_entropy(F.linear(cosine, self.centers) * self.temperature, target)


def a_batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, CLASSES), torch.randint(0, CLASSES, (count,))


def same_gradients(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), its in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_inputs_and_targets_have_their_gradients(checkpoint: bool, frozen: bool) -> None:
    """Those of inputs were dropped; those of targets that a program had computed failed at the second micro-batch."""
    for name, count in itertools.product(pipeline_plans(), COUNTS):
        plan = pipeline_plan(name, 2, MICROS)
        mine: list[Any] = stages_of(plan.stages)
        if checkpoint:
            mine[0][0].inplace = False
        nn.ModuleList(mine).requires_grad_(not frozen)
        x, t, w = torch.randn(count, CLASSES), torch.randn(count, CLASSES), torch.ones(CLASSES)
        given = [[each.clone().requires_grad_() for each in (x, t, w)] for _ in range(2)]
        whole = nn.Sequential(*copy.deepcopy(mine))
        pipeline = DevicePipeline(mine, plan, devices=["cpu"] * 2, loss=F.mse_loss, checkpoint=checkpoint)
        for _ in range(2):  # gradients add up
            one, other = ((x * w, (t * w).tanh()) for x, t, w in given)
            pipeline.step(*one)
            F.mse_loss(whole(other[0]), other[1]).backward()
        for mine_, its in zip(*given, strict=True):
            torch.testing.assert_close(mine_.grad, its.grad)
        leaf = x.clone().requires_grad_()
        pipeline.step(leaf, t)
        leaf.requires_grad_(False)
        assert leaf.grad.shape == x.shape
        if not frozen:
            pipeline.step(x, t)  # such a batch, whose gradient is not asked for


def test_gradients_of_inputs_across_ranks() -> None:
    def body() -> None:
        for name in pipeline_plans():
            plan = pipeline_plan(name, 2, MICROS)
            mine, trunk = stages_of(plan.stages), nn.Linear(CLASSES, CLASSES)
            whole, its = nn.Sequential(*copy.deepcopy(mine)), copy.deepcopy(trunk)
            pipeline = Pipeline(mine, plan, loss=F.cross_entropy)
            for count, frozen in ((13, False), (13, True), (3, False), (13, False)):
                pipeline.stages.get(0, nn.ReLU()).requires_grad_(not frozen)
                pipeline.renegotiate()
                x, t = a_batch(count)
                pipeline.step(trunk(x), t)
                whole[0].requires_grad_(not frozen)
                F.cross_entropy(whole(its(x)), t).backward()
                pipeline.step(x, t)  # the same batch, and no gradient is wanted of it
                F.cross_entropy(whole(x.clone()), t).backward()
            for number, stage in pipeline.stages.items():
                same_gradients(stage, whole[number])
            if dist.get_rank() == plan.rank_of[0]:
                same_gradients(trunk, its)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_trunk_that_fails_in_its_backward_fails_on_all_ranks() -> None:
    def body() -> None:
        pipeline = Pipeline(stages_of(2), loss=F.cross_entropy, num_microbatches=MICROS)
        x, t = a_batch(13)
        inputs = x.requires_grad_().exp()
        if dist.get_rank() == 0:
            inputs.sum().backward()  # what it goes back through is gone
        with pytest.raises(StageFailedError, match="rank 0: step failed: RuntimeError: Trying to backward through"):
            pipeline.step(inputs, t)
        pipeline.step(x, t)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loss_with_parameters(size: int) -> None:
    """They were in no parameters(), and so no optimiser had them."""

    def body() -> None:
        for number, name in enumerate(pipeline_plans()):
            plan, checkpoint = pipeline_plan(name, size, MICROS), (number + size) % 2 == 0
            first: Any
            first, *_ = mine = stages_of(plan.stages)
            loss = Margin()
            first[0].inplace = False
            whole, its = nn.Sequential(*copy.deepcopy(mine)), copy.deepcopy(loss)
            pipeline = Pipeline(mine, plan, loss=loss, checkpoint=checkpoint)
            for count in COUNTS:
                x, t = a_batch(count)
                value = pipeline.step(x, t)
                wanted = its(whole(x), t)
                wanted.backward()
                torch.testing.assert_close(value, wanted.detach())
            is_last = dist.get_rank() == plan.rank_of[-1]
            count = sum(len([*stage.parameters()]) for stage in pipeline.stages.values()) + 2 * is_last
            assert len([*pipeline.parameters()]) == count
            assert len(pipeline.module) == len(pipeline.stages) + is_last
            if is_last:
                same_gradients(loss, its)
                torch.testing.assert_close(loss.norm.running_var, its.norm.running_var)
                assert loss.norm.num_batches_tracked == len(COUNTS)
                assert not pipeline.eval().module[-1].training
            for number, stage in pipeline.stages.items():
                same_gradients(stage, whole[number])

    dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_loss_with_parameters_is_averaged(name: str) -> None:
    def body() -> None:
        plan = pipeline_plan(name, 2, MICROS)
        mine, loss = stages_of(plan.stages), Margin()
        whole = nn.ModuleList([nn.Sequential(*copy.deepcopy(mine)), copy.deepcopy(loss)])
        pipeline = DevicePipeline(mine, plan, devices=["cpu"] * 2, loss=loss)
        GradientAverager(pipeline.module, bucket_mb=1e-5)
        batches = [a_batch(13), a_batch(11)]
        x, t = batches[dist.get_rank()]
        pipeline.step(x.clone(), t)
        for x, t in batches:
            (whole[1](whole[0](x.clone()), t) / 2).backward()
        same_gradients(pipeline.module, whole)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_function_that_learns_is_refused(name: str) -> None:
    """Nothing would hold its parameters: it says to make it a module."""
    x, t = a_batch(13)
    head, free = nn.Linear(CLASSES, CLASSES, bias=False), torch.ones(1, requires_grad=True)
    refused: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda output, target: F.cross_entropy(head(output), target),
        lambda output, target: F.cross_entropy(output * free, target),
    ]
    for loss, shape in zip(refused, ([CLASSES, CLASSES], [1]), strict=True):
        pipeline = DevicePipeline(stages_of(2), name, devices=["cpu"] * 2, loss=loss, num_microbatches=MICROS)
        with pytest.raises(ValueError, match=r"learns a parameter of shape .* make it one that holds") as failed:
            pipeline.step(x, t)
        assert str(shape) in str(failed.value)
    stages: list[Any] = stages_of(2)

    def regularised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = head(output)
        return F.cross_entropy(output + teacher, target) + stages[1][0].weight.square().mean()

    DevicePipeline(stages, name, devices=["cpu"] * 2, loss=regularised, num_microbatches=MICROS).step(x, t)
    pipeline = DevicePipeline(
        stages_of(1), name, devices=["cpu"], loss=lambda output: output.sum(), num_microbatches=MICROS
    )
    assert pipeline.step(x).isfinite()


class Balanced(nn.Module):
    """Keeps a loss of its own, as a mixture of experts does, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.balance, self.seen = self.gate(x).softmax(-1).square().mean(), x
        return self.layer(x)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_loss_that_reaches_what_a_stage_has_kept(name: str, checkpoint: bool) -> None:
    """The inputs of stages are leaves, and were taken for parameters that the pipeline does not have."""
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3), *(Balanced() for _ in range({"1f1b": 1, "zbv": 3}[name]))]
    whole = copy.deepcopy(stages)

    def loss_of(kept: Any) -> Any:
        return lambda output, target: F.mse_loss(output, target) + kept.balance + kept.seen.square().mean()

    pipeline = DevicePipeline(
        stages, name, devices=["cpu"] * 2, loss=loss_of(stages[-1]), num_microbatches=2, checkpoint=checkpoint
    )
    inputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    loss = pipeline.step(inputs, targets)
    wanted = []
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        wanted.append(loss_of(whole[-1])(nn.Sequential(*whole)(x), y) / 2)
        wanted[-1].backward()
    torch.testing.assert_close(loss, sum(wanted).detach())
    for mine, its in zip(nn.ModuleList(stages).parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_a_first_stage_may_change_an_input_without_gradient() -> None:
    """It became one with a gradient, and the step failed by a gradient too many."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += self.by
            return x

    stages = [Shifted(), nn.Linear(3, 1)]
    whole = copy.deepcopy(stages)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 1)
    F.mse_loss(nn.Sequential(*whole)(inputs.clone()), targets).backward()
    DevicePipeline(stages, devices=["cpu"] * 2, loss=F.mse_loss, num_microbatches=2).step(inputs.clone(), targets)
    torch.testing.assert_close(stages[0].by.grad, whole[0].by.grad)


@pytest.mark.parametrize("part", ["loss", "metric"])
def test_what_is_not_one_real_number_is_refused(part: str) -> None:
    functions = {"loss": F.mse_loss, "metric": F.l1_loss}
    for wrong in (lambda output, target: output - target, lambda output, target: (output - target).sum() * 1j):
        loss, metric = {**functions, part: wrong}.values()
        pipeline = DevicePipeline(
            [nn.Linear(3, 3), nn.Linear(3, 1)], devices=["cpu"] * 2, loss=loss, metrics={"size": metric}
        )
        with pytest.raises(ValueError, match=rf"the {part}.* is a tensor of torch.* it must be one real number"):
            pipeline.step(torch.randn(4, 3), torch.randn(4, 1))
