"""GradientAverager where ranks lack something: parameters without a gradient, sparse ones, batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import same_everywhere, spawn

from dist_prims.errors import MismatchError
from dist_prims.training.gradients import GradientAverager


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(3, 3)
        self.branch = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branch[branch](self.frozen(self.shared(x))).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "backend", "bucket_mb"),
    [
        (1, "dist_prims", 1e-5),
        (2, "gloo", 1e-5),
        (2, "dist_prims", 25),
        (3, "gloo", 25),
        (3, "dist_prims", 1e-5),
        (4, "dist_prims", 25),
    ],
)
def test_parameters_that_some_ranks_do_not_use(size: int, backend: str, bucket_mb: float) -> None:
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


def test_a_rank_with_all_gradients_may_read_the_agreement_later() -> None:
    """As ranks with a GPU do: here on the CPU, on ranks that miss something and ranks that do not."""

    def body() -> None:
        rank, model = dist.get_rank(), Branches()
        model.unused = None
        averager = GradientAverager(model.branch, bucket_mb=1e-5)
        averager._averaging.reads_late = True
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
            with pytest.raises(MismatchError, match="True on rank 2 and False on rank 1"):
                sum(layer(x).sum() for layer in model.branch).backward()
        else:
            sum(layer(x).sum() for layer in model.branch).backward()
            with pytest.raises(MismatchError, match="True on rank 2 and False on rank 1"):
                sum(layer(x).sum() for layer in model.branch).backward()

    spawn(body, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "announced"), [("gloo", True), ("dist_prims", True), ("dist_prims", False)])
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
                wanted.index_add_(0, each, model.get_parameter("1.weight").detach().expand(len(each), 3) / size)
            assert embedding.weight.grad.is_sparse
            assert embedding.weight.grad.is_coalesced()
            torch.testing.assert_close(embedding.weight.grad.to_dense(), wanted)

    spawn(body, 3, backend)


def test_sparse_here_and_dense_there() -> None:
    def body() -> None:
        model = torch.nn.Embedding(4, 2)
        GradientAverager(model)
        model.sparse = dist.get_rank() == 1
        with pytest.raises(MismatchError, match="'weight' has a dense gradient on rank 0 and a sparse one on rank 1"):
            model(torch.tensor([1])).sum().backward()
        dist.barrier()

    spawn(body, 2)


@pytest.mark.parametrize(("backend", "by_size"), [("gloo", True), ("dist_prims", False)])
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
        assert model.get_parameter("0.weight").grad.abs().sum() > 0

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


def test_join_ends_where_no_rank_has_a_batch() -> None:
    def body() -> None:
        with GradientAverager(torch.nn.Linear(1, 1)).join():
            pass

    spawn(body, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "backend", "inner"), [(2, "dist_prims", 0), (2, "gloo", 1), (3, "gloo", 0), (3, "dist_prims", 1)]
)
def test_join_of_two_averagers(size: int, backend: str, inner: int) -> None:
    """A rank that was done waited in the inner join, the others waited for it in the outer one: all hung."""
    counts = [2, 4, 0]

    def body() -> None:
        torch.manual_seed(0)
        models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
        alone = copy.deepcopy(models)
        averagers = [GradientAverager(model) for model in models]
        rank = dist.get_rank()
        with averagers[1 - inner].join(), averagers[inner].join():
            for step in range(counts[rank]):
                with averagers[0].no_sync(), averagers[1].no_sync():
                    loss(models, 0, rank, step).backward()
                for kind in range(3):
                    loss(models, kind, rank, step).backward()
                    descend(models)
        for step in range(4):
            there = [other for other in range(size) if step < counts[other]]
            for kind in (0, 1, 2):
                factor = (1 if kind else 2) / size  # the first in no_sync() as well
                total: Any = sum(factor * loss(alone, kind, other, step) for other in there)
                total.backward()
                descend(alone)
        for own, wanted in zip(models, alone, strict=True):
            torch.testing.assert_close(own.weight, wanted.weight)
            assert same_everywhere(own)

    def loss(models: Sequence[torch.nn.Module], kind: int, rank: int, step: int) -> torch.Tensor:
        """Of both models, whose gradients come in another order on rank 0, or of one model."""
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        used = models if kind == 0 else [models[kind - 1]]
        return sum(model(x) for model in (used if rank else reversed(used))).square().mean()

    def descend(models: Sequence[torch.nn.Module]) -> None:
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.1 * parameter.grad
                parameter.grad = None

    spawn(body, size, backend)


def test_a_step_of_one_averager_after_the_join_of_another() -> None:
    """The steps within the inner join, and those behind it, are uneven in opposite directions."""

    def body() -> None:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        outer, inner = (GradientAverager(model) for model in models)
        rank, found = dist.get_rank(), []
        with outer.join(), outer.join(), suppress(KeyError):
            with inner.join():
                for _ in range(1 + rank):
                    found.append(gradient(models[1]))
            for _ in range(2 - rank):
                found.append(gradient(models[0]))
            raise KeyError
        with pytest.raises(KeyError), outer.join(), inner.join():
            raise KeyError
        with outer.join(), inner.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                found.append(gradient(models[1]))
        return found

    def gradient(model: torch.nn.Linear) -> float:
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        return float(model.weight.grad)

    assert spawn(body, 2) == [[1.0, 1.0, 0.5, 1.0], [1.0, 0.5, 1.0, 1.0, 1.0]]


def test_unscale_within_join() -> None:
    """The ranks that were done did not take part in the verdict: the others got the advice to make equal calls."""

    def body() -> list[float]:
        model, own = torch.nn.Linear(1, 1, bias=False), torch.nn.Parameter(torch.ones(1))
        averager = GradientAverager(model)
        scaler, rank = torch.amp.GradScaler("cpu", init_scale=4.0), dist.get_rank()
        optimizer = torch.optim.SGD([model.weight, own], lr=0.1)
        with averager.join():
            for step in range(1 + rank):
                optimizer.zero_grad()
                bad = float("inf") if (rank, step) == (2, 1) else 1.0
                scaler.scale(model(torch.ones(1, 1)).sum() + bad * own.sum()).backward()
                averager.unscale_(scaler, optimizer)
                scaler.step(optimizer)
                scaler.update()
        return [round(own.item(), 3), scaler.get_scale()]

    assert spawn(body, 3) == [[0.9, 4.0], [0.9, 2.0], [0.8, 2.0]]


def test_a_rank_that_cannot_unscale_within_join_tells_the_others() -> None:
    """The others, and a rank that was done, waited for its verdict."""

    def body() -> None:
        model, rank = torch.nn.Linear(1, 1), dist.get_rank()
        averager, scaler = GradientAverager(model), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = "already been called" if rank == 1 else rf"rank {rank}: unscale: a rank could not unscale"

        def train() -> None:
            with averager.join():
                for step in range(1 + rank):
                    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
                    if (rank, step) == (1, 1):
                        scaler.unscale_(optimizer)
                    averager.unscale_(scaler, optimizer)
                    scaler.step(optimizer)
                    scaler.update()

        with pytest.raises(RuntimeError, match=words):
            train()

    spawn(body, 3)


def test_averagers_that_cannot_be_joined_are_refused_on_all_ranks() -> None:
    def body() -> None:
        model, other, rank = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), dist.get_rank()
        a, b = GradientAverager(model), GradientAverager(other)
        group = dist.new_group([0, 1])
        one, two = (a, b) if rank else (b, a)
        with (
            pytest.raises(MismatchError, match="must enter the same averagers in the same order"),
            one.join(),
            two.join(),
        ):
            pass
        if rank < 2:
            part = GradientAverager(torch.nn.Linear(1, 1), group=group)
            with a.join(), pytest.raises(ValueError, match=r"has ranks \[0, 1\] .* outermost join\(\) has \[0, 1, 2\]"):
                part.join().__enter__()
        else:
            with a.join():
                pass
        with (
            pytest.raises(MismatchError, match=r"Rank 0 averages .* of averager 1 .*; rank 1 .* 0"),
            a.join(),
            b.join(),
        ):
            (model if rank else other)(torch.ones(1, 1)).sum().backward()

    spawn(body, 3)
