"""GradientAverager: the same as DistributedDataParallel to the last bit, and what that does not do."""

from __future__ import annotations

import copy
import os
import shutil
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dist_prims
from dist_prims.launch import RankFailed
from dist_prims.training.compression import TopK
from dist_prims.training.gradients import Bucket, GradientAverager
from dist_prims.training.gradients.layout import plan

BACKENDS = ["gloo", "dist_prims"]


def spawn(body: Callable[..., Any], size: int, backend: str = "dist_prims", timeout: float = 60) -> list[Any]:
    return dist_prims.spawn(body, size, backend=backend, timeout=timeout)


class Net(torch.nn.Module):
    """Convolution in channels_last, batch norm, a tied weight, a scalar and an empty parameter, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.tied = torch.nn.Linear(16, 16)
        self.tied.weight = self.inner.weight
        self.fine = torch.nn.Linear(16, 3).double()
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.tied(self.inner(x).relu()) * self.scale + self.empty.sum()
        return self.fine(x.double())


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def same_everywhere(model: torch.nn.Module) -> bool:
    mine = torch.cat([each.detach().double().reshape(-1) for each in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(mine, first)


def assert_same(model: torch.nn.Module, other: torch.nn.Module, exactly: bool) -> None:
    for (name, own), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        if exactly:
            assert torch.equal(own, wanted), name
        else:
            torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_mb", [25, 0.0004])
def test_the_same_as_ddp(backend: str, size: int, overlap: bool, bucket_mb: float) -> None:
    def body() -> None:
        model = net(seed=dist.get_rank())  # rank 0's is everybody's
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


@pytest.mark.parametrize("backend", ["dist_prims", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_thousand_steps_leave_the_same_bits(backend: str) -> None:
    def body() -> bool:
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        averager = GradientAverager(model, bucket_mb=0.0004)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(1000):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3 * step + dist.get_rank()))
            functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            averager.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return same_everywhere(model)

    assert spawn(body, 3, backend) == [True] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(7, dtype=dtype))
        GradientAverager(torch.nn.ParameterList([weight]))
        ((dist.get_rank() + 1) * weight).sum().abs().backward()
        assert torch.equal(weight.grad, torch.full((7,), 1.5, dtype=dtype))

    for backend in BACKENDS:
        spawn(body, 2, backend)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(3, 3)
        self.branch = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branch[branch](self.frozen(self.shared(x))).square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_mb", [25, 1e-5])
def test_parameters_that_some_ranks_do_not_use(backend: str, size: int, bucket_mb: float) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model, x = Branches(), torch.arange(6.0).view(2, 3)
        GradientAverager(model, bucket_mb=bucket_mb)
        for step in range(3):
            wanted = []
            for rank in range(size):
                alone = copy.deepcopy(model)
                alone.zero_grad()
                alone(x + rank, (rank + step) % 3).backward()
                wanted.append([each.grad for each in alone.parameters()])
            model.zero_grad()
            model(x + dist.get_rank(), (dist.get_rank() + step) % 3).backward()
            for (name, parameter), theirs in zip(model.named_parameters(), zip(*wanted, strict=True), strict=True):
                there = [each for each in theirs if each is not None]
                if there:
                    torch.testing.assert_close(parameter.grad, torch.stack(there).sum(0) / size, msg=name)
                else:
                    assert parameter.grad is None, name

    spawn(body, size, backend)


def test_who_misses_nothing_may_read_later_what_the_others_said() -> None:
    """As ranks with a GPU do: here on the CPU, on ranks that miss something and ranks that do not."""

    def body() -> None:
        rank, model = dist.get_rank(), Branches()
        model.unused = None
        averager = GradientAverager(model.branch, bucket_mb=1e-5)
        averager._reads_late = True
        x, layers = torch.ones(1, 3), range(4)
        for step in range(4):
            model.zero_grad()
            used = [each for each in layers if rank == 0 or (each + step) % 2 or step == 3]
            sum(model.branch[each](x).sum() for each in used).backward()
            for each in layers:
                share = 1.0 if (each + step) % 2 or step == 3 else 1 / 3
                torch.testing.assert_close(model.branch[each].bias.grad, torch.full((3,), share))
        if rank == 1:
            model.branch[0].bias.requires_grad_(False)
            with pytest.raises(ValueError, match="True on rank 2 and False on rank 1"):
                sum(layer(x).sum() for layer in model.branch).backward()
        else:
            sum(layer(x).sum() for layer in model.branch).backward()
            with pytest.raises(ValueError, match="True on rank 2 and False on rank 1"):
                sum(layer(x).sum() for layer in model.branch).backward()

    spawn(body, 3)


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
        if dist.get_rank() == 1:  # the others would wait for ever
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


def test_frozen_on_one_rank_only_is_told_on_every_rank() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        GradientAverager(model)
        model(torch.ones(1, 2)).sum().backward()
        model[0].bias.requires_grad_(dist.get_rank() != 1)
        words = r"parameter '0\.bias' has requires_grad=True on rank 2 and False on rank 1"
        with pytest.raises(ValueError, match=words):
            model(torch.ones(1, 2)).sum().backward()
        dist.barrier()

    spawn(body, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: torch.nn.Linear(2, 1 + rank // 2), "rank 0 has parameter 'weight' (torch.float32, shape (1, 2)"),
        (lambda rank: torch.nn.Linear(2, 1, bias=rank < 2), "rank 2 has nothing more"),
        (lambda rank: torch.nn.Linear(2, 1).requires_grad_(rank < 2), "requires_grad=False"),
        (lambda rank: torch.nn.BatchNorm1d(2, track_running_stats=rank < 2), "rank 0 has buffer 'running_mean'"),
    ],
)
def test_models_that_differ(make: Callable[[int], torch.nn.Module], words: str) -> None:
    def body() -> str:
        with pytest.raises(ValueError, match="the models differ") as caught:
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
        with pytest.raises(ValueError, match="bucket_mb=1, compress=NoneType, rank 1 has bucket_mb=2"):
            GradientAverager(torch.nn.Linear(1, 1), bucket_mb=1 + dist.get_rank())

    spawn(body, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("announced", [True, False])
def test_sparse_gradients(backend: str, announced: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(10, 3, sparse=announced)
        model = torch.nn.ModuleList([embedding, torch.nn.Linear(3, 1)])
        GradientAverager(model)
        for step in range(3):
            rank, size = dist.get_rank(), dist.get_world_size()
            rows = [torch.tensor([each, each, 2 * each + step]) for each in range(size)]
            rows[2] = rows[2][:0]  # that rank has no gradient at all
            embedding.sparse = True
            model.zero_grad()
            if rank == 2:
                model[1](torch.ones(1, 3)).sum().backward()
            else:
                model[1](embedding(rows[rank])).sum().backward()
            wanted = torch.zeros(10, 3)
            for each in rows:
                wanted.index_add_(0, each, model[1].weight.detach().expand(len(each), 3) / size)
            assert embedding.weight.grad.is_sparse
            assert embedding.weight.grad.is_coalesced()
            torch.testing.assert_close(embedding.weight.grad.to_dense(), wanted)

    spawn(body, 3, backend)


def test_sparse_here_and_dense_there() -> None:
    def body() -> None:
        model = torch.nn.Embedding(4, 2)
        GradientAverager(model)
        model.sparse = dist.get_rank() == 1
        with pytest.raises(ValueError, match="'weight' has a dense gradient on rank 0 and a sparse one on rank 1"):
            model(torch.tensor([1])).sum().backward()
        dist.barrier()

    spawn(body, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_size", [True, False])
def test_uneven_numbers_of_batches(backend: str, by_size: bool) -> None:
    counts = [2, 5, 0]

    def body() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        alone = copy.deepcopy(model)
        averager = GradientAverager(model, bucket_mb=3e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(5, 3, 4, 3, generator=torch.Generator().manual_seed(1))
        with averager.join(divide_by_initial_world_size=by_size):
            for step in range(counts[dist.get_rank()]):
                model(x[step, dist.get_rank()]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(5):
            there = [rank for rank in range(3) if step < counts[rank]]
            divisor = 3 if by_size else len(there)
            sum(alone(x[step, rank]).square().mean() / divisor for rank in there).backward()
            other.step()
            other.zero_grad()
        for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, wanted)
        assert same_everywhere(model)
        model(x[0, dist.get_rank()]).square().mean().backward()  # and on as before
        assert model[0].weight.grad.abs().sum() > 0

    spawn(body, 3, backend)


def test_a_second_epoch_of_join() -> None:
    """A rank that was done first was left with the last step's mean in ``.grad``, to which its next epoch added."""

    def body() -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        averager = GradientAverager(model)
        for _ in range(3):
            with averager.join():
                for step in range(2 + dist.get_rank()):  # 2, 3 and 4
                    with averager.no_sync():
                        model(torch.ones(1, 2)).sum().backward()
                    model(torch.ones(1, 2)).sum().backward()
                    going_on = min(3, 4 - step)  # of 3 ranks
                    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 2 * going_on / 3))
                    model.zero_grad()
            assert model.weight.grad is None

    spawn(body, 3)


def test_join_where_nobody_has_anything() -> None:
    def body() -> None:
        with GradientAverager(torch.nn.Linear(1, 1)).join():
            pass

    spawn(body, 2)


class Doubling:
    """Not compression: it shows that a mean is asked for, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.resets = 0

    def start(self, bucket: Bucket, group: dist.ProcessGroup | None) -> Callable[[], None]:
        assert all(view.data_ptr() >= bucket.flat.data_ptr() for view in bucket.views)
        assert sum(view.numel() for view in bucket.views) == bucket.flat.numel()
        self.seen.append((bucket.index, bucket.flat.numel()))
        work = dist.all_reduce(bucket.flat, group=group, async_op=True)

        def end() -> None:
            work.wait()
            bucket.flat.mul_(2 / dist.get_world_size(group))

        return end

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("by_size", [True, False])
def test_a_compressor(by_size: bool) -> None:
    def body() -> None:
        model, compressor = torch.nn.Linear(3, 1), Doubling()
        averager = GradientAverager(model, compress=compressor, bucket_mb=1e-6)
        resets = compressor.resets
        with averager.join(by_size):
            for step in range(2 + dist.get_rank()):
                model.zero_grad()
                model(torch.ones(1, 3) * (dist.get_rank() + 1)).sum().backward()
                wanted = 3.0 if step < 2 else (2.0 if by_size else 4.0)
                assert torch.equal(model.weight.grad, torch.full((1, 3), wanted))
        assert [index for index, _ in compressor.seen] == [0, 1] * 3
        assert compressor.resets <= resets + 1  # the buckets found their order, and kept it

    spawn(body, 2)


def test_buckets_follow_the_order_of_gradients_and_give_old_memory_back() -> None:
    def body() -> None:
        first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        model = torch.nn.ModuleList([second, first])  # listed against the order of use
        averager = GradientAverager(model, bucket_mb=0.01)
        for _ in range(2):
            model[0](model[1](torch.ones(1, 64))).sum().backward()
        numbers = [number for members in averager._sending.layout.members for number in members]
        assert {*numbers[:2]} == {0, 1}  # the gradients of `second` come first
        old = [weakref.ref(bucket.flat) for bucket in averager._sending.layout.buckets]
        for step in range(3):
            model.zero_grad()
            model[0](model[1](torch.ones(1, 64))).sum().backward()
            assert all(ref() is not None for ref in old), step  # not built anew
        for parameter in model.parameters():
            assert any(parameter.grad is view for b in averager._sending.layout.buckets for view in b.views)

    spawn(body, 2)


class Backwards(torch.nn.ModuleList):
    """Uses its layers against the order in which they are listed, so that buckets are rebuilt after a step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_memory_beside_the_gradients_is_at_most_a_bucket() -> None:
    """Counted in the allocations of torch, in a step that rebuilds the buckets and in one that does not."""

    def body() -> None:
        model = Backwards(torch.nn.Linear(256, 256) for _ in range(16))
        alone, bucket_mb, x = copy.deepcopy(model), 0.6, torch.ones(2, 256)

        def train(of: torch.nn.Module, averager: GradientAverager | None = None) -> Any:
            members = []
            for _ in range(3):
                time.sleep(0.1)  # gloo's thread lets go of what it has sent a moment after it has told that it is done
                of.zero_grad()
                of(x).sum().backward()
                members.append(averager and averager._sending.layout.members)
            return members

        # What an averager sends when it is made is sometimes freed by gloo's thread, and that is not recorded.
        averager = GradientAverager(model, bucket_mb=bucket_mb)
        without, _ = peak(lambda: train(alone))  # the gradients are in it
        most, members = peak(lambda: train(model, averager))
        assert members[0] != members[1] == members[2]
        assert most <= without + bucket_mb * 2**20

    spawn(body, 2, "gloo")


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that torch has allocated at most at once during a call, and what that returned."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        found = call()
    most = now = 0
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, found


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", [False, True])
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


