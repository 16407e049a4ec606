"""GradientAverager and DistributedDataParallel after a rank has died: resized, made again, or used by mistake."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import batch, net
from survivors import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dist_prims
from dist_prims.training import GradientAverager
from dist_prims.training.checkpoint import Checkpoints
from dist_prims.training.compression import PowerSGD

Loss = Callable[[nn.Module, int], torch.Tensor]


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def gradients(model: nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.tolist() for each in model.parameters()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(model: nn.Module, victim: bool) -> None:
    """A backward in which a rank dies when some gradients have been sent."""
    first = next(model.parameters())
    if victim:
        first.register_hook(lambda gradient: die())
    with pytest.raises(dist_prims.CommError):
        loss(model, 1).backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [None, "fp16", "powersgd", "int8"])
def test_a_resized_averager_averages_as_a_new_one(kind: str | None, tmp_path: Path) -> None:
    """What the failed backward had collected is not in the next mean, and no error feedback either."""

    def compressor() -> Any:
        return PowerSGD(rank=1, warm_up=1) if kind == "powersgd" else kind

    def body(rank: int) -> Any:
        model = net(seed=rank)
        averager = GradientAverager(model, bucket_mb=1e-4, compress=compressor())
        loss(model, 0).backward()
        fail(model, rank == 1)
        dist_prims.shrink()
        averager.resize()
        found: list[Any] = []
        for _ in range(2):
            assert found or gradients(model) == [None] * len(gradients(model))
            for step in (2, 3):
                model.zero_grad()
                loss(model, step).backward()
                found.append(gradients(model))
            model.zero_grad()
            averager = GradientAverager(model, bucket_mb=1e-4, compress=compressor())
        return found

    ranks = run_ranks(body, 3, tmp_path)
    assert ranks[0] == ranks[2]
    assert ranks[0][:2] == ranks[0][2:]


def test_large_buckets_that_are_summed_while_they_fill(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        model = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 1200))
        averager = GradientAverager(model, bucket_mb=6)
        x = torch.ones(2, 1200) * (rank + 1)
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        if rank == 2:
            model.get_parameter("1.weight").register_hook(lambda gradient: die())
        with pytest.raises(dist_prims.CommError):
            model(x).sum().backward()
        dist_prims.shrink()
        averager.resize()
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        return model.get_parameter("2.bias").grad.unique().tolist()

    assert run_ranks(body, 3, tmp_path)[:2] == [[2.0], [2.0]]


def test_all_ranks_take_the_values_of_rank_0_and_a_new_rank_makes_an_averager(tmp_path: Path) -> None:
    """resize() on the ranks that were there pairs with the constructor on new ones."""

    def body(rank: int) -> Any:
        model = nn.Linear(1, 1)
        pair = dist.new_group([0, 1])
        averager = GradientAverager(model, group=pair) if rank < 2 else None
        nn.init.constant_(model.weight, rank + 1.0)
        if averager:
            averager.resize()
        else:
            averager = GradientAverager(model)
        found = model.weight.item()
        model(torch.full((1, 1), float(rank))).sum().backward()
        return found, model.weight.grad.item()

    assert run_ranks(body, 3, tmp_path) == [(1.0, 1.0)] * 3


def test_an_averager_of_a_sub_group(tmp_path: Path) -> None:
    """Only the sub-group is repaired, so the duplicate of the old one is still there, and ends."""

    def body(rank: int) -> Any:
        trio = dist.new_group([1, 2, 3])
        if rank == 0:
            return None
        model = net()
        averager = GradientAverager(model, group=trio)
        groups = len(dist.distributed_c10d._world.pg_map)
        fail(model, rank == 1)
        averager.resize(dist_prims.shrink(trio))
        loss(model, 2).backward()
        mine = gradients(model)
        assert len(dist.distributed_c10d._world.pg_map) == groups
        averager.remove()
        return mine

    found = run_ranks(body, 4, tmp_path)
    assert found[2] == found[3]
    assert found[2] is not None


def test_another_rank_dies_in_resize(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        model = net()
        averager = GradientAverager(model)
        fail(model, rank == 3)
        dist_prims.shrink()
        if rank == 0:
            averager._synchronize = lambda source: die()  # type: ignore[method-assign]
        if rank > 0:
            with pytest.raises(dist_prims.CommError):
                averager.resize()
            dist_prims.shrink()
        averager.resize()
        loss(model, 2).backward()
        return gradients(model)

    found = run_ranks(body, 4, tmp_path)
    assert found[1] == found[2]
    assert found[1] is not None


def test_resize_by_mistake(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        model = nn.Linear(1, 1)
        averager = GradientAverager(model)
        for call in (averager.resize, averager.synchronize):
            with averager.join(), pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) is called within join\(\)"):
                call()
        other = nn.Linear(1, 1 + rank)
        del averager
        with pytest.raises(dist_prims.MismatchError, match="Build the same model"):
            GradientAverager(other)
        averager = GradientAverager(model)
        averager.remove()
        with pytest.raises(RuntimeError, match=r"no longer in use: remove\(\) was called"):
            averager.resize()
        return "refused"

    assert run_ranks(body, 2, tmp_path) == ["refused"] * 2


def test_an_averager_that_was_not_resized(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        model = net()
        _averager = GradientAverager(model)
        fail(model, rank == 1)
        dist_prims.shrink()
        model.zero_grad()
        with pytest.raises(RuntimeError) as error:
            loss(model, 2).backward()
        return str(error.value)

    for text in run_ranks(body, 3, tmp_path)[::2]:
        assert "resize" in text, text


HOOKS: dict[str, Any] = {
    "none": None,
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "powerSGD_hook": powerSGD_hook.powerSGD_hook,
}


def hooked(model: nn.Module, name: str) -> DistributedDataParallel:
    parallel = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    if HOOKS[name]:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2) if name == "powerSGD_hook" else None
        parallel.register_comm_hook(state, HOOKS[name])
    return parallel


@pytest.mark.parametrize("name", HOOKS)
def test_ddp_is_made_again(name: str, tmp_path: Path) -> None:
    """Its error is a RuntimeError: C++ passes an error on without its type. The old object is deleted first, because
    its hooks are on the parameters."""

    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2))
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
        parallel = hooked(model, name)
        parallel(x).square().mean().backward()
        if rank == 1:
            model.get_parameter("0.weight").register_hook(lambda gradient: die())
        with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has died"):
            parallel(x).square().mean().backward()
        dist_prims.shrink()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="the group has been destroyed"):
            parallel(x)  # its buffers are those of rank 0, over the old group
        del parallel
        parallel = hooked(model, name)
        for _ in range(2):
            model.zero_grad()
            parallel(x).square().mean().backward()
        found = gradients(model)
        del parallel
        model.zero_grad()
        model(x).square().mean().backward()
        own = [each.grad.clone() for each in model.parameters()]
        for each in own:
            dist.all_reduce(each)
        return found, [(each / 2).tolist() for each in own]

    found = run_ranks(body, 3, tmp_path)
    assert found[0][0] == found[2][0]
    if name in ("none", "allreduce_hook"):
        for one, two in zip(*found[0], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(two))


def test_checkpoints_go_on_with_the_new_group(tmp_path: Path) -> None:

    def body(rank: int) -> Any:
        layer = nn.Linear(1, 1)
        checkpoints = Checkpoints(tmp_path / "checkpoints", {"layer": layer})
        checkpoints.save(1)
        if rank == 0:
            die()
        with pytest.raises(dist_prims.CommError):
            checkpoints.save(2)
        group = dist_prims.shrink()
        checkpoints.resize(group)
        nn.init.constant_(layer.weight, 1.5)
        checkpoints.save(2)
        nn.init.zeros_(layer.weight)
        return checkpoints.restore(), checkpoints.steps(), layer.weight.item()

    assert run_ranks(body, 3, tmp_path)[1:] == [(2, [2, 1], 1.5)] * 2
