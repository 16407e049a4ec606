"""What the tests of GradientAverager share: a model with one of everything, its batches, and how to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dist_prims

BACKENDS = ["gloo", "dist_prims"]


def spawn(body: Callable[..., Any], size: int, backend: str = "dist_prims", timeout: float = 60) -> list[Any]:
    return dist_prims.spawn(body, size, backend=backend, timeout=timeout)


class Net(torch.nn.Module):
    """Convolution in channels_last, batch norm, a tied weight, a scalar and an empty parameter, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = torch.nn.BatchNorm2d(4)
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.tied = torch.nn.Linear(16, 16)
        self.tied.weight = self.inner.weight
        self.fine = torch.nn.Linear(16, 3).double()
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.tied(self.inner(x).relu()) * self.scale + self.empty.sum()
        result: torch.Tensor = self.fine(x.double())
        return result


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
