"""Parameter server: asynchronous workers, the staleness of their gradients, and a bound for it.

Rank 0 is the server, the other ranks train on digits. One worker is slow; without a bound it does not delay the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .._console import Console
from ..datasets import digits
from ..patterns.parameter_server import ParameterServer, Report, Worker

__all__: list[str] = []

_STEPS, _BATCH, _RATE = 40, 32, 0.2
_SLOW = 0.02  # additional seconds of a step of the last worker, if there are several workers


def run(console: Console) -> None:
    images, labels = digits().tensors
    rows: list[tuple[object, ...]] = []
    torch.optim.SGD(_net().parameters())  # the first optimizer of a process imports a lot: exclude it from the times
    for bound in (0, 3, None):
        model = _net()
        began = time.monotonic()
        own_report = _train(model, bound, slow=bound != 0)
        seconds = time.monotonic() - began
        box: list[Any] = [(own_report, [each.detach() for each in model.parameters()])]
        dist.broadcast_object_list(box, src=0)
        report, served = box[0]
        workers = dist.get_world_size() - 1
        name = "no bound" if bound is None else f"staleness {bound}"
        console.check(sum(report.gradients.values()) == workers * _STEPS, f"{name}: every gradient arrived once")
        if bound == 0:
            console.check(_same(served, _alone(workers)), "staleness 0: the weights have the bits of one process")
        elif bound is not None:
            most = (2 * bound + 1) * max(workers - 1, 0)
            oldest = max(report.staleness, default=0)
            console.check(oldest <= most, f"{name}: no gradient is more than {most} steps old")
        _load(model, served)
        right = float((model(images.flatten(1)).argmax(1) == labels).float().mean())
        stale = sum(age * count for age, count in report.staleness.items()) / max(sum(report.staleness.values()), 1)
        oldest = max(report.staleness, default=0)
        rows.append((name, report.steps, f"{stale:.1f}", oldest, f"{right:.1%}", f"{1000 * seconds:.0f} ms"))
    console.table(("bound", "steps", "mean staleness", "largest", "accuracy", "time"), rows)
    if dist.get_world_size() == 1:
        console.say("  A group of one rank has a server and no worker: nothing was learned.")


def _train(model: torch.nn.Module, bound: int | None, slow: bool) -> Report | None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        return ParameterServer(model, optimizer, staleness=bound).serve()
    with Worker(model) as worker:
        for x, y in _batches(rank):
            if slow and rank == last > 1:
                time.sleep(_SLOW)
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            worker.step()
    return None


def _alone(workers: int) -> list[torch.Tensor]:
    """The weights after synchronous SGD in one process."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for batches in zip(*(_batches(rank) for rank in range(1, workers + 1)), strict=True):
        gradients = []
        for x, y in batches:
            gradients.append(torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()]))
        for parameter, given in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            shares = [each / workers for each in given]
            parameter.grad = sum(shares[1:], shares[0])
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def _net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def _batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits().tensors
    draw = torch.Generator().manual_seed(rank)
    for _ in range(_STEPS):
        chosen = torch.randint(len(labels), (_BATCH,), generator=draw)
        yield images[chosen].flatten(1), labels[chosen]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@torch.no_grad()
def _load(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
