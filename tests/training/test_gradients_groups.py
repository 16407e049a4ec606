"""Several averagers, layers with collectives of their own, and ranks that use different parameters: nothing crosses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import BACKENDS, spawn
from ranks import needs_unsorted_groups
from torch import nn

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.training.compression import Half, Int8
from dist_prims.training.gradients import GradientAverager
from dist_prims.training.group_duplicates import duplicate

c10d: Any = dist.distributed_c10d


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def groups() -> int:
    return len(c10d._world.pg_map)


class Heads(nn.Module):
    """Layers of unlike sizes, or of one size: then nothing but the values tells buckets apart."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.heads = nn.ModuleList(nn.Linear(width, out, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.first(x).tanh())


def compare_gradients(models: Sequence[nn.Module], wanted: Sequence[nn.Module], tolerance: float = 0.0) -> None:
    for model, other in zip(models, wanted, strict=True):
        for (name, own), right in zip(model.named_parameters(), other.named_parameters(), strict=True):
            torch.testing.assert_close(own.grad, right[1].grad, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("backend", "out", "compress"),
    [("gloo", 16, None), ("dist_prims", 1, None), ("dist_prims", 16, "fp16"), ("gloo", 1, "fp16")],
)
def test_two_averagers_in_one_backward(backend: str, out: int, compress: str | None) -> None:
    """Each rank takes another head: its gradient is waited for until the end, and the other averager's are not."""

    def body() -> None:
        torch.manual_seed(0)
        models = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), Heads(16, out)
        wanted = copy.deepcopy(models)
        for model in models:
            GradientAverager(model, bucket_mb=1e-4, compress=compress)
        for step in range(4):
            inputs = [drawn(3, 16, seed=10 * step + rank) for rank in range(2)]
            takes = [(step + rank) % 2 for rank in range(2)]
            for model in (*models, *wanted):
                model.zero_grad()
            mine = dist.get_rank()
            models[1](models[0](inputs[mine]), takes[mine]).square().mean().backward()
            for x, head in zip(inputs, takes, strict=True):
                (wanted[1](wanted[0](x), head).square().mean() / 2).backward()
            compare_gradients(models, wanted, 1e-2 if compress else 0.0)

    spawn(body, 2, backend)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sparse", [False, True])
def test_averagers_that_get_their_gradients_in_another_order_on_each_rank(backend: str, sparse: bool) -> None:
    """The end of one waits for other ranks; a rank that waited for it in the other order would deadlock."""

    def body() -> None:
        torch.manual_seed(0)
        models = [nn.EmbeddingBag(4, 3, sparse=sparse) for _ in range(2)]
        for model in models:
            GradientAverager(model)
        rank = dist.get_rank()
        for step in range(3):
            for model in models:
                model.zero_grad()
            loss = torch.zeros(())
            for model in models if rank else reversed(models):
                loss = loss + model(torch.tensor([[step, step + rank]])).sum()
            loss.backward()
            for model in models:
                found = model.weight.grad.to_dense()[:, 0]
                wanted = torch.zeros(5)
                for row in (step, step, step, step + 1):  # both of rank 0's, and rank 1's
                    wanted[row] += 0.25
                assert torch.equal(found, wanted[:4]), (found, wanted)

    spawn(body, 2, backend)


