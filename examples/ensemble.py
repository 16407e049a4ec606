"""Ensemble: ten networks, stacked by vmap and distributed over the ranks, predict, vote and learn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call, stack_module_state, vmap

from .._console import Console
from ..patterns.ensemble import DistributedEnsemble

__all__: list[str] = []

MEMBERS, BATCH = 10, 64


def net(number: int) -> torch.nn.Module:
    """The network of PyTorch's tutorial: three layers for images of 28 by 28."""
    generator = torch.Generator().manual_seed(number)
    layers = [torch.nn.Linear(*sizes) for sizes in ((784, 128), (128, 128), (128, 10))]
    for layer in layers:
        torch.nn.init.kaiming_normal_(layer.weight, generator=generator)
        torch.nn.init.zeros_(layer.bias)
    first, second, last = layers
    return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), second, torch.nn.ReLU(), last)


def run(console: Console) -> None:
    images = torch.randn(MEMBERS, BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    alone = [net(number) for number in range(MEMBERS)]
    ensemble = DistributedEnsemble(net, MEMBERS)
    console.say(f"  {MEMBERS} members on {dist.get_world_size()} ranks; rank 0 has members {[*ensemble.mine]}\n")
    _answers(console, ensemble, alone, images)
    _learning(console, ensemble, alone, images)
    _times(console, alone, images[0])


def _answers(
    console: Console, ensemble: DistributedEnsemble, alone: list[torch.nn.Module], images: torch.Tensor
) -> None:
    with torch.no_grad():
        same = torch.stack([member(images[0]) for member in alone])
        each = torch.stack([member(mine) for member, mine in zip(alone, images, strict=True)])
    console.check(_near(ensemble.outputs(images[0]), same), "one batch for all members: the outputs, in order")
    console.check(_near(ensemble.outputs(images, each=True), each), "one batch for each member: the same")
    mean, variance = ensemble.moments(images[0])
    console.check(_near(mean, same.mean(0)) and _near(variance, same.var(0)), "mean and variance equal those of a loop")
    votes = torch.nn.functional.one_hot(same.argmax(-1), 10).sum(0)
    console.check(torch.equal(ensemble.vote(images[0]), votes.argmax(-1)), "the majority vote equals that of a loop")


def _learning(
    console: Console, ensemble: DistributedEnsemble, alone: list[torch.nn.Module], images: torch.Tensor
) -> None:
    labels, loss = torch.arange(BATCH) % 10, torch.nn.functional.cross_entropy
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        ensemble.backward(loss, images[0], labels)
        optimizer.step()
    right = True
    for number, member in enumerate(alone):
        optimizer = torch.optim.Adam(member.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss(member(images[0]), labels))
            optimizer.step()
        state = ensemble.member(number)
        right = right and all(_near(state[name], value) for name, value in member.state_dict().items())
    console.check(right, "after three steps of Adam each member equals the member trained alone")


def _times(console: Console, alone: list[torch.nn.Module], images: torch.Tensor) -> None:
    """Print the time of each method; the methods run in rotation, so that disturbances affect all equally."""
    shared = DistributedEnsemble(alone)
    stacks = stack_module_state(alone)
    stacked = vmap(lambda parameters, buffers: functional_call(alone[0], (parameters, buffers), (images,)))
    methods: dict[str, Callable[[], Any]] = {
        "loop over the members": lambda: [member(images) for member in alone],
        "vmap, all members on each rank": lambda: stacked(*stacks),
        "vmap, members distributed": lambda: shared.outputs(images),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    with torch.no_grad():
        for _ in range(10):
            for name, method in methods.items():
                dist.barrier()
                began = time.perf_counter()
                method()
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in times.items()}
    first = next(iter(medians.values()))
    rows = [(name, f"{1e3 * each:.2f} ms", f"{first / each:.2f} x") for name, each in medians.items()]
    console.say("")
    console.table((f"{MEMBERS} members, batch {BATCH}", "time", "speed"), rows)


def _near(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    return found is not None and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