def test_overflow_where_a_rank_has_no_gradient() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        averager, scaler = GradientAverager(torch.nn.ParameterList([torch.ones(1)])), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(torch.zeros(()))  # it is ready now
        if dist.get_rank() == 0:
            weight.grad = torch.tensor([float("nan")])
        averager.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (weight.item(), scaler.get_scale()) == (1.0, 2.0**15)

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


def test_checkpoints() -> None:
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


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this rank fails")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_in_backward_is_what_is_told(backend: str) -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        GradientAverager(model, bucket_mb=1e-5)
        middle = model[0](torch.ones(1, 2))
        model[1](Failing.apply(middle) if dist.get_rank() == 1 else middle).sum().backward()

    with pytest.raises(RankFailed, match="this rank fails"):
        spawn(body, 3, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_dies_in_backward(backend: str) -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        GradientAverager(model, bucket_mb=1e-5)
        middle = model[0](torch.ones(1, 2))
        if dist.get_rank() == 1:
            middle.register_hook(lambda _: os._exit(3))
            model[1](middle).sum().backward()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            model[1](middle).sum().backward()
        assert time.monotonic() - began < 50
        raise KeyError("heard of it")

    with pytest.raises(RankFailed):
        spawn(body, 2, backend)


def test_a_backward_that_raises_before_anything_is_sent_does_no_harm() -> None:
    def body() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        GradientAverager(model)  # one bucket, which the failing backward does not fill
        if dist.get_rank() == 1:
            with pytest.raises(ArithmeticError):
                model[1](Failing.apply(model[0](torch.ones(1, 2)))).sum().backward()
            model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model[1].bias.grad, torch.ones(1))

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

    def weights(layers: torch.nn.ModuleList) -> list[torch.Tensor]:
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


