"""Parameter server: asynchronous workers, the staleness of their gradients, and a bound for it.

Rank 0 is the server, the other ranks train on digits. One worker is slow; without a bound it does not delay the rest.

    torchrun --nproc-per-node 3 parameter_server.py --steps 40
"""

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.datasets import digits
from dist_prims.patterns.parameter_server import ParameterServer, Report, Worker

BATCH, RATE = 32, 0.2
SLOW = 0.02  # additional seconds of a step of the last worker, if there are several workers


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def batches(rank: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits().tensors
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=draw)
        yield images[chosen], labels[chosen]


def train(model: torch.nn.Module, bound: int | None, steps: int) -> Report | None:
    """Serve or work; return the report on the server."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        return ParameterServer(model, torch.optim.SGD(model.parameters(), lr=RATE), staleness=bound).serve()
    with Worker(model) as worker:
        for x, y in batches(rank, steps):
            if bound != 0 and rank == last > 1:
                time.sleep(SLOW)
            F.cross_entropy(model(x), y).backward()
            worker.step()
    return None


def train_alone(workers: int, steps: int) -> torch.Tensor:
    """The weights after synchronous SGD in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in zip(*(batches(rank, steps) for rank in range(1, workers + 1)), strict=True):
        gradients = [torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()]) for x, y in step]
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(part / workers for part in each)
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each worker")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    images, labels = digits().tensors
    workers = dist.get_world_size() - 1
    torch.optim.SGD(net().parameters())  # the first optimizer of a process imports a lot: exclude it from the times
    if dist.get_rank() == 0:
        print(
            f"{workers} workers, {arguments.steps} steps each" if workers else "a server without workers learns nothing"
        )
        print("bound                     steps   mean staleness   largest   accuracy     ms")
    for bound in (0, 3, None):
        model = net()
        dist.barrier()
        began = time.perf_counter()
        report = train(model, bound, arguments.steps)
        dist.barrier()
        if report is None:
            continue
        seconds = time.perf_counter() - began
        assert sum(report.gradients.values()) == workers * arguments.steps, "a gradient did not arrive once"
        largest, allowed = max(report.staleness, default=0), 0 if bound is None else 2 * bound + 1
        assert bound is None or largest <= allowed * max(workers - 1, 0), f"a gradient is {largest} steps old"
        if bound == 0 and workers:
            weights = parameters_to_vector(model.parameters()).detach()
            torch.testing.assert_close(weights, train_alone(workers, arguments.steps), rtol=0, atol=0)
        count = max(sum(report.staleness.values()), 1)
        mean = sum(age * number for age, number in report.staleness.items()) / count
        accuracy = (model(images).argmax(1) == labels).float().mean()
        name = "unbounded" if bound is None else "0: bits of one process" if bound == 0 else bound
        print(f"{name:<24}{report.steps:7} {mean:16.1f} {largest:9} {accuracy:10.1%} {1000 * seconds:6.0f}")


if __name__ == "__main__":
    main()
