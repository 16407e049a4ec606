"""The parameter server: synchronous without staleness, stale by at most the bound, and no rank left waiting."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.errors import CommError, MismatchError, PeerDiedError
from dist_prims.launch import RankFailedError
from dist_prims.patterns.parameter_server import ParameterServer, Report, Worker


class Net(torch.nn.Module):
    """Two dtypes, a scalar, a frozen parameter, one without elements, one that only worker 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fine = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1).double()
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(0))
        self.frozen, self.some = torch.nn.Linear(5, 5).requires_grad_(False), torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x))) * self.scale + self.empty.sum()
        return self.fine((self.some(x) if rank == 1 else x).double())


def backward(model: Net, step: int, rank: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    (model(x, rank) - x.sum(1, keepdim=True)).square().mean().backward()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def synchronous(workers: list[int], steps: dict[int, int]) -> list[torch.Tensor]:
    """One process: the mean of those that still have a batch, in the order of ranks."""
    model = Net()
    optimizer = sgd(model)
    for step in range(max(steps.values(), default=0)):
        there = [rank for rank in workers if step < steps[rank]]
        of_all_ranks = []
        for rank in there:
            model.zero_grad()
            backward(model, step, rank)
            of_all_ranks.append([each.grad for each in model.parameters()])
        for parameter, given in zip(model.parameters(), zip(*of_all_ranks, strict=True), strict=True):
            found = [each / len(there) for each in given if each is not None]
            parameter.grad = sum(found[1:], found[0]) if found else None
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize(
    ("size", "server", "backend"), [(1, 0, "dist_prims"), (2, 1, "gloo"), (3, 0, "dist_prims"), (4, 2, "dist_prims")]
)
def test_without_staleness_it_is_synchronous_sgd(size: int, server: int, backend: str) -> None:
    workers = [rank for rank in range(size) if rank != server]
    steps = {rank: 3 + rank for rank in workers}  # uneven

    def body() -> tuple[Report | None, list[torch.Tensor]]:
        rank, model = dist.get_rank(), Net()
        if rank == server:
            return ParameterServer(model, sgd(model), server=server, staleness=0).serve(), [*model.parameters()]
        torch.nn.init.zeros_(model.scale)  # the server's values count
        with Worker(model, server=server) as worker:
            for step in range(steps[rank]):
                backward(model, step, rank)
                worker.step()
                assert worker.version == step + 1
        return None, [*model.parameters()]

    found = dist_prims.spawn(body, size, backend=backend, timeout=60)
    report = found[server][0]
    assert (report.steps, report.failed) == (max(steps.values(), default=0), [])
    assert report.gradients == steps
    assert report.staleness == ({0: sum(steps.values())} if steps else {})
    for mine, wanted in zip(found[server][1], synchronous(workers, steps), strict=True):
        assert torch.equal(mine, wanted)  # to the bit
    if workers:
        last = max(steps, key=lambda rank: steps[rank])
        for mine, theirs in zip(found[server][1], found[last][1], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("bound", "backend"), [(None, "dist_prims"), (1, "gloo"), (2, "dist_prims")])
def test_staleness_is_bounded_and_reported(bound: int | None, backend: str) -> None:
    """Worker 2 waits until worker 1 has done all that the bound lets it do, by a message of its own."""

    def body() -> Any:
        rank, model = dist.get_rank(), Net()
        if rank == 0:
            return ParameterServer(model, sgd(model), staleness=bound).serve()
        ahead = 6 if bound is None else bound
        versions = []
        with Worker(model) as worker:
            if rank == 2:
                backward(model, 0, rank)  # of the first parameters
                dist.recv(torch.empty(1), 1)
            for step in range(6):
                if rank == 1 or step:
                    backward(model, step, rank)
                worker.step()
                versions.append(worker.version)
                if rank == 1 and step == ahead - 1:
                    dist.send(torch.ones(1), 2)
        return versions

    report, one, two = dist_prims.spawn(body, 3, backend=backend, timeout=60)
    assert (report.steps, report.gradients, report.failed) == (12, {1: 6, 2: 6}, [])
    assert sum(report.staleness.values()) == 12
    assert one == sorted(one)
    assert two == sorted(two)
    if bound is None:
        assert report.staleness == {0: 11, 6: 1}  # one of the first parameters, after all of worker 1's steps
        assert (one, two) == ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    else:
        assert one[:bound] == [*range(1, bound + 1)]
        assert max(report.staleness) <= 2 * bound + 1


def test_a_worker_that_fails_says_so_and_the_others_go_on() -> None:
    def body() -> Any:
        rank, model = dist.get_rank(), Net()
        if rank == 0:
            return ParameterServer(model, sgd(model), staleness=0).serve()
        try:
            with Worker(model) as worker:
                for step in range(3):
                    backward(model, step, rank)
                    if rank == 2 and step == 1:
                        raise ZeroDivisionError
                    worker.step()
        except ZeroDivisionError:
            return "failed"
        return worker.version

    report, one, two = dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)
    assert (report.failed, report.gradients, one, two) == ([2], {1: 3, 2: 1}, 3, "failed")


