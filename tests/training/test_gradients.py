"""GradientAverager: the same as DistributedDataParallel to the last bit, and what that does not do."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import BACKENDS, assert_same, batch, net, same_everywhere, spawn
from nccl_ranks import REASON, device, on_two_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dist_prims.training.gradients import GradientAverager


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "backend", "overlap", "bucket_mb"),
    [  # all pairs, but for gloo on one rank
        (1, "dist_prims", True, 25),
        (1, "dist_prims", False, 0.0004),
        (2, "dist_prims", True, 0.0004),
        (2, "gloo", False, 25),
        (3, "dist_prims", False, 25),
        (3, "gloo", True, 0.0004),
        (4, "dist_prims", False, 0.0004),
        (4, "gloo", True, 25),
    ],
)
def test_the_same_as_ddp(size: int, backend: str, overlap: bool, bucket_mb: float) -> None:
    def body() -> None:
        model = net(seed=dist.get_rank())  # all ranks get rank 0's
        GradientAverager(model, bucket_mb=bucket_mb, overlap=overlap)
        other = DistributedDataParallel(net(), gradient_as_bucket_view=True)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other)]
        for step in range(6):
            for each, optimizer in zip((model, other), optimizers, strict=True):
                each(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 3 != 2)
            assert_same(model, other.module, exactly=size <= 2)
        assert same_everywhere(model)
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)

    spawn(body, size, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_each_dtype_are_averaged(backend: str) -> None:
    def body() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            weight = torch.nn.Parameter(torch.ones(7, dtype=dtype))
            GradientAverager(torch.nn.ParameterList([weight]))
            ((dist.get_rank() + 1) * weight).sum().abs().backward()
            assert torch.equal(weight.grad, torch.full((7,), 1.5, dtype=dtype))

    spawn(body, 2, backend)


def test_accumulation_sends_once_and_is_the_same_as_ddp() -> None:
    def body() -> None:
        model = net()
        averager, other = GradientAverager(model), DistributedDataParallel(net())
        for step in range(3):
            for each, context in ((model, averager), (other, other)):
                each.zero_grad(set_to_none=step != 1)
                with context.no_sync():
                    each(batch(2 * step)).square().mean().backward()
                each(batch(2 * step + 1)).square().mean().backward()
            for own, wanted in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(own.grad, wanted.grad)

    spawn(body, 2)


def test_in_no_sync_nothing_is_sent() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        averager = GradientAverager(model)
        if dist.get_rank() == 1:  # the others would deadlock
            with averager.no_sync():
                for _ in range(3):
                    model(torch.ones(1, 2)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))
        model(torch.ones(1, 2)).sum().backward()  # (3 + 1 + 1 + 1) / 3
        assert torch.allclose(model.weight.grad, torch.full((1, 2), 2.0))

    spawn(body, 3)


def test_two_backwards_of_a_step_average_all_of_it() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        GradientAverager(torch.nn.ParameterList([weight]))
        (weight.sum() * (dist.get_rank() + 1)).backward()
        assert torch.equal(weight.grad, torch.full((3,), 1.5))
        (weight.sum() * 10 * (dist.get_rank() + 1)).backward()
        assert torch.equal(weight.grad, torch.full((3,), 16.5))

    spawn(body, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_and_later_unfrozen(backend: str) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        model[0].requires_grad_(False)
        GradientAverager(model, bucket_mb=5e-5)
        schedule = [[0], [0], [1, 2], [], [0, 1], [2], [2]]  # of frozen layers; the third trains nothing it did before
        for step, frozen in enumerate(schedule):
            for layer in range(3):
                model[layer].requires_grad_(layer not in frozen)
            model.zero_grad()
            alone = copy.deepcopy(model)
            x = [torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)]
            sum(alone(each).square().mean() / 2 for each in x).backward()
            model(x[dist.get_rank()]).square().mean().backward()
            for parameter, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                assert (parameter.grad is None) == (wanted.grad is None), step
                if wanted.grad is not None:
                    torch.testing.assert_close(parameter.grad, wanted.grad)

    spawn(body, 2, backend)


def test_clipping_is_by_the_norm_of_all() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
        averager = GradientAverager(model)
        model(torch.tensor([dist.get_rank(), 3])).sum().backward()
        before = [parameter.grad.to_dense().clone() for parameter in model.parameters()]
        norm = torch.cat([each.reshape(-1) for each in before]).norm()
        torch.testing.assert_close(averager.clip_grad_norm(0.5 * norm.item()), norm)
        for parameter, was in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), was * 0.5, rtol=1e-5, atol=1e-6)
        averager.clip_grad_norm(1e9)
        torch.testing.assert_close(model[1].weight.grad, before[1] * 0.5, rtol=1e-5, atol=1e-6)

    spawn(body, 2)


@pytest.mark.parametrize(("backend", "fused"), [("gloo", False), ("dist_prims", True)])
def test_one_ranks_overflow_skips_the_step_on_all(backend: str, fused: bool) -> None:
    def body() -> None:
        model = torch.nn.Linear(3, 1)
        averager, scaler = GradientAverager(model), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        if dist.get_rank() == 1:
            model.weight.grad[0, 0] = float("inf")  # as a compressor that loses one might leave it
        averager.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before)
        assert scaler.get_scale() == 2.0
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        averager.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        torch.testing.assert_close(model.weight, before - 0.1)
        assert same_everywhere(model)

    spawn(body, 2, backend)


def test_gradients_within_activation_checkpoints_are_averaged() -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        alone, x = copy.deepcopy(model), torch.ones(2, 3, requires_grad=True)
        GradientAverager(model, bucket_mb=1e-5)
        alone(x).sum().backward()
        for reentrant in (False, True):  # within a backward of ours
            model.zero_grad()
            model[2](checkpoint(model[:2], x, use_reentrant=reentrant)).sum().backward()
            for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad, wanted.grad)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            checkpoint(model, x, use_reentrant=True).sum().backward()

    spawn(body, 2)


class Recomputed(torch.autograd.Function):
    """A checkpoint as people write it: its backward calls backward()."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradients)
        return x.grad, None


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_a_backward_within_any_function(bucket_mb: float) -> None:
    """Only torch's checkpoint was known, so the inner end was taken for the end: half of the mean, and no error."""

    def body() -> None:
        inner, outer = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        model = torch.nn.Sequential(inner, outer)
        torch.nn.init.ones_(inner.weight)
        torch.nn.init.ones_(outer.weight)
        GradientAverager(model, bucket_mb=bucket_mb)
        x = torch.full((1, 1), 1.0 + dist.get_rank(), requires_grad=True)
        for _ in range(2):
            outer(Recomputed.apply(x, inner)).sum().backward()
            assert (inner.weight.grad.item(), outer.weight.grad.item()) == (1.5, 1.5)
            model.zero_grad()
        with pytest.raises(RuntimeError, match=r"that of a torch.autograd.Function.*torch.autograd.grad"):
            Recomputed.apply(x, model).sum().backward()

    spawn(body, 2)


