"""Uneven inputs: ranks with different numbers of batches train together, with torch's join and ours.

Rank r has 3 + 2r batches. A rank without batches contributes zeros until all are done; otherwise the rest would hang.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from .._console import Console
from ..training import GradientAverager

__all__: list[str] = []

_FEWEST, _MORE, _RATE = 3, 2, 0.05


def run(console: Console) -> None:
    size = dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    theirs = DistributedDataParallel(copy.deepcopy(net))
    ours = copy.deepcopy(net)
    averager = GradientAverager(ours)
    steps = {}
    forms: dict[str, tuple[torch.nn.Module, Any]] = {
        "DistributedDataParallel.join()": (theirs, theirs.join()),
        "GradientAverager.join()": (ours, averager.join()),
    }
    for name, (model, joined) in forms.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        with joined:
            for steps[name], x in enumerate(_batches(console.rank), start=1):
                optimizer.zero_grad()
                _loss(model, x).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    averager.remove()
    expected = _alone(net, size)
    rows: list[tuple[object, ...]] = []
    for name, (model, _) in forms.items():
        error = (parameters_to_vector(model.parameters()) - expected).abs().max().item()
        console.check(error <= 1e-6, f"{name}: on every rank the weights of one process with all batches")
        counts = torch.zeros(size, dtype=torch.int64)
        counts[console.rank] = steps[name]
        dist.all_reduce(counts)
        rows.append((name, "  ".join(str(count) for count in counts.tolist()), f"{error:.1e}"))
    console.table(("method", "steps of each rank", "error against one process"), rows)


def _alone(net: torch.nn.Module, size: int) -> torch.Tensor:
    """The weights of one process; each step sums the gradients of the remaining batches and divides by ``size``."""
    model = copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for batches in zip(*(_padded(rank, size) for rank in range(size)), strict=True):
        optimizer.zero_grad()
        losses = [_loss(model, x) / size for x in batches if x is not None]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return parameters_to_vector(model.parameters())


def _batches(rank: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(6, 8, generator=draw) for _ in range(_FEWEST + _MORE * rank))


def _padded(rank: int, size: int) -> list[torch.Tensor | None]:
    return [*_batches(rank), *[None] * (_MORE * (size - 1 - rank))]


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss
