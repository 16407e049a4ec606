"""Data parallel on top of pipelines: gradients are averaged once a step, and are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import BACKENDS, a_batch, backward_order, compare, stages_of, unsplit
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.schedules.pipelines import PipelinePlan, pipeline_plan
from dist_prims.training import DevicePipeline, GradientAverager, Pipeline
from dist_prims.training.gradients.bucket_sender import BucketSender
from dist_prims.training.pipeline import StageFailedError

pytestmark = pytest.mark.usefixtures("one_thread")
PLANS = ["fill_drain", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"]
MICROS = 4


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each bucket that this rank sends within."""
    found: list[int] = []
    send = BucketSender._send

    def counting(self: BucketSender, is_last: bool = False) -> None:
        found.append(self.layout.buckets[self.sent].flat.nbytes)
        send(self, is_last)

    BucketSender._send = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        BucketSender._send = send  # type: ignore[method-assign]


def grid() -> tuple[int, dist.ProcessGroup, dist.ProcessGroup]:
    """Of four ranks: this rank's half of the data, the group of its pipeline, and that of the copies of its stages."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rank // 2, pipelines[rank // 2], copies[rank % 2]


def one_process(plan: PipelinePlan, batches: Sequence[Any], times: int = 1) -> list[nn.Module]:
    """The stages with the mean of what both halves of the data give, as two ranks add it up."""
    whole = stages_of(plan.stages)
    halves = [copy.deepcopy(whole) for _ in batches]
    for stages, (inputs, targets) in zip(halves, batches, strict=True):
        unsplit(stages, inputs.clone(), targets, plan.num_microbatches, backward_order(plan))
    for stage, *others in zip(whole, *halves, strict=True):
        for parameter, *theirs in zip(stage.parameters(), *(other.parameters() for other in others), strict=True):
            if theirs[0].grad is not None:
                parameter.grad = times * (theirs[0].grad * 0.5 + theirs[1].grad * 0.5)
    return whole


def bytes_of(stages: Mapping[int, nn.Module]) -> int:
    return sum(each.nbytes for stage in stages.values() for each in stage.parameters() if each.requires_grad)


def is_split(plan: PipelinePlan) -> bool:
    return any(action.kind == "W" for actions in plan.actions for action in actions)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_two_pipelines_average_each_stage_once(backend: str) -> None:
    """Two pipelines of two ranks: one averager of all stages of a rank, or one of each."""
    cases = [("1f1b", False), ("interleaved_1f1b", False), ("zbv", True)]
    if backend == "dist_prims":
        cases = [*((name, False) for name in PLANS), ("interleaved_1f1b", True), ("zbv", True)]

    def body() -> None:
        half, group, copies = grid()
        for name, apart in cases:
            averaged_once(name, apart, half, group, copies)

    def averaged_once(name: str, apart: bool, half: int, group: dist.ProcessGroup, copies: dist.ProcessGroup) -> None:
        plan = pipeline_plan(name, 2, MICROS)
        batches = [a_batch(11), a_batch(12)]
        pipeline = Pipeline(stages_of(plan.stages), plan, loss=F.mse_loss, group=group)
        own = pipeline.stages
        owned = [own] if not apart else [{number: stage} for number, stage in own.items()]
        for each in owned:
            GradientAverager(nn.ModuleList(each.values()), group=copies)
        for _ in range(3):  # gradients add up
            with counted() as sent:
                pipeline.step(*batches[half])
            assert sum(sent) == bytes_of(own)
            assert len(sent) == sum(bytes_of(each) > 0 for each in owned), (name, apart)
        compare(own, one_process(plan, batches, times=3), exact=False)
        for parameter in pipeline.parameters():
            parameter.grad = None
        pipeline.step(*batches[half])
        compare(own, one_process(plan, batches), exact=not is_split(plan))

    dist_prims.spawn(body, 4, backend=backend, timeout=110)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pipelines_over_devices_are_averaged_in_small_buckets(backend: str) -> None:
    def body() -> None:
        for name in PLANS if backend == "dist_prims" else ["interleaved_1f1b", "zb_h1"]:
            averaged(name)

    def averaged(name: str) -> None:
        plan = pipeline_plan(name, 2, MICROS)
        batches = [a_batch(11), a_batch(12)]
        stages = stages_of(plan.stages)
        pipeline = DevicePipeline(stages, plan, devices=["cpu"] * 2, loss=F.mse_loss)
        averager = GradientAverager(nn.ModuleList(stages), bucket_mb=1e-5)
        for _ in range(3):
            averager._model.zero_grad()
            with counted() as sent:
                pipeline.step(*batches[dist.get_rank()])
            assert sum(sent) == bytes_of(pipeline.stages)
        compare(pipeline.stages, one_process(plan, batches), exact=not is_split(plan))

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_a_stage_is_sent_while_others_still_work() -> None:
    def body() -> None:
        stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
        pipeline = DevicePipeline(stages, "fill_drain", devices=["cpu"] * 2, loss=F.mse_loss, num_microbatches=2)
        GradientAverager(nn.ModuleList(stages), bucket_mb=8e-5)
        when: list[int] = []
        for _ in range(2):
            with counted() as sent:
                stages[0].weight.register_hook(lambda _: when.append(len(sent)))
                pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
        assert when[-1] > 0  # before the first stage has its last gradient
        assert len(sent) == 2

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_weight_of_two_stages() -> None:
    """It is complete after the last of both."""

    def body() -> None:
        shared = nn.Linear(4, 4)
        stages = [nn.Sequential(shared, nn.Tanh()), nn.Linear(4, 4), nn.Sequential(nn.Tanh(), shared)]
        whole = copy.deepcopy(nn.ModuleList(stages))
        pipeline = DevicePipeline(stages, "1f1b", devices=["cpu"] * 3, loss=F.mse_loss, num_microbatches=2)
        GradientAverager(nn.ModuleList(stages), bucket_mb=1e-5)
        xs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        pipeline.step(xs[dist.get_rank()], torch.ones(4, 4))
        for x in xs:
            (F.mse_loss(nn.Sequential(*whole)(x), torch.ones(4, 4)) / 2).backward()
        compare(dict(enumerate(stages)), whole, exact=False)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_steps_in_no_sync_send_nothing() -> None:
    def body() -> None:
        half, group, copies = grid()
        plan = pipeline_plan("zb_h1", 2, MICROS)
        batches = [a_batch(11), a_batch(12)]
        pipeline = Pipeline(stages_of(plan.stages), plan, loss=F.mse_loss, group=group)
        averager = GradientAverager(nn.ModuleList(pipeline.stages.values()), group=copies)
        with counted() as sent, averager.no_sync():
            pipeline.step(*batches[half])
        assert not sent
        with counted() as sent:
            pipeline.evaluate(*batches[half])
        assert not sent
        pipeline.step(*batches[half])
        compare(pipeline.stages, one_process(plan, batches, times=2), exact=False)

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=60)


def test_a_stage_of_distributed_data_parallel_is_refused() -> None:
    """Its gradients were silently wrong under every plan: off by 1e-2 in a mean of two."""
    words = r"1 in stage 1 is a DistributedDataParallel.*\.module.*GradientAverager\("

    def body() -> None:
        inner = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=dist.new_group([0, 1]))
        stages = [nn.Linear(4, 4), nn.Sequential(nn.Tanh(), inner)]
        with pytest.raises((ValueError, MismatchError), match=words):
            Pipeline(stages, loss=F.mse_loss)
        with pytest.raises(ValueError, match=words):
            DevicePipeline(stages, devices=["cpu"] * 2, loss=F.mse_loss)

    dist_prims.spawn(body, 2, backend="gloo", timeout=60)


def test_a_loss_without_gradient_is_found_before_anything_is_sent() -> None:
    """It was found at the end of the step. Then the averagers had sent gradients, and could not be used again."""

    def body() -> None:
        half, group, copies = grid()
        batches = [a_batch(11), a_batch(12)]
        for name in PLANS:
            plan = pipeline_plan(name, 2, MICROS)
            is_detached = True

            def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return F.mse_loss(output.detach() if is_detached else output, target)  # noqa: B023

            pipeline = Pipeline(stages_of(plan.stages), plan, loss=loss, group=group)
            averager = GradientAverager(pipeline.module, group=copies)
            with counted() as sent, pytest.raises(StageFailedError, match="does not require grad"):
                pipeline.step(*batches[half])
            assert not sent
            for parameter in pipeline.parameters():
                parameter.grad = None
            is_detached = False
            pipeline.step(*batches[half])
            compare(pipeline.stages, one_process(plan, batches), exact=not is_split(plan))
            averager.remove()

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=110)
