"""Pipelines that run: what the unsplit model gives, whatever plan, engine and batch; and what failures do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.collectives.flat import split_evenly
from dist_prims.errors import CommError, MismatchError
from dist_prims.schedules.pipeline import PipelinePlan, pipeline_plan, pipeline_plans
from dist_prims.training.pipeline.backward import Later, split_backward
from dist_prims.training.pipeline.batch_norm import defer_batch_norm
from dist_prims.training.pipeline.devices import DevicePipeline
from dist_prims.training.pipeline.packet import Layout, Pool, pack, spec_of
from dist_prims.training.pipeline.processes import Pipeline
from dist_prims.training.pipeline.split import split
from dist_prims.training.pipeline.transfer import StageFailed, messages

BACKENDS = ["gloo", "dist_prims"]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as spawned ranks have: the order of additions depends on it
    yield
    torch.set_num_threads(before)


def stages_of(count: int) -> list[nn.Module]:
    """Stages that begin with what works in place, hold convolutions, and one that learns nothing."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for stage in range(count):
        conv = nn.Conv2d(2, 2, 3, padding=1, bias=stage % 2 == 0)
        made.append(nn.Sequential(nn.LeakyReLU(0.1, inplace=stage > 0), conv, nn.Linear(4, 4)))
    made[count // 2].requires_grad_(count == 1)
    return made


def a_batch(count: int = 11, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 2, 4, size), torch.randn(count, 2, 4, size)


def backward_order(plan: PipelinePlan) -> list[int]:
    return [action.micro for action in plan.actions[0] if action.stage == 0 and action.kind in ("B", "BW")]


def unsplit(
    stages: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor, micros: int, order: Sequence[int]
) -> torch.Tensor:
    """One rank, one model, the same micro-batches."""
    lengths = split_evenly(len(inputs), micros)
    xs, ts = inputs.split(lengths), targets.split(lengths)
    losses = {}
    for micro in order:
        loss = F.mse_loss(nn.Sequential(*stages)(xs[micro]), ts[micro]) * (lengths[micro] / len(inputs))
        loss.backward()
        losses[micro] = loss.detach().double()
    return torch.stack([losses[micro] for micro in range(micros)]).sum()


def compare(own: dict[int, nn.Module], whole: Sequence[nn.Module], exact: bool) -> None:
    for number, module in own.items():
        for (name, mine), its in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            if its.grad is None:
                assert mine.grad is None, (number, name)
                continue
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(mine.grad, its.grad, **tolerance, msg=f"stage {number}: {name}")


def every_plan(micros: Sequence[int]) -> None:
    ranks = dist.get_world_size()
    for name in pipeline_plans():
        for count in micros:
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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_plan_gives_what_the_unsplit_model_gives(size: int, backend: str) -> None:
    dist_prims.spawn(every_plan, size, ([1, 5] if size == 3 else [1, 2, 5],), backend=backend, timeout=110)


def test_every_plan_on_four_ranks() -> None:
    dist_prims.spawn(every_plan, 4, ([3],), backend="dist_prims", timeout=110)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_plan_and_many_micro_batches(size: int, backend: str) -> None:
    dist_prims.spawn(every_plan, size, ([1, 2, 3, 5, 8],), backend=backend, timeout=800)


@pytest.mark.parametrize("name", pipeline_plans())
@pytest.mark.parametrize("micros", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_plan_on_devices(name: str, micros: int, ranks: int) -> None:
    plan = pipeline_plan(name, ranks, micros)
    mine, whole = stages_of(plan.stages), stages_of(plan.stages)
    pipeline = DevicePipeline(mine, plan, devices=["cpu"] * ranks, loss=F.mse_loss, metrics={"mae": F.l1_loss})
    inputs, targets = a_batch()
    loss = pipeline.step(inputs.clone(), targets)
    wanted = unsplit(whole, inputs.clone(), targets, micros, backward_order(plan))
    torch.testing.assert_close(loss, wanted.float())
    compare(pipeline.stages, whole, exact=not any(action.kind == "W" for each in plan.actions for action in each))
    outputs = nn.Sequential(*whole)(inputs.clone())
    torch.testing.assert_close(pipeline.forward(inputs.clone()), outputs.detach())
    torch.testing.assert_close(pipeline.evaluate(inputs, targets), loss)
    torch.testing.assert_close(pipeline.measured["mae"], F.l1_loss(outputs, targets))


def test_a_loss_that_is_a_sum() -> None:
    mine, whole = stages_of(2), stages_of(2)
    inputs, targets = a_batch()

    def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    pipeline = DevicePipeline(mine, devices=["cpu"] * 2, loss=squares, micros=4, reduction="sum")
    loss = pipeline.step(inputs, targets)
    wanted = squares(nn.Sequential(*whole)(inputs), targets)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    compare(pipeline.stages, whole, exact=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_other_shapes(backend: str) -> None:
    def body() -> None:
        mine, whole = stages_of(2), stages_of(2)
        pipeline = Pipeline(mine, "1f1b", loss=F.mse_loss, metrics={"mae": F.l1_loss}, micros=4)
        for count in (11, 8, 11, 4, 8, 13):
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
        for width in (8, 4, 8, 5):  # other resolutions
            pipeline.step(*a_batch(5, width))
            assert pipeline.forward(a_batch(5, width)[0], everywhere=True).shape == (5, 2, 4, width)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_kinds_of_batches_beyond_what_is_remembered() -> None:
    def body() -> None:
        pipeline = Pipeline(stages_of(2), "fill_drain", loss=F.mse_loss, micros=2)
        whole = stages_of(2)
        for count in [*range(2, 22), 2, 21, 20, 3]:
            inputs, targets = a_batch(count)
            loss = pipeline.step(inputs.clone(), targets)
            torch.testing.assert_close(loss, unsplit(whole, inputs, targets, 2, range(2)).float())

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


class Carry(nn.Module):
    """Takes and returns several tensors: one that is worked on, a skip, numbers, one that nobody learns from."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.layer, self.first, self.last = nn.Linear(3, 3), first, last

    def forward(self, x: torch.Tensor, *carried: torch.Tensor) -> Any:
        skip, numbers, still = carried if carried else (x * 2, torch.arange(len(x)), x.detach().t())
        x = self.layer(x).relu() + (skip if self.last else 0)
        if self.last:
            return x * numbers[:, None] + still.t(), skip
        return x, skip, numbers, still


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


def normed(count: int, deferred: bool) -> list[nn.Module]:
    torch.manual_seed(3)
    made = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)) for _ in range(count)]
    return [defer_batch_norm(each, 5) for each in made] if deferred else list(made)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["fill_drain", "zb_h1"])
def test_checkpointing_changes_nothing(name: str, deferred: bool) -> None:
    inputs, targets = torch.randn(12, 4), torch.randn(12, 4)
    found = []
    for checkpoint in (False, True):
        pipeline = DevicePipeline(
            normed(3, deferred), name, devices=["cpu"] * 3, loss=F.mse_loss, micros=5, checkpoint=checkpoint
        )
        torch.manual_seed(4)
        losses = [pipeline.step(inputs, targets) for _ in range(2)]
        state = {f"{n}.{k}": v for n, stage in pipeline.stages.items() for k, v in stage.state_dict().items()}
        found.append((losses, state, [each.grad for each in pipeline.parameters()], torch.get_rng_state()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[1][1]["1.1.num_batches_tracked"] == (2 if deferred else 10)


def test_checkpointing_across_ranks() -> None:
    def body() -> None:
        for name in ("1f1b", "zbv"):
            plan = pipeline_plan(name, 2, 3)
            mine, whole = stages_of(plan.stages), stages_of(plan.stages)
            for module in mine:
                module[0].inplace = False
            pipeline = Pipeline(mine, plan, loss=F.mse_loss, checkpoint=True)
            for _ in range(2):
                pipeline.step(*a_batch())
                unsplit(whole, *a_batch(), 3, backward_order(plan))
            compare(pipeline.stages, whole, exact=False)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_failure_reaches_all_and_the_next_step_works(backend: str, name: str) -> None:
    """Who fails, in what, before and after the layouts are known."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        plan = pipeline_plan(name, size, 4)
        for warm in (False, True):
            for guilty in range(size):
                for kind in "FB":
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
    except StageFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["1f1b", "zb_h1"])
def test_a_failure_that_no_message_carries_reaches_all(plan: str) -> None:
    """The last work of the first stage: once the others returned a loss, and would have stepped."""

    def body() -> None:
        def burst(grad: torch.Tensor) -> None:
            raise ArithmeticError("the last gradient")

        layers = [nn.Linear(4, 4) for _ in range(3)]
        pipeline = Pipeline(layers, plan, loss=F.mse_loss, micros=3)
        hook = layers[0].weight.register_hook(burst)
        told = _failure(lambda: pipeline.step(torch.ones(6, 4), torch.ones(6, 4)))
        assert "rank 0: " in told
        assert "the last gradient" in told
        hook.remove()
        assert pipeline.step(torch.ones(6, 4), torch.ones(6, 4)) > 0

    dist_prims.spawn(body, 3, timeout=60)


def test_a_failure_reaches_all_where_heads_are_read_late() -> None:
    """As on CUDA, where nobody waits for a message to read it: a rank in between computes with zeros and sends on."""

    def body() -> None:
        pipeline = Pipeline([Explosive() for _ in range(3)], "1f1b", loss=F.mse_loss, micros=3)
        pipeline.step(torch.ones(6, 4), torch.ones(6, 4))
        pipeline._transfers._queued = True
        Bomb.armed = "F" if dist.get_rank() == 0 else ""
        assert "rank 0: F(" in _failure(lambda: pipeline.step(torch.ones(6, 4), torch.ones(6, 4)))

    dist_prims.spawn(body, 3, timeout=60)


def test_what_cannot_be_sent_is_told_at_once() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    def body() -> None:
        pipeline = Pipeline([Sparse(), nn.Linear(4, 4)], "1f1b", loss=F.mse_loss, micros=2)
        words = "ValueError: a stage gives a tensor of layout torch.sparse_coo"
        assert words in _failure(lambda: pipeline.step(torch.ones(4, 4), torch.ones(4, 4)))

    dist_prims.spawn(body, 2, timeout=60)


def test_a_step_after_an_evaluation_in_inference_mode() -> None:
    """Memory that is kept was once made as the caller's mode has it, and could not be written in the next step."""

    def body() -> None:
        pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], "1f1b", loss=F.mse_loss, micros=2)
        x = torch.ones(4, 4)
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
        DevicePipeline([first, Double()], devices=["cpu", "cpu"], loss=F.mse_loss, micros=1),
        Pipeline([first, Double()], "interleaved_1f1b", loss=F.mse_loss, micros=1, group=_alone()),
    ):
        first.zero_grad()
        pipeline.step(x, x)
        torch.testing.assert_close([each.grad for each in first.parameters()], wanted)
    dist.destroy_process_group()


