"""Collectives in a graph: values, derivatives, torch's own checks, and the order that compilers must keep."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims import ops
from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError

SOMEWHERE = [(1, "gloo"), (2, "dist_prims"), (3, "gloo"), pytest.param(4, "dist_prims", marks=pytest.mark.slow)]
on_ranks = pytest.mark.parametrize(("size", "backend"), SOMEWHERE)
Body = Callable[..., Any]


def rows_of(rank: int, rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a rank has: small whole numbers, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (rows, 3), generator=generator).to(dtype)


@pytest.mark.sampled(2)
@on_ranks
def test_operators_have_the_values_of_one_process(size: int, backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        for count, dtype in itertools.product((0, 1, 5), (torch.float32, torch.float16, torch.bfloat16, torch.int64)):
            of_all_ranks = torch.stack([rows_of(each, count, dtype) for each in range(size)])
            mine = of_all_ranks[rank].clone()
            whole = {"sum": of_all_ranks.sum(0), "max": of_all_ranks.amax(0), "min": of_all_ranks.amin(0)}
            whole["product"] = of_all_ranks.prod(0)
            for op, wanted in whole.items():
                assert torch.equal(ops.all_reduce(mine, op), wanted.to(dtype)), (op, dtype)
            if dtype.is_floating_point:
                scaled = mine * size  # so that the division is exact
                assert torch.equal(ops.all_reduce(scaled, "avg"), of_all_ranks.sum(0).to(dtype))
            assert torch.equal(ops.all_gather(mine), of_all_ranks.flatten(0, 1))
            assert torch.equal(ops.all_gather(mine.t(), dim=1), of_all_ranks.flatten(0, 1).t())  # not contiguous
            cut = of_all_ranks.repeat(1, size, 1)
            assert torch.equal(ops.reduce_scatter(cut[rank]), of_all_ranks.sum(0).to(dtype))
            assert torch.equal(ops.reduce_scatter(cut[rank].t(), "max", dim=-1), of_all_ranks.amax(0).t())
            assert torch.equal(ops.all_to_all(cut[rank]), of_all_ranks.flatten(0, 1))
            assert torch.equal(mine, of_all_ranks[rank])  # untouched, and the result is fresh

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@on_ranks
def test_all_to_all_of_different_lengths(size: int, backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        send = [(rank + each) % 3 for each in range(size)]  # as much as comes back
        mine = rows_of(rank, sum(send)).requires_grad_()
        got = ops.all_to_all(mine, send, send)
        sent = [rows_of(each, sum((each + to) % 3 for to in range(size))) for each in range(size)]
        cuts = [rows.split([(each + to) % 3 for to in range(size)])[rank] for each, rows in enumerate(sent)]
        assert torch.equal(got, torch.cat(cuts))
        (got * (rank + 1)).sum().backward()
        wanted = torch.cat([torch.full((length, 3), each + 1.0) for each, length in enumerate(send)])
        assert torch.equal(mine.grad, wanted.double())

    dist_prims.spawn(body, size, timeout=60, backend=backend)


def functions(size: int) -> dict[str, tuple[Body, Body]]:
    """For each function what it does on a rank, and what one process does with the tensors of all ranks, by rank."""
    cut = lambda whole: list(whole.chunk(size))  # noqa: E731
    return {
        "sum": (ops.all_reduce, lambda xs: [xs.sum(0)] * size),
        "mean": (lambda x: ops.all_reduce(x, "avg"), lambda xs: [xs.mean(0)] * size),
        "all_gather": (lambda x: ops.all_gather(x, dim=1), lambda xs: [torch.cat(list(xs), 1)] * size),
        "reduce_scatter": (ops.reduce_scatter, lambda xs: cut(xs.sum(0))),
        "reduce_scatter mean": (lambda x: ops.reduce_scatter(x, "avg"), lambda xs: cut(xs.mean(0))),
        "all_to_all": (ops.all_to_all, lambda xs: [torch.cat([cut(x)[to] for x in xs]) for to in range(size)]),
    }


@pytest.mark.sampled(2)
@on_ranks
def test_derivatives_are_those_of_one_process(size: int, backend: str) -> None:
    """First and second, of the sum of all ranks' losses."""

    def body() -> None:
        rank = dist.get_rank()
        for name, (ours, whole) in functions(size).items():
            xs = torch.stack([rows_of(each, size) for each in range(size)]).requires_grad_()
            losses = [(y**3).sum() * (each + 1) for each, y in enumerate(whole(xs))]
            (first,) = torch.autograd.grad(sum(losses), xs, create_graph=True)
            weights = torch.stack([rows_of(9 + each, size) for each in range(size)])
            (second,) = torch.autograd.grad((first * weights).sum(), xs)
            x = xs[rank].detach().requires_grad_()
            (mine,) = torch.autograd.grad((ours(x) ** 3).sum() * (rank + 1), x, create_graph=True)
            torch.testing.assert_close(mine, first[rank], msg=name)
            (mine,) = torch.autograd.grad((mine * weights[rank]).sum(), x)
            torch.testing.assert_close(mine, second[rank], msg=name)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_torch_asks_of_an_operator() -> None:
    def body() -> None:
        group, x = dist.group.WORLD.group_name, torch.randn(2, 3, requires_grad=True)
        cases = [
            (ops._all_reduce, (x, "sum", group)),
            *((ops._all_reduce, (x.detach(), op, group)) for op in ("max", "product")),  # without a gradient
            (ops._all_gather, (x, group)),
            (ops._reduce_scatter, (x, "sum", group)),
            (ops._all_to_all, (x, [1, 1], [1, 1], group)),
            (ops._all_gather, (x.t(), group)),  # not contiguous
        ]
        for operator, arguments in cases:
            torch.library.opcheck(operator, arguments)

    dist_prims.spawn(body, 2, timeout=280)


