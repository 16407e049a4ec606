"""Pipelines that run: what the unsplit model gives, whatever plan, backend and batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import BACKENDS, a_batch, backward_order, compare, normed, stages_of, unsplit
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import dist_prims
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.training.pipeline.devices import DevicePipeline
from dist_prims.training.pipeline.processes import Pipeline
from dist_prims.training.pipeline.transfer import messages

pytestmark = pytest.mark.usefixtures("one_thread")


def every_plan(num_microbatches: Sequence[int]) -> None:
    ranks = dist.get_world_size()
    for name in pipeline_plans():
        for count in num_microbatches:
            plan = pipeline_plan(name, ranks, count)
            mine, whole = stages_of(plan.stages), stages_of(plan.stages)
            pipeline = Pipeline(mine, plan, loss=F.mse_loss)
            inputs, targets = a_batch()
            for _ in range(2):  # gradients add up
                loss = pipeline.step(inputs.clone(), targets)
                wanted = unsplit(whole, inputs.clone(), targets, count, backward_order(plan))
                torch.testing.assert_close(loss, wanted.float())
            split = any(action.kind == "W" for actions in plan.actions for action in actions)
            compare(pipeline.stages, whole, exact=not split)
            outputs = pipeline.forward(inputs)
            assert (outputs is None) == (dist.get_rank() != plan.rank_of[-1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "backend", "num_microbatches"),
    [
        (1, "dist_prims", [2]),
        (2, "dist_prims", [1, 5]),
        (2, "gloo", [2]),
        (3, "dist_prims", [5]),
        (3, "gloo", [1]),
        (4, "dist_prims", [3]),
    ],
)
def test_every_plan_gives_what_the_unsplit_model_gives(size: int, backend: str, num_microbatches: list[int]) -> None:
    dist_prims.spawn(every_plan, size, (num_microbatches,), backend=backend, timeout=110)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", pipeline_plans())
@pytest.mark.parametrize(
    ("ranks", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (2, 8), (3, 1), (3, 5), (4, 3), (4, 5)]
)
def test_every_plan_on_devices(name: str, num_microbatches: int, ranks: int) -> None:
    plan = pipeline_plan(name, ranks, num_microbatches)
    mine, whole = stages_of(plan.stages), stages_of(plan.stages)
    pipeline = DevicePipeline(mine, plan, devices=["cpu"] * ranks, loss=F.mse_loss, metrics={"mae": F.l1_loss})
    inputs, targets = a_batch()
    loss = pipeline.step(inputs.clone(), targets)
    wanted = unsplit(whole, inputs.clone(), targets, num_microbatches, backward_order(plan))
    torch.testing.assert_close(loss, wanted.float())
    compare(pipeline.stages, whole, exact=not any(action.kind == "W" for each in plan.actions for action in each))
    outputs = nn.Sequential(*whole)(inputs.clone())
    torch.testing.assert_close(pipeline.forward(inputs.clone()), outputs.detach())
    torch.testing.assert_close(pipeline.evaluate(inputs, targets), loss)
    torch.testing.assert_close(pipeline.measured["mae"], F.l1_loss(outputs, targets))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_other_shapes(backend: str) -> None:
    def body() -> None:
        mine, whole = stages_of(2), stages_of(2)
        pipeline = Pipeline(mine, "1f1b", loss=F.mse_loss, metrics={"mae": F.l1_loss}, num_microbatches=4)
        for count in (11, 4, 11, 13):
            inputs, targets = a_batch(count)
            first, last = dist.get_rank() == 0, dist.get_rank() == 1
            loss = pipeline.step(inputs.clone() if first else None, targets if last else None)
            wanted = unsplit(whole, inputs.clone(), targets, 4, range(4))
            torch.testing.assert_close(loss, wanted.float())
            outputs = nn.Sequential(*whole)(inputs.clone())
            torch.testing.assert_close(pipeline.measured["mae"], F.l1_loss(outputs, targets))
            torch.testing.assert_close(pipeline.evaluate(inputs, targets), F.mse_loss(outputs, targets))
            torch.testing.assert_close(pipeline.forward(inputs, everywhere=True), outputs.detach())
        compare(pipeline.stages, whole, exact=True)
        pipeline = Pipeline([nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)], loss=F.mse_loss)
        for width in (8, 4, 8):  # other resolutions
            pipeline.step(*a_batch(5, width))
            assert pipeline.forward(a_batch(5, width)[0], everywhere=True).shape == (5, 2, 4, width)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_kinds_of_batches_beyond_what_is_remembered() -> None:
    def body() -> None:
        pipeline = Pipeline(stages_of(2), "fill_drain", loss=F.mse_loss, num_microbatches=2)
        whole = stages_of(2)
        for count in [*range(2, 22), 2, 21, 20, 3]:
            inputs, targets = a_batch(count)
            loss = pipeline.step(inputs.clone(), targets)
            torch.testing.assert_close(loss, unsplit(whole, inputs, targets, 2, range(2)).float())

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


class Carry(nn.Module):
    """Takes and returns several tensors: one that is worked on, a skip, numbers, one without gradient."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.layer, self.first, self.last = nn.Linear(3, 3), first, last

    def forward(self, x: torch.Tensor, *carried: torch.Tensor) -> Any:
        skip, numbers, still = carried if carried else (x * 2, torch.arange(len(x)), x.detach().t())
        x = self.layer(x).relu() + (skip if self.last else 0)
        if self.last:
            return x * numbers[:, None] + still.t(), skip
        return x, skip, numbers, still


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "size"), [("1f1b", 3), ("zb_h1", 2), ("zbv", 2), ("zbv", 1)])
def test_tuples_are_carried(name: str, size: int) -> None:
    def loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((output[0] - target).square() * weight + output[1]).mean()

    def body() -> None:
        plan = pipeline_plan(name, size, 3)

        def made() -> list[nn.Module]:
            torch.manual_seed(1)
            return [Carry(stage == 0, stage == plan.stages - 1) for stage in range(plan.stages)]

        pipeline, whole = Pipeline(made(), plan, loss=loss), made()
        inputs, targets, weights = torch.randn(6, 3), torch.randn(6, 3), torch.rand(6, 1)
        for _ in range(2):
            value = pipeline.step(inputs, (targets, weights))
            wanted = torch.zeros(())
            for x, t, w in zip(inputs.split(2), targets.split(2), weights.split(2), strict=True):
                state: Any = (x,)
                for stage in whole:
                    state = stage(*state)
                part = loss(state, t, w) / 3
                part.backward()
                wanted += part.detach()
            torch.testing.assert_close(value, wanted)
        compare(pipeline.stages, whole, exact=False)
        outputs = pipeline.forward(inputs, everywhere=True)
        assert [tuple(each.shape) for each in outputs] == [(6, 3), (6, 3)]

    dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("name", ["fill_drain", "zb_h1"])