def _alone() -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.distributed_c10d._get_default_group()


def test_a_failed_step_leaves_no_statistics() -> None:
    """The micro-batches that a failed step had seen were once part of the next batch, and of all that followed."""
    norm = defer_batch_norm(nn.Sequential(nn.BatchNorm1d(4)), 3)
    stage = nn.Sequential(norm, Explosive())
    pipeline = DevicePipeline([stage], "fill_drain", devices=["cpu"], loss=F.mse_loss, micros=3)
    Bomb.armed = "F"
    x = torch.randn(6, 4)
    with pytest.raises(ArithmeticError):
        pipeline.step(5 * x, x)  # the norm has seen its first micro-batch
    Bomb.armed = ""
    pipeline.step(x, x)
    torch.testing.assert_close(norm[0].running_mean, 0.1 * x.mean(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_calls_are_told_to_all(backend: str) -> None:
    def body() -> None:
        pipeline = Pipeline(stages_of(2), "1f1b", loss=F.mse_loss, micros=4)
        rank = dist.get_rank()
        inputs, targets = a_batch(8)
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: pipeline.step(None, targets), "rank 0: step failed: ValueError: step() has no inputs"),
            (lambda: pipeline.step(inputs[:3], targets[:3]), "hold 3 items for 4 micro-batches"),
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
        loss = Pipeline(stages_of(2), "1f1b", micros=4)
        assert "made without a loss" in _failure(lambda: loss.step(inputs, targets))
        assert pipeline.step(inputs, targets) > 0

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_a_model_that_changes_says_what_to_do() -> None:
    def body() -> None:
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], "1f1b", loss=F.mse_loss, micros=2)
        x = torch.ones(4, 2)
        pipeline.step(x, x)
        for module in pipeline.stages.values():
            module.requires_grad_(dist.get_rank() == 1)
        words = "rank 0: F(stage 0, micro-batch 0) failed: ValueError: the output of stage 0 is now (float32[2, 2])"
        assert words in (told := _failure(lambda: pipeline.step(x, x))), told
        pipeline.renegotiate()
        pipeline.step(x, x)

    dist_prims.spawn(body, 2, timeout=60)


