"""Mixed precision: one verdict on overflow for all ranks, whatever holds the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.training.compression import Half
from dist_prims.training.mixed_precision import agree_on_overflow, unscale


def parameter(value: float = 0.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2,), value))


def backward(scaler: torch.amp.GradScaler, weight: torch.nn.Parameter, gradient: float) -> None:
    weight.grad = None
    scaler.scale((weight * gradient).sum()).backward()


def of_all_ranks(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "dist_prims"), (3, "gloo"), (4, "dist_prims")])
def test_a_rank_that_overflows_holds_all_back(size: int, backend: str) -> None:
    """Each rank has a parameter of its own, as with sharded optimisers; each in turn overflows, by inf or NaN."""

    def body() -> None:
        rank, weight = dist.get_rank(), parameter()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(2 * size):
            bad = [float("inf"), float("nan")][step // size] if step % size == rank else -1.0
            backward(scaler, weight, bad)
            unscale(scaler, optimizer)
            assert scaler.step(optimizer) is None
            scaler.update()
            assert weight.tolist() == [0.0, 0.0]
            assert scaler.get_scale() == 8.0 / 2 ** (step + 1)
        for _ in range(2):
            backward(scaler, weight, -1.0 - rank)
            unscale(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert weight.tolist() == [2.0 + 2 * rank] * 2  # unscaled, and every step made
        assert scaler.get_scale() == 8.0 / 2 ** (2 * size - 1)  # grown after two
        assert of_all_ranks(scaler.state_dict()) == [scaler.state_dict()] * size

    dist_prims.spawn(body, size, timeout=60, backend=backend)


def test_several_optimisers_each_have_a_verdict() -> None:
    def body() -> tuple[float, float, float]:
        one, two = parameter(), parameter()
        optimizers = [torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=1.0)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        backward(scaler, one, -1.0)
        backward(scaler, two, float("inf") if dist.get_rank() == 1 else -1.0)
        for optimizer in optimizers:
            unscale(scaler, optimizer)
            scaler.step(optimizer)
        scaler.update()
        return one[0].item(), two[0].item(), scaler.get_scale()

    assert dist_prims.spawn(body, 2, timeout=60) == [(1.0, 0.0, 4.0)] * 2


def test_a_rank_without_a_loss_and_one_without_gradients() -> None:
    """The first stage of a pipeline scales nothing; an expert that no token has reached has no gradient; a sharded
    optimiser with fewer parameters than ranks has none at all on rank 3."""

    def body() -> tuple[float, float]:
        rank, weight = dist.get_rank(), parameter()
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [weight]}]
        optimizer = torch.optim.SGD(groups[: 1 + (rank < 3)], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            weight.grad = None
            if rank == 0:
                weight.grad = torch.full((2,), float("inf") if step == 0 else -4.0)  # from a later stage
            if rank == 1:
                backward(scaler, weight, -1.0)
            unscale(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        return weight[0].item(), scaler.get_scale()

    assert dist_prims.spawn(body, 4, timeout=60) == [(1.0, 4.0), (1.0, 4.0), (0.0, 4.0), (0.0, 4.0)]


def test_a_sub_group_decides_for_itself() -> None:
    def body() -> float:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        weight = parameter()
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
        backward(scaler, weight, float("inf") if dist.get_rank() == 2 else -1.0)
        unscale(scaler, optimizer, pairs[dist.get_rank() // 2])
        scaler.step(optimizer)
        return weight[0].item()

    assert dist_prims.spawn(body, 4, timeout=60, backend="dist_prims") == [1.0, 1.0, 0.0, 0.0]


def test_ranks_with_different_scales_get_an_error() -> None:
    """As after a state that only one rank has loaded: gradients would be divided by different numbers."""

    def body() -> None:
        weight, rank = parameter(), dist.get_rank()
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
        backward(scaler, weight, -1.0)
        scaler.update(2.0) if rank == 1 else None
        with pytest.raises(MismatchError, match=rf"rank {rank}: unscale: scale={(8, 2)[rank]}.0 here, 2.0 to 8.0"):
            unscale(scaler, optimizer)
        scaler.step(optimizer)  # skips
        assert weight.tolist() == [0.0, 0.0]
        # The scales were once compared in the default type of a rank, in which these two are equal.
        torch.set_default_dtype(torch.bfloat16)
        with pytest.raises(MismatchError, match=r"1024.0 to 1025.0 on all ranks"):
            agree_on_overflow(0.0, None, 1024.0 + rank)
        dist_prims.barrier()

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize(("fault", "backend"), [("float16", "gloo"), ("twice", "dist_prims")])
def test_a_rank_that_cannot_unscale_tells_the_others(fault: str, backend: str) -> None:
    """Otherwise their verdict would meet the next call of that rank."""

    def body() -> None:
        is_bad = dist.get_rank() == 1
        weights = [parameter(), parameter()]
        if fault == "float16" and is_bad:
            weights[1] = torch.nn.Parameter(weights[1].detach().half())
        optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for weight in weights:
            backward(scaler, weight, -1.0)
        unscale(scaler, optimizers[0])
        own = ValueError if fault == "float16" else RuntimeError
        says = "FP16|already been called" if is_bad else "rank 0: unscale: a rank could not unscale"
        with pytest.raises(own if is_bad else RuntimeError, match=says):
            unscale(scaler, optimizers[0 if fault == "twice" and is_bad else 1])
        if not is_bad:
            scaler.step(optimizers[1])
            assert weights[1].tolist() == [0.0, 0.0]  # a rank that goes on nonetheless skips
        total = torch.tensor([7.0])
        dist.all_reduce(total)
        assert total.item() == 14.0

    dist_prims.spawn(body, 2, timeout=60, backend=backend)


def test_a_scaler_that_is_off_does_nothing() -> None:
    def body() -> None:
        weight = parameter()
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", enabled=False)
        if dist.get_rank() == 0:  # no message is sent, so one rank alone may
            backward(scaler, weight, -1.0)
            unscale(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert weight.tolist() == [1.0, 1.0]

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("wrapper", ["averager", "fp16"])
def test_an_overflow_of_one_rank_skips_the_step_of_all(wrapper: str) -> None:
    """An infinity of one rank reaches all, also through float16, where what is too large becomes one."""

    def body() -> None:
        model: Any = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        weight = model.weight
        dist_prims.GradientAverager(model, compress=None if wrapper == "averager" else Half(torch.float16))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            overflows = step == 1 and dist.get_rank() == 1
            wide = 1e38 if wrapper != "fp16" else 100.0  # 1024 * 100 is more than float16 holds
            x = torch.full((1, 4), wide if overflows else -0.25)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert of_all_ranks(weight.tolist()) == [weight.tolist()] * 2
        assert weight.tolist() == [[0.75] * 4]
        assert scaler.get_scale() == 2.0**9

    dist_prims.spawn(body, 2, timeout=60)
