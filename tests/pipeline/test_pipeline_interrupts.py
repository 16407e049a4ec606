"""Calls of a pipeline that a rank leaves by Ctrl-C or another exception: every rank raises, and then makes it again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import BACKENDS
from torch import nn
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import CommError
from dist_prims.schedules.pipelines import pipeline_plan
from dist_prims.training.group_duplicates import duplicate
from dist_prims.training.pipeline import transfer
from dist_prims.training.pipeline.processes import Pipeline
from dist_prims.training.pipeline.transfer import Transfers

pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = 1000


class Interrupted(nn.Linear):
    """A layer whose forward number ``at`` raises, of those that follow."""

    at = NEVER
    kind: type[BaseException] = KeyboardInterrupt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at -= 1
        if self.at == -1:
            raise self.kind
        return super().forward(x)


class InterruptedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


X = torch.ones(8, 4)


def steps_after(pipeline: Pipeline, may_raise: type[BaseException] | None) -> None:
    """A step that some ranks leave, the error of the next one, and a new pipeline."""
    saved: BaseException | None = None
    try:
        pipeline.step(X, X)
    except BaseException as error:
        saved = error  # as notebooks do: its traceback refers to the transfers
    if may_raise is None or not isinstance(saved, may_raise):
        assert isinstance(saved, CommError), repr(saved)
        assert "make the pipeline again, on every rank of its group" in str(saved)
    stage: Any
    for stage in pipeline.stages.values():
        stage.at = NEVER
    words = r"rank \d: step\(\) of the pipeline: step\(\) before it was left .* make the pipeline again"
    with pytest.raises(CommError, match=words):
        pipeline.step(X, X)
    again = Pipeline(pipeline.stages, pipeline.plan, loss=F.mse_loss)
    again.step(X, X)
    assert again.forward(X, everywhere=True).shape == X.shape


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_ranks_that_are_interrupted_at_any_point_make_the_pipeline_again(backend: str, name: str) -> None:
    """The next step once waited without end, or read messages of the old step as its own."""

    def body() -> None:
        plan = pipeline_plan(name, 2, 4)
        points = ((0, 0), (3, 0), (3, 3), (1, NEVER), (NEVER, 2))
        for (first, second), warm in zip(points, itertools.cycle((False, True))):
            pipeline = Pipeline([Interrupted(4, 4) for _ in range(plan.stages)], plan, loss=F.mse_loss)
            if warm:
                pipeline.step(X, X)
            point = second if dist.get_rank() else first
            stage: Any
            for stage in pipeline.stages.values():
                stage.at = point
            steps_after(pipeline, None if point == NEVER else KeyboardInterrupt)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_that_is_interrupted_ends_the_call_of_all(backend: str) -> None:
    def body() -> None:
        for guilty, kind in enumerate([KeyboardInterrupt, SystemExit, GeneratorExit]):
            pipeline = Pipeline([Interrupted(4, 4) for _ in range(3)], loss=F.mse_loss, num_microbatches=4)
            stage: Any
            for stage in pipeline.stages.values():
                stage.at, stage.kind = 2 if dist.get_rank() == guilty else NEVER, kind
            steps_after(pipeline, kind if dist.get_rank() == guilty else None)

    dist_prims.spawn(body, 3, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_in_the_last_backward_ends_the_call_of_all(backend: str) -> None:
    """No rank waits for the last backward of the first stage, but for the success of its rank."""

    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return InterruptedBackward.apply(x) if dist.get_rank() == 0 and self.training else x

    def body() -> None:
        stages = [nn.Sequential(nn.Linear(4, 4), Last()), nn.Linear(4, 4)]
        pipeline = Pipeline(stages, "fill_drain", loss=F.mse_loss, num_microbatches=1)
        with pytest.raises((KeyboardInterrupt, CommError)):
            pipeline.step(X, X)
        with pytest.raises(CommError, match="make the pipeline again"):
            pipeline.evaluate(X, X)
        pipeline.eval()
        Pipeline(stages, loss=F.mse_loss).evaluate(X, X)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def interrupted_at(transfers: Transfers, number: int, of: str) -> None:
    """Let an interrupt come behind a start of a transfer, before a wait, or behind a wait."""
    left, name = number, "_start_transfer" if of == "start" else "_wait"
    call = getattr(transfers, name)

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1 and of == "before a wait":
            del arguments
            raise KeyboardInterrupt
        found = call(*arguments)
        if left == -1:
            del arguments, found  # or the traceback would refer to the transfer
            raise KeyboardInterrupt
        return found

    setattr(transfers, name, interrupted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of", ["start", "before a wait", "behind a wait"])
def test_an_interrupt_within_a_transfer_ends_the_call_of_all(backend: str, of: str) -> None:
    """A rank does not know then what it has sent and received; number 0 is its very first message."""

    def body() -> None:
        for warm, number, guilty in ((False, 0, 0), (False, 2, 1), (True, 0, 1), (True, 2, 0)):  # all pairs
            pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss=F.mse_loss, num_microbatches=4)
            if warm:
                pipeline.step(X, X)
            is_interrupted = dist.get_rank() == guilty
            if is_interrupted:
                interrupted_at(pipeline._transfers, number, of)
            steps_after(pipeline, KeyboardInterrupt if is_interrupted else None)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_a_call_that_has_sent_nothing_can_be_made_again() -> None:
    """An interrupt before the call, as in the scaler, leaves no message: the other ranks wait for the next call."""

    class Scaler:
        left = 1

        def scale(self, value: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 0 and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return value

    def body() -> None:
        pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss=F.mse_loss, scaler=Scaler())
        if dist.get_rank() == 0:
            with pytest.raises(KeyboardInterrupt):
                pipeline.step(X, X)
        pipeline.step(X, X)

    dist_prims.spawn(body, 2, timeout=60)


def test_a_pipeline_is_made_when_all_ranks_have_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was interrupted in its first step closed connections that another rank still waited for."""

    def make_slowly(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
        made = duplicate(group, name)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            (tmp_path / "made").touch()
        return made

    def body() -> None:
        Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss=F.mse_loss)
        assert (tmp_path / "made").exists()

    monkeypatch.setattr(transfer, "duplicate", make_slowly)
    dist_prims.spawn(body, 2, timeout=60)


def test_groups_of_pipelines_end_with_them() -> None:
    def body() -> None:
        before = len(dist.distributed_c10d._world.pg_map)
        for _ in range(3):
            Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss=F.mse_loss).step(X, X)
        dist.barrier()
        assert len(dist.distributed_c10d._world.pg_map) == before

    dist_prims.spawn(body, 2, timeout=60)