def test_ranks_must_agree_on_the_pipeline() -> None:
    def body() -> None:
        rank = dist.get_rank()
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        with pytest.raises(MismatchError, match=r"Rank \d has 1f1b \(stages=2, micros=\d.*rank \d has 1f1b"):
            Pipeline(layers, "1f1b", micros=2 + rank)
        with pytest.raises((MismatchError, ValueError), match=r"rank 1 is given stages \[0\]; by 1f1b it has \[1\]"):
            Pipeline({0: layers[0]}, "1f1b")
        with pytest.raises(ValueError, match="3 stages cannot be shared evenly among 2 ranks"):
            Pipeline([*layers, nn.ReLU()])
        with pytest.raises(ValueError, match="fill_drain is for micros=3, and here micros=4"):
            Pipeline(layers, pipeline_plan("fill_drain", 2, 3), micros=4)
        with pytest.raises((MismatchError, TypeError), match="stage 1 is a str"):
            Pipeline([layers[0], "layer"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="reduction='max'"):
            Pipeline(layers, reduction="max")
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        with pytest.raises(MismatchError, match=r"cut [0-9a-f]{8}\).*same plan, micros, reduction, metrics, cut"):
            Pipeline(split(model, 2, by=[2, 2] if rank else [3, 1]), "1f1b")  # a layer was once left out in silence
        Pipeline({rank: layers[rank]}, "1f1b")

    dist_prims.spawn(body, 2, timeout=60)


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    def body() -> str:
        pipeline = Pipeline(stages_of(2), "1f1b", loss=F.mse_loss, micros=2)
        pipeline.step(*a_batch())
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            return "left"
        with pytest.raises(CommError, match="rank 1"):
            pipeline.step(*a_batch())
        return "knew"

    assert dist_prims.spawn(body, 2, backend="dist_prims", timeout=60) == ["knew", "left"]


def test_data_parallel_pipelines() -> None:
    """2 x 2 ranks: the whole batch's gradients, and one step of an optimiser."""

    def body() -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        mine, whole = stages_of(2), stages_of(2)
        pipeline = Pipeline(mine, "zb_h1", loss=F.mse_loss, micros=2, group=mesh["pp"].get_group())
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
        transfers = pipeline._transfers
        sizes: list[int] = []
        start = transfers._start
        transfers._start = lambda kind, data, peer: (sizes.append(data.nbytes), start(kind, data, peer))[1]
        counts = []
        for _ in range(4):
            pipeline.step(*a_batch(8))
            counts.append(len(sizes))
            sizes.clear()
        assert (
            counts[1:] == [len(messages(plan, True)) + 1 + 1 + 3] * 3
        )  # the word in front, behind all is well and the loss
        assert counts[0] == counts[1] + 2 * plan.micros
        buffers = sum(map(len, transfers._pool._kept.values()))
        pipeline.step(*a_batch(8))
        assert sum(map(len, transfers._pool._kept.values())) == buffers
        return counts

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_rows_are_what_was_done() -> None:
    def body() -> list[Any]:
        pipeline = Pipeline(stages_of(2), "zb_h1", loss=F.mse_loss, micros=3)
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


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(3, 5), (4, 3)),
    (lambda: nn.Linear(3, 5, bias=False), (2, 4, 3)),
    (lambda: nn.Linear(3, 5), (3,)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 2, padding="same"), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding="valid", padding_mode="reflect"), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=False), (4, 7, 8)),
    (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 3, 4, 3)),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.LayerNorm(3), nn.Linear(3, 2)), (0, 3)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), (4, 3)),
    (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (2, 3, 4)),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), (4, 3, 4)),
    (lambda: nn.Linear(3, 5, bias=False), (3,)),
    (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, stride=2, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, groups=2, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, padding=1, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv1d(4, 6, 1, bias=False).double(), (2, 4, 7)),
    (lambda: nn.Linear(3, 5, dtype=torch.complex64), (4, 3)),
]


