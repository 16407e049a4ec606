"""Parameter server: asynchronous workers, the staleness of their gradients, and a bound for it.

Rank 0 is the server, the other ranks train on digits. One worker is slow; without a bound it does not delay the rest.

    torchrun --nproc-per-node 3 parameter_server.py --steps 40
"""

import argparse
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dist_prims
from dist_prims.datasets import digits

BATCH, RATE, SLOW = 32, 0.2, 0.02  # SLOW: additional seconds of a step of the last of several workers
IMAGES, LABELS = digits().tensors
LEAVES = -1.0  # a message has a version and then weights or a gradient; this version says that a worker leaves


def net() -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def gradient(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    """The gradient of batch ``number`` of a rank, as one vector."""
    chosen = torch.randint(len(LABELS), (BATCH,), generator=torch.Generator().manual_seed(1000 * rank + number))
    loss = F.cross_entropy(model(IMAGES[chosen]), LABELS[chosen])
    return parameters_to_vector(torch.autograd.grad(loss, [*model.parameters()]))


class Trainer:
    """A model whose parameters are views of one vector, and SGD with a mean of gradients, added in their order."""

    def __init__(self) -> None:
        self.model, self.steps = net(), 0
        self.weights = torch.nn.Parameter(parameters_to_vector(self.model.parameters()).detach())
        vector_to_parameters(self.weights.detach(), self.model.parameters())
        self.optimizer = torch.optim.SGD([self.weights], lr=RATE)

    def step(self, gradients: list[torch.Tensor]) -> None:
        self.weights.grad = torch.stack([each / len(gradients) for each in gradients]).sum(0)
        self.optimizer.step()
        self.steps += 1


def serve(trainer: Trainer, bound: int | None) -> Counter[int]:
    """Answer workers until all have left; return the number of gradients by staleness.

    A worker more than ``bound`` gradients ahead of the slowest waits. The bound 0 makes one step of all workers.
    """
    present = {*range(1, dist.get_world_size())}
    staleness, received = Counter[int](), Counter[int]()
    waiting: dict[int, torch.Tensor] = {}  # gradients of workers without an answer
    while present:
        worker = dist.recv(message := torch.empty(1 + len(trainer.weights)))  # from any rank
        if message[0] == LEAVES:
            present.remove(worker)
        else:
            staleness[trainer.steps - int(message[0])] += 1
            received[worker] += 1
            waiting[worker] = message[1:]
            if bound != 0:
                trainer.step([message[1:]])
        if bound == 0 and waiting:
            if waiting.keys() != present:
                continue
            trainer.step([waiting[each] for each in sorted(waiting)])
        slowest = min((received[each] for each in present), default=0)
        for each in [each for each in waiting if bound is None or received[each] <= slowest + bound]:
            del waiting[each]
            dist.send(torch.cat([torch.tensor([trainer.steps]), trainer.weights.detach()]), each)
    return staleness


def work(steps: int, seconds: float) -> None:
    model, message = net(), torch.zeros(1)
    for number in range(steps):
        time.sleep(seconds)
        dist.send(message := torch.cat([message[:1], gradient(model, dist.get_rank(), number)]), 0)
        dist.recv(message, 0)
        vector_to_parameters(message[1:], model.parameters())
    dist.send(torch.full_like(message, LEAVES), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each worker")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, workers, steps = dist.get_rank(), dist.get_world_size() - 1, arguments.steps
    if rank == 0:
        print(f"{steps} gradients of {workers} workers\nbound       steps   mean staleness   largest   accuracy")
    for bound in (0, 3, None):
        dist.barrier()  # the server receives from any rank: no worker may begin before all have left
        if rank > 0:
            work(steps, SLOW if bound != 0 and rank == workers > 1 else 0.0)
            continue
        staleness = serve(server := Trainer(), bound)
        assert staleness.total() == workers * steps, "a gradient did not arrive once"
        largest, allowed = max(staleness, default=0), 0 if bound is None else 2 * bound + 1
        assert bound is None or largest <= allowed * max(workers - 1, 0), f"a gradient is {largest} steps old"
        if bound == 0 and workers:
            alone = Trainer()
            for number in range(steps):
                alone.step([gradient(alone.model, 1 + each, number) for each in range(workers)])
            assert torch.equal(alone.weights, server.weights), "not the bits of one process"
        mean = sum(age * number for age, number in staleness.items()) / max(staleness.total(), 1)
        accuracy = (server.model(IMAGES).argmax(1) == LABELS).float().mean()
        print(f"{bound!s:<10}{server.steps:7} {mean:16.1f} {largest:9} {accuracy:10.1%}")


if __name__ == "__main__":
    main()
