"""Compiled graph: a model with collectives in its forward is one graph, loss and backward included.

The model has five constructs that break a compiled graph, or used to: an assertion on values, an ``.item()``, a loop
over a NumPy range, a print, and a call of ``torch.distributed.all_reduce``. They are removed or replaced one by one.
The final model is trained with its loss in the graph, and compared with a process that has all data.
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

__all__: list[str] = []

Step = Callable[[torch.Tensor], torch.Tensor]
CONSTRUCTS = ("print", ".item()", "assert", "numpy.arange", "dist.all_reduce")


class Model(torch.nn.Module):
    """A model with the graph-breaking constructs ``breaking``; the others are replaced by traceable code."""

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
            total = x.sum(0).detach()  # dist.all_reduce has no derivative
            dist.all_reduce(total)
        else:
            total = self.reduce(x.sum(0))
        return self.last(x + 0.1 * total)  # type: ignore[no-any-return]


def run(console: Console) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    rows, same = [], True
    for removed in range(len(CONSTRUCTS) + 1):
        left = CONSTRUCTS[removed:]
        graphs, equal = count_graphs(Model(left), images)
        rows.append((CONSTRUCTS[removed - 1] if removed else "none", len(left), graphs, graphs - 1))
        same &= equal
    console.table(("construct removed", "constructs left", "graphs", "breaks"), rows)
    console.check(same, "compiled, every variant has the bits of the uncompiled model")
    console.check(rows[0][2] > rows[-1][2] == 1, "the last variant is one graph without a break")
    compiled, plain, alone = train(images, one_graph), train(images, lambda step: step), train(images, None)
    console.check(near(compiled, plain), "trained with the loss in the graph, the weights are those of eager training")
    console.check(near(compiled, alone), "and those of one process with the images of all ranks")


def near(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(one, other, strict=True))


def count_graphs(model: torch.nn.Module, images: torch.Tensor) -> tuple[int, bool]:
    """The number of graphs, and whether the compiled and the uncompiled model give the same bits."""
    graphs, log = [], logging.getLogger("torch._dynamo")

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    level = log.level
    log.setLevel(logging.ERROR)  # no warning for each break on each rank
    found = torch.compile(model, backend=count)(images)
    log.setLevel(level)
    return len(graphs), torch.equal(found, model(images))


def one_graph(step: Step) -> Step:
    """Compile; ``fullgraph=True`` raises at a break, "aot_eager" compiles the backward as well, but no kernels."""
    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager", fullgraph=True)


def train(images: torch.Tensor, how: Callable[[Step], Step] | None) -> list[torch.Tensor]:
    """The parameters after three steps on all ranks, with the step wrapped by ``how``; None: in one process."""
    torch.manual_seed(0)
    model = Model() if how else Model(reduce=lambda x: x)
    images = images if how else ops.all_gather(images)
    labels = torch.arange(len(images)) % 4  # each rank has four images
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(images: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(images), labels)
        return ops.all_reduce(loss, "avg") if how else loss

    step = how(loss_of) if how else loss_of
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(step(images))
        if how:
            average_gradients(model)
        optimizer.step()
    return [each.detach() for each in model.parameters()]