@pytest.mark.parametrize("case", range(len(LAYERS)))
@pytest.mark.parametrize("of_input", [True, False])
def test_a_split_backward_gives_the_whole_one(case: int, of_input: bool) -> None:
    make, shape = LAYERS[case]
    torch.manual_seed(0)
    one = make()
    other = make()
    other.load_state_dict(one.state_dict())
    x = torch.randn(shape, requires_grad=of_input, dtype=next(one.parameters()).dtype)
    y = x.detach().clone().requires_grad_(of_input)
    later = Later()
    for _ in range(2):  # gradients add up
        first = one(x, x, x)[0] if isinstance(one, nn.MultiheadAttention) else one(x)
        with split_backward(later):
            second = other(y, y, y)[0] if isinstance(other, nn.MultiheadAttention) else other(y)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        first.abs().square().sum().backward()
        second.abs().square().sum().backward()
        later.drain()
        for mine, its in zip(other.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        if of_input:
            torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.parametrize("watched", ["hook", "after", "by DDP", "by nobody"])
def test_whoever_watches_a_weight_sees_each_gradient(watched: str) -> None:
    """A product of matrices is added to ``.grad`` as it is computed, but not behind somebody's back."""
    layer = nn.Conv2d(2, 3, 1, bias=False)
    seen: list[torch.Tensor] = []
    if watched == "hook":
        layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    elif watched == "after":
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    node = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(layer.weight.grad))
    for _ in range(3):
        later = Later(watched=watched == "by DDP")
        with split_backward(later):
            layer(torch.ones(1, 2, 3, 3)).sum().backward()
        later.drain()
    assert layer.weight.grad.flatten().tolist() == [27.0] * 6
    assert len(seen) == {"hook": 6, "after": 6, "by DDP": 3, "by nobody": 1}[watched]  # the first is always autograd's


