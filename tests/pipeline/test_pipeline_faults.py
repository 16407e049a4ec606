"""Pipelines when something is wrong: every rank gets the error, and the next step works."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import BACKENDS, a_batch, stages_of
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import CommError, MismatchError
from dist_prims.schedules.pipelines import pipeline_plan
from dist_prims.training.pipeline.devices import DevicePipeline
from dist_prims.training.pipeline.processes import Pipeline
from dist_prims.training.pipeline.split_model import split
from dist_prims.training.pipeline.transfer import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_stage_that_changes_its_input_is_not_computed_again() -> None:
    pipeline = DevicePipeline(stages_of(2), "fill_drain", devices=["cpu"] * 2, loss=F.mse_loss, checkpoint=True)
    with pytest.raises(RuntimeError, match=r"stage 1 changes its input in place.*inplace=False"):
        pipeline.step(*a_batch())


class Bomb(torch.autograd.Function):
    armed = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Bomb.armed == "F":
            raise ArithmeticError("forward bomb")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Bomb.armed == "B":
            raise ArithmeticError("backward bomb")
        return grad


class Explosive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(Bomb.apply(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "name"), [("dist_prims", "1f1b"), ("gloo", "zbv")])
def test_a_failure_reaches_all_and_the_next_step_works(backend: str, name: str) -> None:
    """Who fails, in what, before and after the layouts are known."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        plan = pipeline_plan(name, size, 4)
        for guilty, kind in itertools.product(range(size), "FB"):
            warm = (guilty % 2 == 0) == (kind == "B")
            torch.manual_seed(0)
            pipeline = Pipeline([Explosive() for _ in range(plan.stages)], plan, loss=F.mse_loss)
            if warm:
                pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
            Bomb.armed = kind if rank == guilty else ""
            failed = _failure(lambda: pipeline.step(torch.ones(4, 4), torch.ones(4, 4)))  # noqa: B023
            word = {"F": "forward", "B": "backward"}[kind]
            if kind == "F" or any(plan.rank_of[stage] == guilty for stage in range(1, plan.stages)):
                assert f"rank {guilty}: " in failed, (warm, guilty, kind, failed)
                assert f"ArithmeticError: {word} bomb" in failed
            else:  # no gradient of the inputs: the bomb of stage 0 has no backward
                assert not failed
            Bomb.armed = ""
            assert pipeline.step(torch.ones(4, 4), torch.ones(4, 4)) > 0
            assert pipeline.forward(torch.ones(4, 4), everywhere=True).shape == (4, 4)

    dist_prims.spawn(body, 3 if name == "1f1b" else 2, backend=backend, timeout=60)


def _failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except StageFailedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["1f1b", "zb_h1"])
def test_a_failure_that_no_message_carries_reaches_all(plan: str) -> None:
    """The last work of the first stage: once the others returned a loss, and would have stepped."""

    def body() -> None:
        def burst(grad: torch.Tensor) -> None:
            raise ArithmeticError("the last gradient")

        layers = [nn.Linear(4, 4) for _ in range(3)]
        pipeline = Pipeline(layers, plan, loss=F.mse_loss, num_microbatches=3)
        hook = layers[0].weight.register_hook(burst)
        message = _failure(lambda: pipeline.step(torch.ones(6, 4), torch.ones(6, 4)))
        assert "rank 0: " in message
        assert "the last gradient" in message
        hook.remove()
        assert pipeline.step(torch.ones(6, 4), torch.ones(6, 4)) > 0

    dist_prims.spawn(body, 3, timeout=60)


def test_a_failure_reaches_all_where_heads_are_read_late() -> None:
    """As on CUDA, where no rank waits for a message to read it: a rank in between computes with zeros and sends on."""

    def body() -> None:
        pipeline = Pipeline([Explosive() for _ in range(3)], "1f1b", loss=F.mse_loss, num_microbatches=3)
        pipeline.step(torch.ones(6, 4), torch.ones(6, 4))
        pipeline._transfers._queued = True
        Bomb.armed = "F" if dist.get_rank() == 0 else ""
        assert "rank 0: F(" in _failure(lambda: pipeline.step(torch.ones(6, 4), torch.ones(6, 4)))

    dist_prims.spawn(body, 3, timeout=60)