def test_checkpointing_changes_nothing(name: str) -> None:
    inputs, targets = torch.randn(12, 4), torch.randn(12, 4)
    found = []
    for checkpoint in (False, True):
        pipeline = DevicePipeline(
            normed(3), name, devices=["cpu"] * 3, loss=F.mse_loss, num_microbatches=5, checkpoint=checkpoint
        )
        torch.manual_seed(4)
        losses = [pipeline.step(inputs, targets) for _ in range(2)]
        state = {f"{n}.{k}": v for n, stage in pipeline.stages.items() for k, v in stage.state_dict().items()}
        found.append((losses, state, [each.grad for each in pipeline.parameters()], torch.get_rng_state()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[1][1]["1.1.num_batches_tracked"] == 2


class CheckpointedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm2d(2), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpointing.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.slow
def test_layers_that_checkpoint_within_a_stage() -> None:
    """A split backward ended in a CheckpointError of torch."""

    def body() -> None:
        for name, checkpointed in itertools.product(pipeline_plans(), (False, True)):
            plan = pipeline_plan(name, 2, 4)
            torch.manual_seed(0)
            mine = [nn.Sequential(CheckpointedLayer(), nn.Linear(4, 4)) for _ in range(plan.stages)]
            whole = copy.deepcopy(mine)
            pipeline = Pipeline(mine, plan, loss=F.mse_loss, checkpoint=checkpointed)
            for _ in range(2):
                loss = pipeline.step(*a_batch(8))
                torch.testing.assert_close(loss, unsplit(whole, *a_batch(8), 4, backward_order(plan)).float())
            compare(pipeline.stages, whole, exact=False)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_step_after_an_evaluation_in_inference_mode() -> None:
    """Memory that is kept was once made as the caller's mode has it, and could not be written in the next step. Also,
    ranks whose default types differ once could not make a pipeline."""

    def body() -> None:
        torch.set_default_dtype((torch.float32, torch.float64)[dist.get_rank()])
        stages = [nn.Linear(4, 4, dtype=torch.float32) for _ in range(2)]
        pipeline = Pipeline(stages, "1f1b", loss=F.mse_loss, num_microbatches=2)
        x = torch.ones(4, 4, dtype=torch.float32)
        first = pipeline.step(x, x)
        with torch.inference_mode():
            assert pipeline.evaluate(x, x) == first
        assert pipeline.step(x, x) == first

    dist_prims.spawn(body, 2, timeout=60)


def test_stages_side_by_side_do_not_share_memory() -> None:
    """A stage that begins in place once changed what the sigmoid before it had kept, on the same rank or device."""

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    x = torch.randn(4, 4)
    F.mse_loss(first(x) * 2, x).backward()
    wanted = [each.grad.clone() for each in first.parameters()]
    for pipeline in (
        DevicePipeline([first, Double()], devices=["cpu", "cpu"], loss=F.mse_loss, num_microbatches=1),
        Pipeline([first, Double()], "interleaved_1f1b", loss=F.mse_loss, num_microbatches=1, group=_alone()),
    ):
        first.zero_grad()
        pipeline.step(x, x)
        torch.testing.assert_close([each.grad for each in first.parameters()], wanted)
    dist.destroy_process_group()


def _alone() -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.distributed_c10d._get_default_group()


def test_data_parallel_pipelines() -> None:
    """2 x 2 ranks: the whole batch's gradients, and one step of an optimiser."""

    def body() -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        mine, whole = stages_of(2), stages_of(2)
        pipeline = Pipeline(mine, "zb_h1", loss=F.mse_loss, num_microbatches=2, group=mesh["pp"].get_group())
        inputs, targets = a_batch(8)
        part = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
        pipeline.step(inputs[part], targets[part])
        for module in pipeline.stages.values():
            dist_prims.average_gradients(module, mesh["dp"].get_group())
        unsplit(whole, inputs, targets, 4, range(4))
        compare(pipeline.stages, whole, exact=False)

    dist_prims.spawn(body, 4, timeout=60)


def test_nothing_is_negotiated_twice_and_memory_is_used_again() -> None:
    def body() -> list[int]:
        plan = pipeline_plan("1f1b", 2, 4)
        pipeline = Pipeline(stages_of(2), plan, loss=F.mse_loss)
        transfers: Any = pipeline._transfers
        sizes: list[int] = []
        start = transfers._start_transfer

        def noted(kind: Any, data: torch.Tensor, peer: int) -> Any:
            sizes.append(data.nbytes)
            return start(kind, data, peer)

        transfers._start_transfer = noted
        counts = []
        for _ in range(4):
            pipeline.step(*a_batch(8))
            counts.append(len(sizes))
            sizes.clear()
        assert counts[1:] == [len(messages(plan, True)) + 1] * 3  # and what kind of batch comes
        assert counts[0] == counts[1] + 2 * plan.num_microbatches
        buffers = sum(map(len, transfers._pool._kept.values()))
        pipeline.step(*a_batch(8))
        assert sum(map(len, transfers._pool._kept.values())) == buffers
        return counts

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_recorded_rows_are_the_actions_of_the_step() -> None:
    def body() -> list[Any]:
        pipeline = Pipeline(stages_of(2), "zb_h1", loss=F.mse_loss, num_microbatches=3)
        pipeline.step(*a_batch())
        assert pipeline.rows() == []
        pipeline.record = True
        pipeline.step(*a_batch())
        return pipeline.rows()

    rows, nothing = dist_prims.spawn(body, 2, timeout=60)
    plan = pipeline_plan("zb_h1", 2, 3)
    assert nothing == []
    for rank in range(2):
        mine = [row for row in rows if row.rank == rank]
        assert [(row.kind, row.stage, row.micro) for row in mine] == [tuple(action) for action in plan.actions[rank]]
        assert all(one.end <= other.begin for one, other in itertools.pairwise(mine))
    when = {(row.kind, row.stage, row.micro): row for row in rows}
    for micro in range(3):
        assert when["F", 0, micro].end <= when["F", 1, micro].begin
        assert when["B", 1, micro].end <= when["B", 0, micro].begin


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", pipeline_plans())
def test_every_plan_on_cuda_devices(name: str) -> None:
    count = max(torch.cuda.device_count(), 2)
    devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(count)]
    plan = pipeline_plan(name, count, 5)
    mine, whole = stages_of(plan.stages), stages_of(plan.stages)
    pipeline = DevicePipeline(mine, plan, devices=devices, loss=F.mse_loss)
    for _ in range(2):
        loss = pipeline.step(*a_batch())
        wanted = unsplit(whole, *a_batch(), 5, backward_order(plan))
        torch.testing.assert_close(loss.cpu(), wanted.float(), rtol=1e-3, atol=1e-3)
    for number, module in pipeline.stages.items():
        module.cpu()
        for mine_, its in zip(module.parameters(), whole[number].parameters(), strict=True):
            if its.grad is not None:
                torch.testing.assert_close(mine_.grad, its.grad, rtol=1e-2, atol=1e-3)
