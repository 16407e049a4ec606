"""Ensemble: ten networks, stacked by vmap and distributed over the ranks, predict, vote and learn.

torchrun --nproc-per-node 2 ensemble.py --members 10
"""

import argparse
import statistics
import timeit
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call, stack_module_state, vmap

import dist_prims
from dist_prims.patterns.ensemble import DistributedEnsemble

BATCH = 64


def net(number: int) -> torch.nn.Module:
    """The network of PyTorch's tutorial: three layers for images of 28 by 28."""
    torch.manual_seed(number)
    layers = [torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()]
    return torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(128, 10))


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def check_outputs(ensemble: DistributedEnsemble, alone: list[torch.nn.Module], images: torch.Tensor) -> None:
    same = torch.stack([member(images[0]) for member in alone])
    each = torch.stack([member(own) for member, own in zip(alone, images, strict=True)])
    assert_near(ensemble.outputs(images[0]), same)  # one batch for all members
    assert_near(ensemble.outputs(images, each=True), each)  # one batch for each member
    mean, variance = ensemble.moments(images[0])
    assert_near(mean, same.mean(0))
    assert_near(variance, same.var(0))
    votes = torch.nn.functional.one_hot(same.argmax(-1), 10).sum(0)
    assert torch.equal(ensemble.vote(images[0]), votes.argmax(-1)), "the majority vote differs from that of a loop"


def check_training(ensemble: DistributedEnsemble, alone: list[torch.nn.Module], images: torch.Tensor) -> None:
    labels, loss = torch.arange(BATCH) % 10, torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        ensemble.backward(loss, images, labels)
        optimizer.step()
    for number, member in enumerate(alone):
        optimizer = torch.optim.SGD(member.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss(member(images), labels).backward()
            optimizer.step()
        assert_near(dict(ensemble.member(number)), dict(member.state_dict()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    members, log = arguments.members, print if dist.get_rank() == 0 else lambda text: None
    images = torch.randn(members, BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    alone = [net(number) for number in range(members)]
    ensemble = DistributedEnsemble(net, members)
    log(f"{members} members on {dist.get_world_size()} ranks; rank 0 has members {[*ensemble.mine]}")
    check_outputs(ensemble, alone, images)
    log("outputs, mean, variance and majority vote are those of a loop over all members")
    check_training(ensemble, alone, images[0])
    log("after three steps of SGD each member equals the member trained alone\n")

    shared, states = DistributedEnsemble(alone), stack_module_state(alone)
    stacked = vmap(lambda parameters, buffers: functional_call(alone[0], (parameters, buffers), (images[0],)))
    methods = {
        "loop over the members": lambda: [member(images[0]) for member in alone],
        "vmap, all members on each rank": lambda: stacked(*states),
        "vmap, members distributed": lambda: shared.outputs(images[0]),
    }
    log(f"outputs of a batch of {BATCH}              ms")
    for name, method in methods.items():
        times = timeit.repeat(torch.no_grad()(method), setup=dist.barrier, number=1, repeat=10)
        log(f"{name:32} {1000 * statistics.median(times):6.2f}")


if __name__ == "__main__":
    main()
