"""The classes of the examples ddp_twin and two_devices: what they compute, and how they fail."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_twin import MinimalDDP
from torch.nn.parallel import DistributedDataParallel
from two_devices import TwoDevices

import dist_prims


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())  # rank 0's values count
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        self.frozen = torch.nn.Linear(20, 20).requires_grad_(False)
        self.unused: torch.nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.layers(x).tanh())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 10**6])
def test_minimal_ddp_has_the_bits_of_ddp(bucket_bytes: int, backend: str) -> None:
    def body() -> None:
        model = Net()
        theirs = DistributedDataParallel(copy.deepcopy(model))
        minimal = MinimalDDP(model, bucket_bytes)
        assert len(minimal.buckets) == {1: 8, 2000: 2, 10**6: 1}[bucket_bytes]
        for step in range(3):
            x = torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for each in (model, theirs):
                each.zero_grad()
                each(x).square().sum().backward()
            for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
                assert (mine.grad is None) == (other.grad is None) == (not mine.requires_grad)
                assert mine.grad is None or torch.equal(mine.grad, other.grad)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_minimal_ddp_says_what_it_does_not_do() -> None:
    def body() -> None:
        model = Net()
        model.unused = torch.nn.Linear(1, 1)
        MinimalDDP(model)
        with pytest.raises(RuntimeError, match="2 parameters have no gradient"):
            model(torch.ones(1, 20)).sum().backward()
        model.zero_grad()
        rank = dist.get_rank()
        (model(torch.ones(1, 20)).sum() + (1 + rank) * model.unused(torch.ones(1, 1)).sum()).backward()
        assert model.unused.bias.grad.item() == 1.5  # averaged, though the backward before has failed

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_minimal_ddp_takes_several_dtypes() -> None:
    def body() -> None:
        model: Any = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()])
        assert len(MinimalDDP(model).buckets) == 2
        scale = 1.0 + dist.get_rank()
        (scale * model[1](model[0](torch.ones(1, 1)).double())).sum().backward()
        assert (model[1].bias.grad.item(), model[1].bias.grad.dtype) == (1.5, torch.float64)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_two_gpus() -> None:
    model = TwoDevices(torch.device("cuda:0"), torch.device("cuda:1"))
    output = model(torch.ones(3, 10))
    output.sum().backward()
    assert [each.device.index for each in (model.net1.weight.grad, output)] == [0, 1]