class Meet(torch.autograd.Function):
    """A layer whose backward is a collective, as that of sync batch norm or Ulysses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        found = gradients[0].contiguous().clone()
        dist.all_reduce(found)
        return found


class Meeting(nn.Module):
    """Layers with a collective between them, and a head that some ranks do not have at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.heads = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Identity()])

    def forward(self, x: torch.Tensor, head: int, meet: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = meet(layer(x).tanh())
        return self.heads[head](x)


@pytest.mark.parametrize(
    ("backend", "bucket_mb", "compress"),
    [
        ("dist_prims", 25, None),
        ("gloo", 1e-4, None),
        ("dist_prims", 1e-4, Int8()),
        ("gloo", 25, Half(torch.float16)),
    ],
)
def test_a_layer_that_communicates_in_backward(backend: str, bucket_mb: float, compress: Any) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Meeting()
        wanted = copy.deepcopy(model)
        averager = GradientAverager(model, bucket_mb=bucket_mb, compress=compress)
        assert averager._group is not dist.group.WORLD
        for step in range(5):
            inputs = [drawn(3, 8, seed=10 * step + rank) for rank in range(2)]
            takes = [(step + 2 * rank) % 3 for rank in range(2)]
            model.zero_grad()
            wanted.zero_grad()
            mine = dist.get_rank()
            model(inputs[mine], takes[mine], Meet.apply).square().sum().backward()
            # In backward each rank adds up what comes to both: as if it were one loss, that of both ranks.
            both(wanted, inputs, takes)
            compare_gradients([model], [wanted], 0.1 if compress else 1e-5)

    def both(wanted: Meeting, inputs: list[torch.Tensor], takes: list[int]) -> None:
        """The gradients by hand, from the last layer to the first."""
        kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        grads = []
        for x, head in zip(inputs, takes, strict=True):
            kept.append([])
            for layer in wanted.layers:
                x = x.detach().requires_grad_()
                y = layer(x).tanh()
                kept[-1].append((x, y))
                x = y
            x = x.detach().requires_grad_()
            (wanted.heads[head](x).square().sum() / 2).backward()
            grads.append(x.grad)
        for depth in reversed(range(4)):
            summed = torch.stack(grads).sum(0)
            for rank in range(2):
                x, y = kept[rank][depth]
                y.backward(summed)
                grads[rank] = x.grad

    spawn(body, 2, backend)


@pytest.mark.parametrize(("backend", "by_size"), [("gloo", True), ("dist_prims", False)])
def test_uneven_batches_and_a_layer_that_communicates(backend: str, by_size: bool) -> None:
    """Whether all go on is asked with the first gradient, which rank 0 gets before the layer and rank 1 behind it."""

    def body() -> None:
        layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
        model = nn.ModuleList(layers)
        for layer in layers:
            nn.init.ones_(layer.weight)
        averager = GradientAverager(model)
        with averager.join(by_size):
            for step in range(2):
                model.zero_grad()
                x = Meet.apply(model[0](torch.ones(1, 1)))
                (x if (dist.get_rank() + step) % 2 else model[1](x)).sum().backward()
                assert [each.weight.grad.item() for each in layers] == [2.0, 0.5]

    spawn(body, 2, backend)


def test_a_cell_that_is_run_twice() -> None:
    """The first averager divided the gradients as well."""

    def body() -> None:
        model = nn.Linear(2, 1)
        before = groups()
        first = GradientAverager(model, compress=(compressor := Half()))
        for _ in range(2):
            averager = GradientAverager(model, compress=compressor)
            (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
            assert model.bias.grad.item() == 1.5
            model.zero_grad()
        assert groups() == before + 1
        with (
            pytest.raises(RuntimeError, match=r"no longer in use: a later one .* has replaced it; use the one"),
            first.no_sync(),
        ):
            pass
        first.remove()  # once more: the other one stays
        (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
        assert model.bias.grad.item() == 1.5
        averager.remove()
        averager.remove()
        assert groups() == before
        for call in (averager.synchronize, averager.once().__enter__, averager.join().__enter__):
            with pytest.raises(RuntimeError, match=r"remove\(\) was called"):
                call()

    spawn(body, 2)


def test_a_parameter_of_two_averagers() -> None:
    def body() -> None:
        shared, alone = nn.Linear(2, 2), dist.new_group([1])
        models = [nn.Sequential(shared, nn.Linear(2, 1)) for _ in range(2)]
        averager = GradientAverager(models[0])
        for model in (models[1], shared, nn.Sequential(models[0], nn.Linear(1, 1))):
            with pytest.raises(
                ValueError, match=r"has parameters '.*weight', '.*bias'.* already.*remove\(\) of the other"
            ):
                GradientAverager(model)
        (models[0](torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
        torch.testing.assert_close(shared.bias.grad, 2.0 * models[0].get_parameter("1.weight").detach()[0])
        averager.remove()
        GradientAverager(models[1]).remove()
        if dist.get_rank() == 1:
            GradientAverager(shared, group=alone)
        words = f"^rank {dist.get_rank()}: .*has parameters '0.weight', '0.bias' of this model already"
        with pytest.raises(ValueError if dist.get_rank() == 1 else MismatchError, match=words):
            GradientAverager(models[1])
        dist.barrier()

    spawn(body, 3)


def test_an_averager_whose_group_has_ended_is_replaced() -> None:
    def body() -> None:
        model, group = nn.Linear(2, 1), dist.new_group()
        GradientAverager(model, group=group)
        dist.destroy_process_group(group)
        GradientAverager(nn.Sequential(model, nn.Linear(1, 1)))
        (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
        assert model.bias.grad.item() == 1.5

    spawn(body, 2)


def test_an_averager_lives_as_long_as_its_parameters() -> None:
    """Without a name for it, and without the module that it was made of; nothing of a model that is dropped stays."""

    def body() -> None:
        before = groups()
        weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        averager = weakref.ref(GradientAverager(nn.ParameterList([weight, other])))
        gc.collect()
        for _ in range(3):
            weight.grad = None
            (weight.sum() * (1 + dist.get_rank())).backward()
            averaged: Any = weight.grad
            assert averaged.tolist() == [1.5, 1.5]
            if other is not None:
                dead = weakref.ref(other)
            other = None
            gc.collect()
        weight = None
        gc.collect()
        assert (averager(), dead(), groups()) == (None, None, before)

    spawn(body, 2)


def test_copies_and_files_have_no_averager() -> None:
    def body() -> None:
        model = nn.Linear(2, 1)
        GradientAverager(model)
        file = io.BytesIO()
        torch.save(dict(model.named_parameters()), file)
        file.seek(0)
        read = torch.load(file)["weight"]  # weights_only
        assert torch.equal(read, model.weight)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            (other(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
            assert other.bias.grad.item() == 1 + dist.get_rank()
            GradientAverager(other)

    spawn(body, 2)


@needs_unsorted_groups
def test_a_sub_group_where_ranks_have_unlike_numbers_of_groups() -> None:
    """new_group names a group by their number where only its own ranks call it: it would deadlock."""

    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([2, 0], sort_ranks=False)
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        if rank == 1:
            return
        model = nn.Linear(2, 1)
        averager = GradientAverager(model, group=group)
        assert dist.get_process_group_ranks(averager._group) == [2, 0]
        assert averager._group.rank() == group.rank() == (0 if rank == 2 else 1)
        (model(torch.ones(1, 2)).sum() * (1 + rank)).backward()
        assert model.bias.grad.item() == 2.0

    for backend in BACKENDS:
        spawn(body, 3, backend)


def test_a_duplicate_has_the_options_and_the_timeout() -> None:
    def body() -> None:
        options = dist_prims.BackendOptions(all_reduce="ring")
        group = dist.new_group(pg_options=options, timeout=timedelta(seconds=77), backend="dist_prims")
        found = duplicate(group, "another")
        assert found is not group
        backend: Any = found._get_backend(torch.device("cpu"))
        assert backend.algorithm(1 << 20) == "ring"
        assert backend.options._timeout == timedelta(seconds=77)
        plain: Any = duplicate(dist.group.WORLD, "a third")._get_backend(torch.device("cpu"))
        assert plain.algorithm(1 << 20) != "ring"
        gloo = duplicate(dist.new_group(backend="gloo", timeout=timedelta(seconds=78)), "of gloo")
        assert dist.get_backend(gloo) == "gloo"
        assert gloo._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=78)

    spawn(body, 2)
