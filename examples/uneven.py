"""Uneven inputs: ranks with different numbers of batches train together, with torch's join and ours.

Rank r has 3 + 2r batches. A rank without batches contributes zeros until all are done; otherwise the rest would hang.

    torchrun --nproc-per-node 2 uneven.py --fewest 3 --more 2
"""

import argparse
import copy
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import dist_prims

RATE = 0.05


def batches(rank: int, count: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(6, 8, generator=draw) for _ in range(count))


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def train_alone(net: torch.nn.Module, counts: list[int]) -> torch.Tensor:
    """The weights of one process; each step sums the gradients of the remaining batches and divides by the ranks."""
    model = copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in zip_longest(*(batches(rank, count) for rank, count in enumerate(counts))):
        optimizer.zero_grad()
        torch.stack([loss_of(model, x) / len(counts) for x in step if x is not None]).sum().backward()
        optimizer.step()
    return parameters_to_vector(model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fewest", type=int, default=3, help="batches of rank 0")
    parser.add_argument("--more", type=int, default=2, help="further batches of each next rank")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [arguments.fewest + arguments.more * each for each in range(size)]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    theirs, ours = DistributedDataParallel(copy.deepcopy(net)), copy.deepcopy(net)
    methods: dict[str, tuple[torch.nn.Module, Any]] = {
        "DistributedDataParallel.join()": (theirs, theirs.join()),
        "GradientAverager.join()": (ours, dist_prims.GradientAverager(ours).join()),
    }
    expected = train_alone(net, counts)
    if rank == 0:
        print("batches of each rank:", *counts)
        print("method                           largest difference from one process with all batches")
    for name, (model, joined) in methods.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with joined:
            for x in batches(rank, counts[rank]):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
        found = parameters_to_vector(model.parameters())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=f"{name} differs from one process")
        if rank == 0:
            print(f"{name:32} {(found - expected).abs().max():.0e}")


if __name__ == "__main__":
    main()
