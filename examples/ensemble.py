"""Ensemble: ten networks, stacked by vmap and distributed over the ranks, predict, vote and learn.

Weights are never sent: outputs are, or sums of the size of one member's output. Training sends nothing.

    torchrun --nproc-per-node 2 ensemble.py --members 10
"""

import argparse
import statistics
import timeit
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy, one_hot

import dist_prims


def net(number: int) -> torch.nn.Module:
    """The network of PyTorch's tutorial: three layers for images of 28 by 28."""
    torch.manual_seed(number)
    layers = [torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()]
    return torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(128, 10))


class Members:
    """The members of this rank: one module without weights, and their parameters and buffers, stacked."""

    def __init__(self, numbers: list[int]) -> None:
        members = [net(number) for number in numbers]
        self.parameters, self.buffers = stack_module_state(members)  # copies
        self.module = members[0].to("meta")

    def __call__(self, images: torch.Tensor, each: bool = False) -> Any:
        """Outputs of shape (members, ...); with ``each`` the images have a batch for each member."""

        def one(parameters: Any, buffers: Any, x: torch.Tensor) -> Any:
            return functional_call(self.module, (parameters, buffers), (x,))

        in_dims = (0, 0, 0 if each else None)
        return vmap(one, in_dims, randomness="different")(self.parameters, self.buffers, images)


def gather(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows of all members, in order; rank r has ``counts[r]`` of them."""
    every = rows.new_empty(sum(counts), *rows.shape[1:])
    dist_prims.all_gather([*every.split(counts)], rows.contiguous())
    return every


def mean_and_variance(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The variance is a sum of squared distances from the mean, so no digits cancel where members agree."""
    dist.all_reduce(mean := rows.sum(0) / count)
    dist.all_reduce(variance := (rows - mean).square().sum(0) / (count - 1))
    return mean, variance


def vote(rows: torch.Tensor) -> torch.Tensor:
    """The class for which most members vote; the lowest one if several are equal."""
    dist.all_reduce(votes := one_hot(rows.argmax(-1), rows.shape[-1]).sum(0))
    return votes.argmax(-1)


def learn(parameters: Any, loss_of: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, default=10, help="at least one for each rank")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size, count = dist.get_rank(), dist.get_world_size(), arguments.members
    shares = torch.arange(count).tensor_split(size)
    counts = [len(share) for share in shares]
    images = torch.randn(count, arguments.batch, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    alone, labels = [net(number) for number in range(count)], torch.arange(arguments.batch) % 10
    ensemble, everyone = Members(shares[rank].tolist()), Members([*range(count)])
    log = print if rank == 0 else lambda text: None
    with torch.no_grad():
        rows, expected = ensemble(images[0]), torch.stack([member(images[0]) for member in alone])
        assert_near(gather(rows, counts), expected)
        assert_near(mean_and_variance(rows, count), (expected.mean(0), expected.var(0)))
        assert torch.equal(vote(rows), one_hot(expected.argmax(-1), 10).sum(0).argmax(-1)), "another vote"
        each = torch.stack([member(own) for member, own in zip(alone, images, strict=True)])
        assert_near(gather(ensemble(images[shares[rank]], each=True), counts), each)
    log(f"{count} members on {size} ranks: outputs, mean, variance and majority vote are those of a loop")
    learn(ensemble.parameters.values(), lambda: vmap(cross_entropy, (0, None))(ensemble(images[0]), labels).sum())
    for member in alone:
        learn(member.parameters(), lambda member=member: cross_entropy(member(images[0]), labels))
    for name, stacked in ensemble.parameters.items():
        assert_near(gather(stacked.detach(), counts), torch.stack([member.state_dict()[name] for member in alone]))
    log("after three steps of SGD each member equals the member trained alone\n")

    methods = {
        "loop over the members": lambda: [member(images[0]) for member in alone],
        "vmap, all members on each rank": lambda: everyone(images[0]),
        "vmap, members distributed": lambda: gather(ensemble(images[0]), counts),
        "the same, nothing sent": lambda: ensemble(images[0]),
    }
    log(f"outputs of a batch of {arguments.batch:<19} ms")
    for name, method in methods.items():
        times = timeit.repeat(torch.no_grad()(method), setup=dist.barrier, number=1, repeat=10)
        log(f"{name:32} {1000 * statistics.median(times):6.2f}")


if __name__ == "__main__":
    main()
