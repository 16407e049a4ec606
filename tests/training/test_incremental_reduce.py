"""Buckets in shared memory that are summed while they fill: in any order of ranks they have the bits of a plain sum."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
import dist_prims.errors
from dist_prims import GradientAverager, spawn
from dist_prims.training import incremental_reduce

LAYERS, WIDTH = 8, 128  # a weight is twice what an all_reduce sums at once


class Late(torch.nn.Module):
    """Layers whose backward is late, on each rank in its own way."""

    def __init__(self, dtype: torch.dtype = torch.float32, late: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if x.requires_grad:
                x.register_hook(lambda gradient: time.sleep(self.late()))
        return x


def averaged(model: torch.nn.Module, bucket_mb: float, *, incrementally: bool, **options: Any) -> GradientAverager:
    incremental_reduce._LARGE = 0 if incrementally else 1 << 40
    averager = GradientAverager(model, bucket_mb=bucket_mb, **options)
    buckets = averager._averaging.sender.layout.buckets
    assert any(each.incremental for each in buckets) == incrementally
    return averager


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def step(model: torch.nn.Module, number: int, dtype: torch.dtype = torch.float32) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
    model(torch.randn(3, WIDTH, generator=generator).to(dtype)).square().sum().backward()


def late_at_random() -> float:
    return random.random() * 0.004 if random.random() < 0.3 else 0.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float64), (3, torch.float32), (3, torch.bfloat16), (4, torch.float16)]
)
def test_the_bits_are_those_of_a_plain_sum(size: int, dtype: torch.dtype) -> None:
    def body() -> None:
        for bucket_mb in (0.1, 25):
            random.seed(dist.get_rank())
            one, other = Late(dtype, late_at_random), Late(dtype)
            averaged(one, bucket_mb, incrementally=True)
            averaged(other, bucket_mb, incrementally=False)
            for number in range(3):  # from the second on, ranks know each other's memory
                step(one, number, dtype)
                step(other, number, dtype)
                for mine, plain in zip(gradients(one), gradients(other), strict=True):
                    assert mine.isfinite().all()
                    assert torch.equal(mine, plain)

    spawn(body, size, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_far_behind_delays_no_other_and_little_memory_is_kept(slow: int) -> None:
    def body() -> None:
        bucket_mb = 0.14  # two layers
        model = Late(late=lambda: 0.02 if dist.get_rank() == slow else 0.0)
        other = Late()
        averager = averaged(model, bucket_mb, incrementally=True)
        averaged(other, bucket_mb, incrementally=False)
        last, held = averager._averaging.sender.layout.buckets[-1].incremental, []
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda _: held.append(last._tensor.held()))
        for number in range(3):
            held.clear()
            step(model, number)
            step(other, number)
            assert max(held) <= bucket_mb * 2**20
            if dist.get_rank() != slow:
                assert max(held) >= WIDTH * WIDTH * 4
            assert last._tensor.held() == 0
            assert all(map(torch.equal, gradients(model), gradients(other)))

    spawn(body, 2, backend="dist_prims", timeout=60)


def test_some_of_it_is_added_before_backward_has_ended() -> None:
    def body() -> None:
        model = Late()
        averager = averaged(model, 25, incrementally=True)
        (bucket,) = averager._averaging.sender.layout.buckets
        held: list[int] = []

        def note(parameter: torch.Tensor) -> None:
            dist.barrier()  # what has come here has come everywhere
            held.append(bucket.incremental._tensor.held())

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(note)
        step(model, 0)
        first = held[-1]  # ranks do not know each other's memory yet
        held.clear()
        step(model, 1)
        weight = WIDTH * WIDTH * 4
        assert first > LAYERS / 2 * weight
        assert max(held) <= 2 * weight

    spawn(body, 2, backend="dist_prims", timeout=60)


def test_other_collectives_in_backward_meet_on_all_ranks() -> None:
    """When a bucket is sent must not depend on how far a rank has come with it."""

    class Normed(Late):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                x.register_hook(lambda gradient: time.sleep(self.late()))
                x.register_hook(lambda gradient: dist_prims.all_reduce(gradient.clone()))
            return x

    def body() -> None:
        random.seed(dist.get_rank())
        model, other = Normed(late=late_at_random), Normed()
        averaged(model, 0.1, incrementally=True)
        averaged(other, 0.1, incrementally=False)
        for number in range(4):
            step(model, number)
            step(other, number)
            assert all(map(torch.equal, gradients(model), gradients(other)))

    spawn(body, 3, backend="dist_prims", timeout=60)


def test_two_averagers_in_one_backward() -> None:
    def body() -> None:
        random.seed(dist.get_rank())
        models = [torch.nn.ModuleList(Late(late=late_at_random) for _ in range(2)) for _ in range(2)]
        for pair, incrementally in zip(models, (True, False), strict=True):
            for each in pair:
                averaged(each, 0.1, incrementally=incrementally)
        for number in range(4):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
            x = torch.randn(3, WIDTH, generator=generator)
            for pair in models:
                pair.zero_grad()
                (pair[0](x).square().sum() + 2 * pair[1](-x).square().sum()).backward()
            assert all(map(torch.equal, gradients(models[0]), gradients(models[1])))

    spawn(body, 2, backend="dist_prims", timeout=60)


def test_disagreement_leaves_nothing_that_would_be_added_twice() -> None:
    def body() -> None:
        model = Late()
        group = averaged(model, 25, incrementally=True)._group  # of the averager alone
        step(model, 0)
        other_call = functools.partial(dist.all_reduce, torch.ones(9), group=group)
        disagreeing = (lambda: step(model, 1)) if dist.get_rank() == 0 else other_call
        with pytest.raises(dist_prims.errors.MismatchError):
            disagreeing()
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="other ranks had read some of its"):
                step(model, 1)

    spawn(body, 2, backend="dist_prims", timeout=60)


def test_accumulated_kept_unused_and_strided_gradients() -> None:
    """What does not come fresh, or not as its place lies, goes the plain way, beside what does."""

    class Mixed(Late):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 16, 16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.unused = torch.nn.Linear(WIDTH, WIDTH)
            self.empty = torch.nn.Parameter(torch.empty(0, 3))
            self.transposed = torch.nn.Parameter(torch.randn(WIDTH, WIDTH + 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = x[:1, :16].repeat(1, 8 * 16).reshape(1, 8, 16, 16)
            x = super().forward(x @ self.transposed[:, 1:].T) * self.conv(image).sum()
            return self.unused(x) if dist.get_rank() == 1 else x

    def body() -> None:
        torch.manual_seed(1)
        one = Mixed()
        other = Mixed()
        other.load_state_dict(one.state_dict())
        averagers = averaged(one, 0.2, incrementally=True), averaged(other, 0.2, incrementally=False)
        for number in range(4):
            for model, averager in zip((one, other), averagers, strict=True):
                if number != 2:
                    model.zero_grad(set_to_none=number != 3)
                with averager.no_sync():
                    model(torch.full((3, WIDTH), 0.1 * dist.get_rank() + 0.1)).sum().backward()
                model(torch.full((3, WIDTH), 0.2)).sum().backward()
            assert all(map(torch.equal, gradients(one), gradients(other)))
            assert len(gradients(one)) == len(gradients(other))

    spawn(body, 3, backend="dist_prims", timeout=60)


def test_ranks_with_fewer_batches() -> None:
    def body() -> None:
        models = Late(), Late()
        for model, incrementally in zip(models, (True, False), strict=True):
            averager = averaged(model, 0.2, incrementally=incrementally)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            with averager.join():
                for number in range(2 + 2 * dist.get_rank()):
                    step(model, number)
                    optimizer.step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))

    spawn(body, 3, backend="dist_prims", timeout=60)


def test_a_backward_that_other_ranks_have_seen_is_not_started_again() -> None:
    """In the first step no rank sees anything before it is sent: the ranks do not know each other's memory yet."""

    def body() -> None:
        model, other = Late(), Late()
        averaged(model, 25, incrementally=True)
        averaged(other, 25, incrementally=False)

        def fail(*_: Any) -> None:
            raise ArithmeticError("no good")

        def failing(number: int) -> None:
            handle = model.layers[2].register_full_backward_hook(fail)
            with pytest.raises(ArithmeticError):
                step(model, number)
            handle.remove()

        failing(0)
        step(model, 1)
        step(other, 1)
        assert all(map(torch.equal, gradients(model), gradients(other)))
        failing(2)
        with pytest.raises(RuntimeError, match=r"other ranks had read some of its gradients \(0 of 1"):
            step(model, 3)

    spawn(body, 2, backend="dist_prims", timeout=60)


def test_pinned_schedules_and_groups_without_shared_tensors_reduce_whole_buckets() -> None:
    def body() -> None:
        ring = dist.new_group(backend="dist_prims", pg_options=dist_prims.BackendOptions(all_reduce="ring"))
        gloo = dist.new_group(backend="gloo")
        incremental_reduce._LARGE = 0
        for group in (ring, gloo):
            model, other = Late(), Late()
            averager = GradientAverager(model, group=group)
            assert not any(each.incremental for each in averager._averaging.sender.layout.buckets)
            averaged(other, 25, incrementally=True)
            step(model, 0)
            step(other, 0)
            assert all(map(torch.equal, gradients(model), gradients(other)))

    spawn(body, 2, backend="dist_prims", timeout=60)
