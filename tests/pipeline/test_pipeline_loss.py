"""Losses in pipelines: what the batch in one piece gives, whatever counts in it, learns in it and scales it."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training import DevicePipeline, Pipeline
from dist_prims.training.mixed_precision import unscale
from dist_prims.training.pipeline import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")
MICROS, CLASSES = 4, 5
WEIGHT = torch.tensor([0.1, 2.0, 0.0, 1.0, 5.0])


def stages_of(count: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = [nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES)) for _ in range(count)]
    return list(made)


def a_batch(count: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of which few count, and none of the first micro-batch."""
    torch.manual_seed(count)
    targets = torch.randint(0, CLASSES, (count,))
    targets[: count // MICROS] = 0
    return torch.randn(count, CLASSES), targets


def compare(own: Mapping[int, nn.Module], whole: list[nn.Module], rtol: float = 1e-5) -> None:
    for number, module in own.items():
        for (name, mine), its in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=rtol, atol=1e-6, msg=f"stage {number}: {name}")


def by_items(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same loss, but a function that no pipeline knows."""
    return lambda output, target: loss(output, target)


class Smoothed(nn.CrossEntropyLoss):
    """A class of a program's own with torch's forward."""


LOSSES: list[tuple[Callable[..., torch.Tensor], dict[str, Any]]] = [
    (partial(F.cross_entropy, ignore_index=0), {}),
    (partial(partial(F.cross_entropy, weight=WEIGHT), ignore_index=3), {}),
    (partial(F.cross_entropy, weight=WEIGHT, ignore_index=0, label_smoothing=0.2), {}),
    (partial(F.cross_entropy, ignore_index=0, reduction="sum"), {"reduction": "sum"}),
    (nn.CrossEntropyLoss(ignore_index=0), {}),
    (Smoothed(weight=WEIGHT, label_smoothing=0.1), {}),
    (nn.NLLLoss(weight=WEIGHT, ignore_index=1), {}),
    (partial(F.nll_loss, ignore_index=0), {}),
    (by_items(partial(F.cross_entropy, ignore_index=0)), {"loss_weight": lambda target: (target != 0).sum()}),
    (by_items(partial(F.cross_entropy, weight=WEIGHT)), {"loss_weight": lambda target: WEIGHT[target].sum()}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_a_mean_over_what_counts(case: int) -> None:
    """Micro-batches were weighted by their items: 3.673 for 3.730, and gradients wrong alike."""
    loss, options = LOSSES[case]
    for name, count in itertools.product(pipeline_plans(), (13, 3)):
        plan = pipeline_plan(name, 2, MICROS)
        mine, (inputs, targets) = stages_of(plan.stages), a_batch(count)
        whole = copy.deepcopy(mine)
        metrics = {"known": nn.CrossEntropyLoss(ignore_index=0)}
        pipeline = DevicePipeline(mine, plan, devices=["cpu"] * 2, loss=loss, metrics=metrics, **options)
        value = pipeline.step(inputs, targets)
        outputs = nn.Sequential(*whole)(inputs)
        wanted = loss(outputs, targets)
        wanted.backward()
        torch.testing.assert_close(value, wanted.detach())
        torch.testing.assert_close(pipeline.measured["known"], metrics["known"](outputs, targets).detach())
        compare(pipeline.stages, whole)
        torch.testing.assert_close(pipeline.evaluate(inputs, targets), wanted.detach())


def test_targets_of_more_dimensions_and_probabilities() -> None:
    def compare_with(loss: Callable[..., torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> None:
        mine = [nn.Conv1d(CLASSES, CLASSES, 1), nn.Conv1d(CLASSES, CLASSES, 1)]
        whole = copy.deepcopy(mine)
        pipeline = DevicePipeline(list(mine), devices=["cpu"] * 2, loss=loss, num_microbatches=MICROS)
        value = pipeline.step(inputs, targets)
        wanted = loss(nn.Sequential(*whole)(inputs), targets)
        wanted.backward()
        torch.testing.assert_close(value, wanted.detach())
        compare(pipeline.stages, list(whole))

    torch.manual_seed(0)
    inputs, indices = torch.randn(9, CLASSES, 6), torch.randint(0, CLASSES, (9, 6))
    indices[torch.rand(9, 6) < torch.arange(9)[:, None] / 9] = -100
    compare_with(F.cross_entropy, inputs, indices)  # by what it ignores by default
    compare_with(nn.CrossEntropyLoss(weight=WEIGHT), inputs, torch.rand(9, CLASSES, 6).softmax(1))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_batch_in_which_nothing_counts(checkpoint: bool) -> None:
    mine, (inputs, targets) = stages_of(2), a_batch()
    loss = nn.CrossEntropyLoss(ignore_index=0)
    pipeline = DevicePipeline(mine, devices=["cpu"] * 2, loss=loss, num_microbatches=MICROS, checkpoint=checkpoint)
    assert pipeline.step(inputs, torch.zeros_like(targets)).isnan()  # as torch has it
    only = torch.zeros_like(targets)
    only[-1] = 1
    for parameter in pipeline.parameters():
        parameter.grad = None
    torch.testing.assert_close(pipeline.step(inputs, only), loss(nn.Sequential(*mine)(inputs), only).detach())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in pipeline.parameters())


def test_a_mean_that_a_function_hides_is_warned_of() -> None:
    inputs, targets = a_batch()
    hidden = by_items(partial(F.cross_entropy, ignore_index=0))
    pipeline = DevicePipeline(stages_of(2), devices=["cpu"] * 2, loss=hidden, num_microbatches=MICROS)
    with pytest.warns(UserWarning, match="mean of cross_entropy over targets that count differently.*loss_weight="):
        pipeline.evaluate(inputs[4:], targets[4:])
    with pytest.warns(UserWarning, match="loss_weight="):
        pipeline.step(inputs[4:], targets[4:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(inputs[4:], targets[4:])  # once is enough
        for loss in (by_items(F.cross_entropy), partial(F.cross_entropy, ignore_index=0)):
            DevicePipeline(stages_of(2), devices=["cpu"] * 2, loss=loss, num_microbatches=MICROS).step(inputs, targets)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss_weight": 3}, ValueError, "loss_weight=3 with reduction='mean'; it is a function of the targets"),
        ({"loss_weight": len, "reduction": "sum"}, ValueError, "with reduction='sum'"),
        ({"scaler": 2.0}, TypeError, r"scaler=2.0 has no scale\(\)"),
    ],
)
def test_what_no_loss_can_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DevicePipeline(stages_of(2), devices=["cpu"] * 2, **{"loss": F.cross_entropy, **options})


def test_weights_that_are_no_numbers_are_refused_on_all_ranks() -> None:
    def body() -> None:
        for weight, words in (
            (lambda target: target, r"loss_weight gives shapes \[\[3\], \[3\], \[3\], \[4\]\], not numbers"),
            (lambda target: -1.0, "a weight is a finite number from 0"),
        ):
            pipeline = Pipeline(stages_of(2), loss=F.cross_entropy, loss_weight=weight, num_microbatches=MICROS)
            with pytest.raises(StageFailedError, match=words):
                pipeline.step(*a_batch())

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_scaled_loss_is_reported_as_it_is(name: str) -> None:
    """Ranks without a loss once had scalers that had scaled nothing, and refused to unscale."""

    def body() -> None:
        plan = pipeline_plan(name, 2, MICROS)
        mine, (inputs, targets) = stages_of(plan.stages), a_batch()
        whole = nn.Sequential(*copy.deepcopy(mine))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        pipeline = Pipeline(mine, plan, loss=nn.CrossEntropyLoss(ignore_index=0), scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        its = torch.optim.SGD(whole.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            its.zero_grad()
            value = pipeline.step(inputs, targets)
            unscale(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            wanted = F.cross_entropy(whole(inputs), targets, ignore_index=0)
            wanted.backward()
            its.step()
            torch.testing.assert_close(value, wanted.detach())
            torch.testing.assert_close(pipeline.evaluate(inputs, targets), whole_loss(whole, inputs, targets))
        for number, stage in pipeline.stages.items():
            torch.testing.assert_close(list(stage.parameters()), list(whole[number].parameters()))
        with pytest.raises(MismatchError, match=r"scaler=True.*scaler=False|scaler=False.*scaler=True"):
            Pipeline(stages_of(2), loss=F.cross_entropy, scaler=scaler if dist.get_rank() else None)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def whole_loss(whole: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(whole(inputs), targets, ignore_index=0).detach()


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.detach(), target)


@torch.no_grad()
def under_no_grad(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def constant(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0)


WITHOUT_GRADIENT = (detached, under_no_grad, constant)


@pytest.mark.parametrize("name", pipeline_plans())
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_loss_without_gradient_is_refused(name: str, checkpoint: bool) -> None:
    """The step once returned such a loss and trained nothing; torch raises."""
    plan = pipeline_plan(name, 2, MICROS)
    x = torch.ones(MICROS, 2)
    for loss in WITHOUT_GRADIENT:
        layers = [nn.Linear(2, 2) for _ in range(plan.stages)]
        pipeline = DevicePipeline(layers, plan, devices=["cpu"] * 2, loss=loss, checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match="the loss does not require grad in any micro-batch"):
            pipeline.step(x, x)
        assert pipeline.evaluate(x, x).isfinite()
        layers[-1].requires_grad_(False)  # the stages before still learn
        with pytest.raises(RuntimeError, match="does not require grad"):
            pipeline.step(x, x)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_some_micro_batches_may_have_a_loss_without_gradient(checkpoint: bool) -> None:
    """A loss that is a constant where nothing of a micro-batch counts has the gradient of the others."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) if target.any() else torch.tensor(0.0)

    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipeline = DevicePipeline(layers, devices=["cpu"] * 2, loss=loss, num_microbatches=2, checkpoint=checkpoint)
    x, target = torch.ones(4, 2), torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 2)
    pipeline.step(x, target)
    given = [each.grad.clone() for each in pipeline.parameters()]
    pipeline.module.zero_grad()
    (F.mse_loss(nn.Sequential(*layers)(x[2:]), target[2:]) / 2).backward()
    torch.testing.assert_close(given, [each.grad for each in pipeline.parameters()])