def test_a_tensor_that_cannot_be_sent_is_refused_at_once() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    def body() -> None:
        pipeline = Pipeline([Sparse(), nn.Linear(4, 4)], "1f1b", loss=F.mse_loss, num_microbatches=2)
        words = "ValueError: a stage gives a tensor of layout torch.sparse_coo"
        assert words in _failure(lambda: pipeline.step(torch.ones(4, 4), torch.ones(4, 4)))

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_calls_are_an_error_on_all_ranks(backend: str) -> None:
    def body() -> None:
        pipeline = Pipeline(stages_of(2), "1f1b", loss=F.mse_loss, num_microbatches=4)
        rank = dist.get_rank()
        inputs, targets = a_batch(8)
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: pipeline.step(None, targets), "rank 0: step failed: TypeError: the batch of inputs is a NoneType"),
            (lambda: pipeline.step(inputs[:0], targets[:0]), "hold 0 items; a batch has at least one"),
            (lambda: pipeline.step((inputs, targets[:2]), targets), "hold [8, 2] items"),
            (lambda: pipeline.step("words", targets), "the batch of inputs is a str"),
            (
                lambda: pipeline.step(inputs, targets[:5]),
                "rank 1: step failed: ValueError: pipeline: 5 targets for 8 inputs",
            ),
            (lambda: pipeline.step(inputs), "rank 1: F(stage 1, micro-batch 0) failed: TypeError"),
        ]
        for call, words in calls:
            assert words in _failure(call), words
        with pytest.raises(CommError, match=r"rank 1: forward\(\) of the pipeline, while rank 0 calls step\(\)"):
            pipeline.forward() if rank else pipeline.step(inputs, targets)
        loss = Pipeline(stages_of(2), "1f1b", num_microbatches=4)
        assert "made without a loss" in _failure(lambda: loss.step(inputs, targets))
        assert pipeline.step(inputs, targets) > 0

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_says_what_to_call(mode: type) -> None:
    """It ended in an error of zip(), and on the other ranks in nothing."""
    words = r"step\(\) computes gradients, and is called under torch.no_grad\(\).*call evaluate\(\)"

    def body() -> None:
        pipeline = Pipeline(stages_of(2), "1f1b", loss=F.mse_loss, num_microbatches=4)
        for guilty in ([0], [1], [0, 1]):
            with mode() if dist.get_rank() in guilty else nullcontext(), pytest.raises(StageFailedError, match=words):
                pipeline.step(*a_batch(8))
            with mode():
                expected = pipeline.evaluate(*a_batch(8))
            torch.testing.assert_close(pipeline.step(*a_batch(8)), expected)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
    pipeline = DevicePipeline(stages_of(2), "1f1b", devices=["cpu"] * 2, loss=F.mse_loss, num_microbatches=4)
    with mode(), pytest.raises(RuntimeError, match=words):
        pipeline.step(*a_batch(8))


def test_a_model_that_changes_says_what_to_do() -> None:
    def body() -> None:
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], "1f1b", loss=F.mse_loss, num_microbatches=2)
        x = torch.ones(4, 2)
        pipeline.step(x, x)
        for module in pipeline.stages.values():
            module.requires_grad_(dist.get_rank() == 1)
        words = "rank 0: F(stage 0, micro-batch 0) failed: ValueError: the output of stage 0 is now (float32[2, 2])"
        assert words in (message := _failure(lambda: pipeline.step(x, x))), message
        pipeline.renegotiate()
        pipeline.step(x, x)

    dist_prims.spawn(body, 2, timeout=60)


def test_ranks_must_agree_on_the_pipeline() -> None:
    def body() -> None:
        rank = dist.get_rank()
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        with pytest.raises(MismatchError, match=r"Rank \d has 1f1b \(stages=2, num_microbatches=\d.*rank \d has 1f1b"):
            Pipeline(layers, "1f1b", num_microbatches=2 + rank)
        with pytest.raises((MismatchError, ValueError), match=r"rank 1 is given stages \[0\]; by 1f1b it has \[1\]"):
            Pipeline({0: layers[0]}, "1f1b")
        with pytest.raises(ValueError, match="3 stages cannot be shared evenly among 2 ranks"):
            Pipeline([*layers, nn.ReLU()])
        with pytest.raises(ValueError, match="fill_drain is for num_microbatches=3, and here num_microbatches=4"):
            Pipeline(layers, pipeline_plan("fill_drain", 2, 3), num_microbatches=4)
        with pytest.raises((MismatchError, TypeError), match="stage 1 is a str"):
            Pipeline([layers[0], "layer"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="reduction='max'"):
            Pipeline(layers, reduction="max")
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        with pytest.raises(
            MismatchError, match=r"cut [0-9a-f]{8}\).*same plan, num_microbatches, reduction, metrics, cut"
        ):
            Pipeline(split(model, 2, by=[2, 2] if rank else [3, 1]), "1f1b")  # a layer was once left out in silence
        Pipeline({rank: layers[rank]}, "1f1b")

    dist_prims.spawn(body, 2, timeout=60)


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    def body() -> str:
        pipeline = Pipeline(stages_of(2), "1f1b", loss=F.mse_loss, num_microbatches=2)
        pipeline.step(*a_batch())
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            return "left"
        with pytest.raises(CommError, match="rank 1"):
            pipeline.step(*a_batch())
        return "knew"

    assert dist_prims.spawn(body, 2, backend="dist_prims", timeout=60) == ["knew", "left"]