def test_a_compressor_has_one_averager() -> None:
    """What TopK had lost of one model's gradients was added to those of the other, without a word."""

    def body() -> None:
        first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        shared = TopK(0.5)
        averager = GradientAverager(first, compress=shared)
        first(torch.tensor([[3.0, 2.0]])).sum().backward()
        assert first.weight.grad.tolist() == [[3.0, 0.0]]  # the 2 is kept
        for _ in range(2):
            with pytest.raises(ValueError, match=r"another averager uses this TopK; give each averager its own"):
                GradientAverager(second, compress=shared)
        averager.remove()
        GradientAverager(second, compress=shared)
        averager.remove()  # once more: it is not the owner any longer
        with pytest.raises(ValueError, match="another averager"):
            GradientAverager(first, compress=shared)
        second(torch.zeros(1, 2)).sum().backward()
        assert second.weight.grad.tolist() == [[0.0, 0.0]]
        GradientAverager(torch.nn.Linear(2, 1), compress="topk")  # a name makes a new one each time
        GradientAverager(torch.nn.Linear(2, 1), compress="topk")

    spawn(body, 2)


def test_removed() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        GradientAverager(model).remove()
        (model(torch.ones(1, 2)).sum() * dist.get_rank()).backward()
        assert model.bias.grad.item() == dist.get_rank()

    spawn(body, 2)


def test_a_plan_has_every_parameter_once_and_keeps_to_its_limit() -> None:
    parameters = [torch.ones(n, dtype=[torch.float32, torch.float64][n % 2]) for n in (3, 0, 5, 70, 1, 2, 4, 4)]
    for limit in (1, 16, 40, 10_000):
        for order in (range(8), [7, 3, 1, 0, 2, 6, 5, 4]):
            members = plan(parameters, order, limit)
            assert sorted(number for numbers in members for number in numbers) == [*range(8)]
            ends = []
            for numbers in members:
                assert len({parameters[number].dtype for number in numbers}) == 1
                large = [number for number in numbers if parameters[number].nbytes]
                assert sum(parameters[number].nbytes for number in large) <= limit or len(large) == 1
                ends.append(max([*order].index(number) for number in numbers))
            assert ends == sorted(ends)


def on_a_gpu() -> None:
    dist_prims.init("cpu:gloo,cuda:nccl")
    here = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(here)
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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_on_gpus() -> None:
    dist_prims.spawn(on_a_gpu, 2, init=False, start_method="spawn", timeout=100)


def test_the_mean_of_equal_gradients_is_the_gradient() -> None:
    def body() -> list[float]:
        model = net()
        GradientAverager(model)
        model(batch(0, rank=0)).square().mean().backward()
        return [float(each.grad.double().sum()) for each in model.parameters()]

    (alone,), pair = spawn(body, 1), spawn(body, 2)
    assert pair == [alone, alone]