def test_a_split_backward_leaves_the_weights_for_later() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[3].weight = model[1].weight  # tied
    model[1].bias.requires_grad_(False)  # autograd's then
    whole = [each.detach().clone() for each in _whole_gradients(model)]
    seen: list[str] = []
    model[0].weight.register_hook(lambda grad: seen.append("hook"))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("after"))
    later = Later()
    with split_backward(later):
        loss = model(torch.tensor([[1, 2], [2, 4]])).square().sum()
    loss.backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    assert seen == []
    later.drain()
    assert seen == ["hook", "after"]
    found = [each.grad for each in model.parameters() if each.grad is not None]
    torch.testing.assert_close(found, whole)


def _whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.tensor([[1, 2], [2, 4]])).square().sum().backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return found


def test_a_split_backward_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randint(5, (4, 2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    plain.float().square().sum().backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    later = Later()
    with torch.autocast("cpu", torch.bfloat16), split_backward(later):
        split = model(x)
    assert split.dtype == torch.bfloat16
    assert torch.equal(split, plain)
    split.float().square().sum().backward()
    later.drain()
    for each, its in zip(model.parameters(), wanted, strict=True):
        assert each.grad is not None
        assert each.grad.dtype == torch.float32
        torch.testing.assert_close(each.grad, its, rtol=0.02, atol=0.02)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool]
tensors = st.builds(
    lambda dtype, shape, swap: (
        torch.ones(shape).mul(3).to(dtype).transpose(0, -1) if swap and shape else torch.ones(shape, dtype=dtype)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(tensors, max_size=5))
def test_tensors_lie_in_a_message_as_they_were(several: list[torch.Tensor]) -> None:
    layout = Layout(map(spec_of, several))
    assert Layout.decode(layout.encode()) == layout
    data = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    pack(data, layout, several)
    for view, tensor in zip(layout.views(data), several, strict=True):
        assert torch.equal(view, tensor)
        assert view.data_ptr() % 16 == 0 or not view.numel()


def test_memory_is_not_used_again_while_a_graph_has_it() -> None:
    pool = Pool(torch.device("cpu"))
    data = pool.take(64)
    place = data.data_ptr()
    x = data.view(torch.float32).fill_(1).requires_grad_()
    y = x.square().sum()
    del data
    assert pool.take(64).data_ptr() != place  # x and the graph are there
    del x
    assert pool.take(64).data_ptr() != place  # the graph is
    del y
    assert pool.take(64).data_ptr() == place


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
