"""GradientAverager when something is wrong: every rank raises, and training can go on where that is possible."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import BACKENDS, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.training.gradients import GradientAverager
from dist_prims.training.sharding import ShardedParameters


def test_a_parameter_frozen_on_one_rank_is_an_error_on_every_rank() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        GradientAverager(model)
        model(torch.ones(1, 2)).sum().backward()
        model[0].bias.requires_grad_(dist.get_rank() != 1)
        words = r"parameter '0\.bias' has requires_grad=True on rank 2 and False on rank 1"
        with pytest.raises(MismatchError, match=words):
            model(torch.ones(1, 2)).sum().backward()
        dist.barrier()

    spawn(body, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: torch.nn.Linear(2, 1 + rank // 2), "Rank 0 has tensor 'weight' (torch.float32, shape (1, 2)"),
        (lambda rank: torch.nn.Linear(2, 1, bias=rank < 2), "rank 2 has nothing more"),
        (lambda rank: torch.nn.Linear(2, 1).requires_grad_(rank < 2), "requires_grad=False"),
        (lambda rank: torch.nn.BatchNorm1d(2, track_running_stats=rank < 2), "Rank 0 has tensor 'running_mean'"),
    ],
)
def test_models_that_differ(make: Callable[[int], torch.nn.Module], words: str) -> None:
    def body() -> str:
        with pytest.raises(MismatchError, match="ranks disagree, no data was touched") as caught:
            GradientAverager(make(dist.get_rank()))
        dist.barrier()
        return str(caught.value)

    for rank, text in enumerate(spawn(body, 3)):
        assert words in text
        assert text.startswith(f"rank {rank}: ")
        assert "rank 2 has" in text


def test_what_is_wrong_at_the_start() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="bucket_mb=0 must be positive"):
            GradientAverager(torch.nn.Linear(1, 1), bucket_mb=0)
        with pytest.raises(MismatchError, match="bucket_mb=1, compress=NoneType; rank 1 has bucket_mb=2"):
            GradientAverager(torch.nn.Linear(1, 1), bucket_mb=1 + dist.get_rank())

    spawn(body, 2)


def test_derivatives_of_the_mean_are_refused_and_those_within_are_not() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        GradientAverager(model)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            model(torch.ones(1, 2)).square().sum().backward(create_graph=True)
        model.zero_grad()
        x = torch.ones(1, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert model.weight.grad is not None
        mine = model.weight.grad.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, model.weight.grad)

    spawn(body, 2)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this rank fails")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_backward_is_the_one_that_is_reported(backend: str) -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        GradientAverager(model, bucket_mb=1e-5)
        middle = model[0](torch.ones(1, 2))
        model[1](Failing.apply(middle) if dist.get_rank() == 1 else middle).sum().backward()

    with pytest.raises(RankFailedError, match="this rank fails"):
        spawn(body, 3, backend)


def test_a_backward_that_raises_before_anything_is_sent_does_no_harm() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        GradientAverager(model)  # one bucket, which the failing backward does not fill
        if dist.get_rank() == 1:
            with pytest.raises(ArithmeticError):
                model[1](Failing.apply(model[0](torch.ones(1, 2)))).sum().backward()
            model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.get_parameter("1.bias").grad, torch.ones(1))

    spawn(body, 2)


@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_that_raised_is_not_taken_for_one_that_runs(kept: bool) -> None:
    """All ranks catch an error; then a checkpoint's inner backward was taken for one within the backward that had
    raised, and averaged to half of its mean."""

    def body() -> None:
        layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
        GradientAverager(layers)
        errors: list[BaseException] = []
        x = torch.ones(1, 1, requires_grad=True)
        for _ in range(2):
            try:
                layers[1](Failing.apply(layers[0](x))).sum().backward()
            except ArithmeticError as error:
                errors += [error] if kept else []
            layers.zero_grad()
            with pytest.raises(RuntimeError, match="the first gradients come from a backward within"):
                checkpoint(layers[2], layers[0](x), use_reentrant=True).sum().backward()
            layers.zero_grad()
            layers[1](checkpoint(layers[2], layers[0](x), use_reentrant=True)).sum().backward()  # ours is the outer
            for layer, wanted in zip(layers, weights(layers), strict=True):
                torch.testing.assert_close(layer.weight.grad, wanted)
            layers.zero_grad()

    def weights(layers: Any) -> list[torch.Tensor]:
        """The gradients of a product of three."""
        first, second, third = (layer.weight.detach() for layer in layers)
        return [second * third, first * third, first * second]

    spawn(body, 2)


def test_a_backward_that_raised_after_sending_is_not_followed_by_another() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        GradientAverager(model, bucket_mb=1e-6)
        with pytest.raises(ArithmeticError):
            model[1](Failing.apply(model[0](torch.ones(1, 2)))).sum().backward()
        with pytest.raises(RuntimeError, match=r"the last backward\(\) has raised .* \(2 of 4 buckets were sent\)"):
            model(torch.ones(1, 2)).sum().backward()

    spawn(body, 2)


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def fsdp(module: torch.nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def test_a_model_that_torch_averages_is_refused() -> None:
    """Both divided: each gradient was half of the mean."""

    def body() -> None:
        outer, part, sharded = DistributedDataParallel(two_layers()), two_layers(), fsdp(two_layers())
        wrapped = DistributedDataParallel(part[1])
        model: Any
        for model, words in (
            (outer, r"the model is a DistributedDataParallel.*delete the"),
            (torch.nn.Sequential(part[0], wrapped), "module '1' is a DistributedDataParallel"),
            (outer.module, "parameter '0.weight' belongs to a DistributedDataParallel"),
            (part, "parameter '1.weight' belongs to a DistributedDataParallel"),
            (sharded.module, "parameter '0.weight' belongs to a FullyShardedDataParallel"),
            (fully_shard(two_layers()), "the model is a FSDPModule"),
        ):
            for averages in (GradientAverager, ShardedParameters):
                with pytest.raises(ValueError, match=f"^rank {dist.get_rank()}: {averages.__name__}: {words}"):
                    averages(model)
        del wrapped, model
        averager = GradientAverager(part)  # the wrapper of its second layer is gone
        with pytest.raises(ValueError, match=r"ShardedParameters: a GradientAverager averages .*'0.weight', '0.bias'"):
            ShardedParameters(part)
        averager.remove()
        ShardedParameters(part)

    spawn(body, 2)


def test_a_wrapper_of_torch_around_an_averaged_model_is_refused() -> None:
    def body() -> None:
        for wrap in (DistributedDataParallel, fsdp):
            for choose in (lambda model: model, lambda model: model[1], lambda model: torch.nn.Sequential(model)):
                model = two_layers()
                averager = GradientAverager(model)
                with pytest.raises(
                    ValueError, match=f"^rank {dist.get_rank()}: .*Parallel: a GradientAverager averages"
                ):
                    wrap(choose(model))
        model = two_layers()
        averager = GradientAverager(model)
        larger: Any = torch.nn.ModuleDict({"averaged": model, "other": torch.nn.Linear(1, 1)})
        larger._ddp_params_and_buffers_to_ignore = [f"averaged.{name}" for name, _ in model.named_parameters()]
        DistributedDataParallel(larger)
        averager.remove()
        DistributedDataParallel(model)

    spawn(body, 2)


def test_a_parameter_of_another_shape_is_refused() -> None:
    """Its gradient was written over those of its neighbours in the bucket."""

    def body() -> None:
        model = two_layers()
        averager = GradientAverager(model, bucket_mb=1e-6)
        model[1].bias.data = torch.zeros(5)
        model[1].weight.data = torch.ones(5, 2)
        for context in (nullcontext, averager.no_sync):
            words = r"parameter '1\.(weight|bias)' has changed its shape, dtype or device; make a new GradientAverager"
            with pytest.raises(ValueError, match=words), context():
                model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()
        GradientAverager(model)
        (model(torch.ones(1, 2)).sum() * dist.get_rank()).backward()
        assert torch.equal(model.get_parameter("1.bias").grad, torch.full((5,), 0.5))

    spawn(body, 2)


def test_parameters_that_the_model_gets_later_are_named_in_one_warning() -> None:
    """Their gradients are not averaged, even if no other parameter gets one; a removed averager says nothing."""

    def body() -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList())
        averager = GradientAverager(model)
        wrapper = torch.nn.ModuleList([model])
        wrapper.append(torch.nn.Linear(2, 2))  # not in the averager's model
        wrapper[1](torch.ones(1, 2)).sum().backward()
        model[1].append(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        model[0].scale = torch.nn.Parameter(torch.ones(1))
        words = f"^rank {dist.get_rank()}: .* got parameters '0.scale', '1.0.0.weight', '1.0.0.bias' after the averager"
        loss = model[1][0](torch.ones(1, 2)).sum()
        with pytest.warns(UserWarning, match=words):
            loss.backward(retain_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.backward()
        model[1].append(torch.nn.Linear(1, 1))
        averager.remove()
        GradientAverager(model)
        model[1][1](model[1][0](torch.ones(1, 2))).sum().backward()

    spawn(body, 2)


def test_a_lazy_module_that_the_model_gets_later_is_named_in_the_warning() -> None:
    """The assignment raised "Attempted to use an uninitialized parameter in requires_grad_"."""

    def body() -> None:
        model = two_layers()
        averager = GradientAverager(model)
        model.head = torch.nn.LazyLinear(3)
        with pytest.warns(UserWarning, match=r"got parameters 'head.weight', 'head.bias' after the averager"):
            model(torch.ones(1, 2)).sum().backward()
        averager.remove()

    spawn(body, 2)


def test_a_module_that_is_assigned_again_has_one_hook_until_remove() -> None:
    """Each assignment added a hook to each parameter, and remove() left all of them."""

    def body() -> None:
        model, tail = two_layers(), torch.nn.Linear(1, 1)
        averager = GradientAverager(model)
        for _ in range(5):
            model.tail = tail
        assert [len(each._post_accumulate_grad_hooks) for each in tail.parameters()] == [1, 1]
        averager.remove()
        assert [len(each._post_accumulate_grad_hooks) for each in tail.parameters()] == [0, 0]

    spawn(body, 1)


def test_parameters_that_the_model_got_before_resize_are_named_in_the_warning() -> None:
    """resize() made a new observer, so the hooks of the new parameters no longer reached one."""

    def body() -> None:
        model = two_layers()
        averager = GradientAverager(model)
        model.tail = torch.nn.Linear(1, 1)
        averager.resize(dist.new_group())
        with pytest.warns(UserWarning, match=r"got parameters 'tail.weight', 'tail.bias' after the averager"):
            model(torch.ones(1, 2)).sum().backward()

    spawn(body, 2)


def test_a_model_of_dtensors_is_refused_by_name() -> None:
    """The broadcast of the parameters named an operator of torch, and average_gradients ended in SIGSEGV."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(two_layers(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model(torch.ones(1, 2)).sum().backward()
        group = mesh.get_group("dp")
        for call in (GradientAverager, dist_prims.average_gradients):
            words = rf"^rank {group.rank()}: {call.__name__}: '0.weight' is a DTensor.*fully_shard\(model, mesh="
            with pytest.raises(ValueError, match=words):
                call(model, group=group)
        mixed = model if dist.get_rank() < 2 else two_layers()
        for call in (GradientAverager, dist_prims.average_gradients):
            with pytest.raises((ValueError, MismatchError), match=r"'0\.weight' is a DTensor"):
                call(mixed, group=group)
        torch.manual_seed(0)
        single, model = two_layers(), two_layers()
        model.load_state_dict(single.state_dict())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])  # the remedy
        model(torch.ones(1, 2) * mesh.get_local_rank("dp")).square().sum().backward()
        sum(single(torch.ones(1, 2) * copy).square().sum() / 2 for copy in range(2)).backward()
        for own, wanted in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), wanted.grad)  # type: ignore[attr-defined]

    spawn(body, 4)