class Net(torch.nn.Module):
    """Every function in one forward, and the loss with it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.layer, self.group = torch.nn.Linear(4, 4), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, y = dist.get_world_size(self.group), self.layer(x)
        y = y + 0.1 * ops.all_reduce(y.sum(0), group=self.group)
        rows = ops.reduce_scatter(ops.all_gather(y, dim=1, group=self.group), dim=1, group=self.group)
        swapped = ops.all_to_all(rows.repeat(size, 1), group=self.group)
        ops.all_reduce(swapped, group=self.group)  # the result is not used, and yet no rank may leave it out
        loss = swapped.square().mean() + ops.all_reduce(y.detach(), "max", self.group).mean()
        return ops.all_reduce(loss, "avg", self.group)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "backend"), [(2, "dist_prims"), pytest.param(3, "gloo", marks=pytest.mark.slow)])
def test_one_graph_forwards_and_backwards(size: int, backend: str) -> None:
    def body() -> None:
        group = dist.new_group(list(range(size)))
        torch.manual_seed(0)
        model = Net(group)
        explained = torch._dynamo.explain(model)(torch.randn(3, 4))
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (3, 5, 2):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
            for each in (model, compiled):
                model.zero_grad()
                x.grad = None
                loss = each(x)
                loss.backward()
                found = [loss.detach(), x.grad, model.layer.weight.grad.clone()]
                if each is model:
                    wanted = found
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))  # to the bit
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # not one for each length

    dist_prims.spawn(body, size, timeout=280, backend=backend)


@pytest.mark.slow
def test_export_and_load() -> None:
    def body() -> None:
        class Sum(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return ops.all_gather(ops.all_reduce(x.cos()))

        rows = torch.export.Dim("rows", min=2, max=64)
        program = torch.export.export(Sum(), (torch.randn(3, 2),), dynamic_shapes=({0: rows},))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        x = torch.full((5, 2), float(dist.get_rank()))
        assert torch.equal(torch.export.load(file).module()(x), Sum()(x))

    dist_prims.spawn(body, 2, timeout=110, backend="dist_prims")


def crossing(pair: dist.ProcessGroup) -> Body:
    """Collectives of two groups that do not depend on each other, where ranks compile different kernels."""
    rank, layer = dist.get_rank(), torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        total = ops.all_reduce(y.sum(0))
        ops.all_reduce(y.sum(0))
        loss = (y + 0.1 * total).square().mean()
        return loss + ops.all_reduce(y * rank, group=pair).sum()  # by a constant 0 on rank 0

    return step


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_keeps_the_order_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it did not, each rank waited in another group: see `_register_lowerings`."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what an earlier run compiled shows nothing

    def body() -> None:
        step, x = crossing(dist.new_group([0, 1])), torch.randn(3, 4)
        x.requires_grad_()
        losses = [torch.compile(step, fullgraph=True)(x), step(x)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, x) for loss in losses))
        model = Net()
        wanted = model(x)
        wanted.backward()
        gradient = model.layer.weight.grad.clone()
        model.zero_grad()
        found = torch.compile(model, fullgraph=True)(x)
        found.backward()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(model.layer.weight.grad, gradient)

    dist_prims.spawn(body, 2, timeout=280, backend="dist_prims")


def test_bad_calls_are_refused_before_anything_is_sent() -> None:
    def body() -> None:
        x = torch.ones(3, 2)
        for call, says in [
            (
                lambda: ops.all_reduce(x, "average"),
                r"dist_prims.ops on rank \d: op='average': op must be one of 'avg', 'sum'",
            ),
            (lambda: ops.reduce_scatter(x), r"rank \d has room for 2 elements and gives 3 to itself"),
            (lambda: ops.all_to_all(x, send=[1, 2]), r"on rank \d: give both send=\[1, 2\] and receive=None"),
            (lambda: ops.all_to_all(x, [4, -1], [1, 1]), r"split sizes \[4, -1\].*none negative"),
        ]:
            with pytest.raises((ValueError, RuntimeError), match=says):
                call()
        y = torch.ones(4, requires_grad=True)
        with pytest.raises(ValueError, match=r"op='max' has no gradient; use 'sum', or reduce x\.detach"):
            ops.reduce_scatter(y, "max").sum().backward()
        dist_prims.barrier()  # nothing was sent, and no rank still waits

    dist_prims.spawn(body, 2, timeout=60, backend="dist_prims")
    for early in (ops.all_reduce, lambda x: ops.all_to_all(x, send=[1])):
        with pytest.raises(ValueError, match=r"call dist_prims\.init"):
            early(torch.ones(1))


def test_ranks_that_disagree_get_an_error() -> None:
    def body() -> None:
        with pytest.raises(MismatchError, match=r"(?s)[Rr]ank 0.*rank 1"):
            ops.all_reduce(torch.ones(2 + dist.get_rank()))

    dist_prims.spawn(body, 2, timeout=60, backend="dist_prims")


def test_a_rank_outside_the_group_gets_an_error() -> None:
    def body() -> None:
        pair = dist.new_group([0])
        ops.all_reduce(torch.ones(1), group=pair)

    with pytest.raises(RankFailedError, match="rank 1 is not a member"):
        dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    dist_prims.spawn(compiled_on_cuda, 1, timeout=110, backend="cpu:gloo,cuda:nccl", start_method="spawn")


def compiled_on_cuda() -> None:
    x = torch.randn(4, 4, device="cuda")
    model = Net().cuda()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
