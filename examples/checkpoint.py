"""Checkpoints: a run continues bit for bit, past a damaged file, and on another number of ranks.

Six steps of a network with dropout, Adam sharded by rows and a sampler; then again from its two checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .._console import Console
from ..collectives import all_gather
from ..collectives.flat import cut, split_evenly
from ..datasets import digits
from ..training import ShardedSampler, average_gradients
from ..training.checkpoint import Checkpoints

__all__: list[str] = []


class Training:
    """The whole state that a checkpoint must restore."""

    def __init__(self, folder: str, group: dist.ProcessGroup | None = None) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        model = self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 10))
        self.flat = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(self.flat, model.parameters())  # the parameters become views of flat
        self.lengths = split_evenly(len(self.flat), size)
        self.rows = nn.Parameter(cut(self.flat, self.lengths)[rank])
        self.adam = torch.optim.Adam([self.rows], lr=0.01)
        self.sampler = ShardedSampler(1797, group=group, seed=1)
        self.rank, self.group = rank, group
        state: dict[str, Any] = {"model": model, "sampler": self.sampler}
        self.checkpoints = Checkpoints(folder, state, sharded={"adam": self.adam}, group=group)

    def train(self, step: int, last: int) -> torch.Tensor:
        images, labels = digits().tensors
        for _ in range(step, last):
            drawn = list(self.sampler)[:20]
            self.model.zero_grad()
            F.cross_entropy(self.model(images[drawn]), labels[drawn]).backward()  # type: ignore[no-untyped-call]
            average_gradients(self.model, self.group)
            gradients = torch.cat([each.grad.flatten() for each in self.model.parameters() if each.grad is not None])
            self.rows.grad = cut(gradients, self.lengths)[self.rank]
            self.adam.step()
            all_gather(cut(self.flat, self.lengths), self.rows.detach(), self.group)
            self.sampler.advance(20)
        return self.flat.clone()


def run(console: Console) -> None:
    made = tempfile.TemporaryDirectory() if console.rank == 0 else contextlib.nullcontext("")
    with made as name:
        box = [name]
        dist.broadcast_object_list(box, 0)
        _show(console, box[0])
        dist.barrier()


def _show(console: Console, folder: str) -> None:
    first = Training(folder)
    torch.manual_seed(console.rank)
    for step in (0, 2):
        first.train(step, step + 2)
        path = first.checkpoints.save(step + 2)
    moments = first.adam.state[first.rows]["exp_avg"].clone()
    wanted = first.train(4, 6)
    torch.manual_seed(99)
    again = Training(folder)
    found, same = again.checkpoints.restore(), torch.equal(again.train(4, 6), wanted)
    console.check(found == 4 and same, "restored from step 4, step 6 has the same bits")

    alone, whole = dist.new_group([0]), torch.zeros_like(first.flat)
    if console.rank == 0:
        one = Training(folder, alone)
        one.checkpoints.restore()
        whole = one.adam.state[one.rows]["exp_avg"]
    dist.broadcast(whole, 0)
    theirs = cut(whole, first.lengths)[console.rank]
    console.check(torch.equal(theirs, moments), f"one rank alone restores the moments of all {len(first.lengths)}")
    if console.rank == 0:
        os.truncate(next(path.parent.glob("step-4.*/state.pt")), 1000)
    dist.barrier()
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        found = again.checkpoints.restore()
    named = console.rank > 0 or "state.pt has 1000 bytes" in str(issued[0].message)
    console.check(found == 2 and named, "truncated file: rank 0 names it, all ranks use the previous checkpoint")
    console.check(torch.equal(again.train(2, 6), wanted), "restored from step 2, step 6 has the same bits")
    console.table(("16 MB of state, median", "ms"), [(what, f"{1000 * took:.0f}") for what, took in _times(folder)])


def _times(folder: str) -> list[tuple[str, float]]:
    state = torch.zeros(16 << 18)
    checkpoints = Checkpoints(f"{folder}/times", {"state": state})
    plain = functools.partial(torch.save, state, f"{folder}/plain-{dist.get_rank()}.pt")
    calls: list[Callable[[], object]] = [plain, functools.partial(checkpoints.save, 1), checkpoints.restore]
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(5 * len(calls)):  # in rotation
        dist.barrier()
        began = time.perf_counter()
        calls[number % len(calls)]()
        taken[number % len(calls)].append(time.perf_counter() - began)
    names = ("torch.save by each rank, unsynced", "Checkpoints.save", "Checkpoints.restore")
    return [(name, statistics.median(times)) for name, times in zip(names, taken, strict=True)]
