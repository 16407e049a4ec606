"""Compiled graph: a model with collectives in its forward is one graph, loss and backward included.

A network has five habits that tear a compiled graph, or used to: it asserts something of its values, keeps an
``.item()``, loops over a NumPy range, prints, and calls ``torch.distributed.all_reduce``. They are taken
out in turn, or said in another way. What is left is trained, its loss in the graph, beside a process that has all data.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, max_pool2d

from .. import ops
from .._console import Console
from ..training import average_gradients

__all__ = ["run"]

Step = Callable[[torch.Tensor], torch.Tensor]
HABITS = ("print", ".item()", "assert", "numpy.arange", "dist.all_reduce")


class Habits(torch.nn.Module):
    """``breaking``: which of its habits it has; the others are said so that a graph can hold them."""

    def __init__(self, breaking: tuple[str, ...] = (), reduce: Step = ops.all_reduce) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.head, self.middle, self.last = torch.nn.Linear(36, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)
        self.breaking, self.reduce, self.journal = breaking, reduce, io.StringIO()
        self.seen: dict[str, float | torch.Tensor] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = max_pool2d(self.conv(images).relu(), 2).flatten(1)
        if "assert" in self.breaking:
            assert torch.all(x >= 0)
        x = self.head(x)
        self.seen["head"] = x.sum().item() if ".item()" in self.breaking else x.sum().detach()
        for _ in np.arange(2) if "numpy.arange" in self.breaking else range(2):
            x = self.middle(x)
        if "print" in self.breaking:
            print(x.shape, file=self.journal)
        if "dist.all_reduce" in self.breaking:
            total = x.sum(0).detach()  # it has no derivative of its own
            dist.all_reduce(total)
        else:
            total = self.reduce(x.sum(0))
        return self.last(x + 0.1 * total)  # type: ignore[no-any-return]


def run(console: Console) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    rows, same = [], True
    for removed in range(len(HABITS) + 1):
        left = HABITS[removed:]
        graphs, equal = count_graphs(Habits(left), images)
        rows.append((HABITS[removed - 1] if removed else "nothing yet", len(left), graphs, graphs - 1))
        same &= equal
    console.table(("what was taken out", "habits left", "graphs", "breaks"), rows)
    console.check(same, "compiled, every one of them gives the bits of the uncompiled model")
    console.check(rows[0][2] > rows[-1][2] == 1, "one graph is left, without a break")
    compiled, plain, alone = train(images, one_graph), train(images, lambda step: step), train(images, None)
    console.check(near(compiled, plain), "trained with the loss in the graph, it ends as it does uncompiled")
    console.check(near(compiled, alone), "and as one process does that has everybody's images")


def near(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(one, other, strict=True))


def count_graphs(model: torch.nn.Module, images: torch.Tensor) -> tuple[int, bool]:
    """Into how many graphs it is torn, and whether compiled and uncompiled give the same bits."""
    graphs, log = [], logging.getLogger("torch._dynamo")

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    level = log.level
    log.setLevel(logging.ERROR)  # it would tell of each break, on each rank
    found = torch.compile(model, backend=count)(images)
    log.setLevel(level)
    return len(graphs), torch.equal(found, model(images))


def one_graph(step: Step) -> Step:
    """``fullgraph=True`` raises at a break; "aot_eager" compiles the backward, too, but no kernels."""
    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager", fullgraph=True)


def train(images: torch.Tensor, how: Callable[[Step], Step] | None) -> list[torch.Tensor]:
    """The parameters after three steps on all ranks, the step compiled or not; ``None``: of one process alone."""
    torch.manual_seed(0)
    model = Habits() if how else Habits(reduce=lambda x: x)
    images = images if how else ops.all_gather(images)
    labels = torch.arange(len(images)) % 4  # each rank has four images
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(images: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(images), labels)
        return ops.all_reduce(loss, "mean") if how else loss

    step = how(loss_of) if how else loss_of
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(step(images))
        if how:
            average_gradients(model)
        optimizer.step()
    return [each.detach() for each in model.parameters()]