@pytest.mark.parametrize(("bound", "backend"), [(0, "dist_prims"), (1, "gloo"), (None, "dist_prims")])
def test_a_server_that_fails_says_so_and_the_ranks_go_on(bound: int | None, backend: str) -> None:
    """Worker 1 steps once more after the error, 2 does not, and 3 leaves without a step."""

    def body() -> None:
        rank, model = dist.get_rank(), Net()
        if rank == 0:
            optimizer = sgd(model)
            server = ParameterServer(model, optimizer, staleness=bound)
            if backend == "gloo":
                optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
            else:  # it steps, and cannot send
                optimizer.register_step_post_hook(lambda *_: model.half())  # type: ignore[arg-type]
            with pytest.raises((ZeroDivisionError, RuntimeError)):
                server.serve()
        else:
            with Worker(model) as worker:
                for step in range(3 - rank):
                    backward(model, step, rank)
                    expected = (
                        (CommError, "server, rank 0, has failed") if step == 0 else (ValueError, "left the server")
                    )
                    with pytest.raises(expected[0], match=expected[1]):
                        worker.step()
            with pytest.raises(ValueError, match="this worker has left the server; make a new Worker"), worker:
                pass
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 4

    dist_prims.spawn(body, 4, backend=backend, timeout=60)


def test_a_worker_that_dies_is_known_by_name() -> None:
    def body() -> None:
        rank, model = dist.get_rank(), Net()
        if rank == 0:
            server = ParameterServer(model, sgd(model))
            with pytest.raises(PeerDiedError, match="rank 2"):
                server.serve()
            assert not torch.equal(model.first.weight, Net().first.weight)  # what had come was applied
            raise RuntimeError("served until then")
        with pytest.raises(PeerDiedError, match="rank 2"):
            work(model, rank)

    def work(model: Net, rank: int) -> None:
        with Worker(model) as worker:
            for step in range(1000):
                backward(model, step, rank)
                worker.step()
                if rank == 2 and step == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1 and step == 1:
                    dist.recv(torch.empty(1), 2)  # which never comes

    with pytest.raises(RankFailedError, match="rank 2 was killed by SIGKILL"):
        dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    def body() -> None:
        rank, model = dist.get_rank(), Net()
        with pytest.raises(MismatchError, match="rank 1 makes a ParameterServer with server=0, rank 0 a Param"):
            ParameterServer(model, sgd(model))
        with pytest.raises(MismatchError, match="rank 0 makes a Worker with server=0"):
            Worker(model)
        with pytest.raises(
            MismatchError, match="rank 1 makes a ParameterServer with server=1, rank 0 a ParameterServer with server=0"
        ):
            ParameterServer(model, sgd(model), server=rank)
        unlike = torch.nn.Linear(3 + rank, 2)
        with pytest.raises(MismatchError, match=r"Rank 0 has tensor 'weight' .*\(2, 3\).*; rank 1 has .*\(2, 4\)"):
            Worker(unlike) if rank else ParameterServer(unlike, sgd(unlike))
        with pytest.raises(ValueError, match=r"rank 0 makes a ParameterServer with server=0 and staleness=-1; it must"):
            Worker(model) if rank else ParameterServer(model, sgd(model), staleness=-1)
        for outside in (-1, 5):
            with pytest.raises(ValueError, match=f"makes a Worker with server={outside}; the ranks .* are 0 to 1"):
                Worker(model, server=outside)
        sparse = torch.nn.Embedding(3, 2, sparse=True)
        if rank == 0:
            assert ParameterServer(sparse, torch.optim.SGD(sparse.parameters())).serve().failed == [1]
            assert ParameterServer(model, sgd(model)).serve() == Report()
            return
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"shape \(3, 2\) has a sparse gradient"), Worker(sparse) as worker:
            worker.step()
        with Worker(model) as worker:
            model.half()
            with pytest.raises(
                ValueError,
                match=r"shape \(\) and torch.float16; when the Worker was made it had \(\) and torch.float32",
            ):
                worker.step()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_in_a_part_of_the_ranks() -> None:
    def body() -> Any:
        group = dist.new_group([1, 2])
        rank, model = dist.get_rank(), Net()
        if rank == 0:
            return None
        if rank == 1:
            return ParameterServer(model, sgd(model), group).serve()
        with Worker(model, group) as worker:
            backward(model, 0, rank)
            worker.step()
        return worker.version

    for backend in ("gloo", "dist_prims"):
        _, report, version = dist_prims.spawn(body, 3, backend=backend, timeout=60)
        assert (report.steps, dict(report.gradients), version) == (1, {1: 1}, 1)