NO_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ for inductor")


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NO_COMPILER])])
def test_compiled_models(compiler: str) -> None:
    def body() -> None:
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        GradientAverager(model, bucket_mb=1e-4)
        alone, compiled = copy.deepcopy(model), torch.compile(model, backend=compiler)
        x = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
        for pair in x:
            model.zero_grad()
            alone.zero_grad()
            compiled(pair[dist.get_rank()]).square().mean().backward()
            sum(alone(each).square().mean() / 2 for each in pair).backward()
            for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad, wanted.grad)

    spawn(body, 2, timeout=110)


def test_sub_groups() -> None:
    def body() -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        mine = halves[rank // 2]
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        GradientAverager(torch.nn.ParameterList([weight]), group=mine)
        assert weight[0].item() == rank // 2 * 2
        (weight.sum() * rank).backward()
        assert torch.equal(weight.grad, torch.full((2,), rank // 2 * 2 + 0.5))

    spawn(body, 4)


def test_a_removed_averager_sends_nothing() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        GradientAverager(model).remove()
        (model(torch.ones(1, 2)).sum() * dist.get_rank()).backward()
        assert model.bias.grad.item() == dist.get_rank()

    spawn(body, 2)


def on_a_gpu() -> None:
    here = device()
    model = net().to(here)
    averager, other = GradientAverager(model, bucket_mb=0.0004), DistributedDataParallel(net().to(here))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    for step in range(5):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            each(batch(step).to(here)).square().mean().backward()
            averager.clip_grad_norm(1e9)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, other.module, exactly=False)
    assert same_everywhere(model)


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")
def test_on_gpus() -> None:
    on_two_ranks(on_a_gpu)
