"""Compiled graph: a model with collectives in its forward is one graph, loss and backward included.

The model has five constructs that break a compiled graph, or used to: an assertion on values, an ``.item()``, a loop
over a NumPy range, a print, and a call of ``torch.distributed.all_reduce``. They are removed or replaced one by one.
The final model is trained with its loss in the graph, and compared with a process that has all data.

    torchrun --nproc-per-node 2 compiled.py --steps 3
"""

import argparse
import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, max_pool2d

import dist_prims
from dist_prims import ops

Step = Callable[[torch.Tensor], torch.Tensor]
CONSTRUCTS = ("print", ".item()", "assert", "numpy.arange", "dist.all_reduce")


class Model(torch.nn.Module):
    """A model with the graph-breaking constructs ``breaking``; the others are replaced by traceable code."""

    def __init__(self, breaking: tuple[str, ...] = (), reduce: Step = ops.all_reduce) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.head, self.middle, self.last = torch.nn.Linear(36, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)
        self.breaking, self.reduce, self.journal = breaking, reduce, io.StringIO()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = max_pool2d(self.conv(images).relu(), 2).flatten(1)
        if "assert" in self.breaking:
            assert torch.all(x >= 0)
        x = self.head(x)
        self.head_sum = x.sum().item() if ".item()" in self.breaking else x.sum().detach()
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


def count_graphs(model: torch.nn.Module, images: torch.Tensor) -> int:
    """The number of graphs; the compiled model must give the bits of the uncompiled one."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    logging.disable(logging.WARNING)  # no warning for each break on each rank
    found = torch.compile(model, backend=count)(images)
    logging.disable(logging.NOTSET)
    torch.testing.assert_close(found, model(images), rtol=0, atol=0)
    return len(graphs)


def one_graph(step: Step) -> Step:
    """Compile; ``fullgraph=True`` raises at a break, "aot_eager" compiles the backward as well, but no kernels."""
    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager", fullgraph=True)


def train(images: torch.Tensor, steps: int, wrap: Callable[[Step], Step] | None) -> torch.Tensor:
    """The parameters after training on all ranks, with the step wrapped by ``wrap``; None: in one process."""
    torch.manual_seed(0)
    model = Model() if wrap else Model(reduce=lambda x: x)
    images = images if wrap else ops.all_gather(images)
    labels = torch.arange(len(images)) % 4  # each rank has four images
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(images: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(images), labels)
        return ops.all_reduce(loss, "avg") if wrap else loss

    step = wrap(loss_of) if wrap else loss_of
    for _ in range(steps):
        optimizer.zero_grad()
        step(images).backward()
        if wrap:
            dist_prims.average_gradients(model)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of training")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    log = print if dist.get_rank() == 0 else lambda text: None
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    log("constructs left                                           graphs")
    for removed in range(len(CONSTRUCTS) + 1):
        left = CONSTRUCTS[removed:]
        graphs = count_graphs(Model(left), images)
        log(f"{', '.join(left) or 'none':58}{graphs:6}")
    assert graphs == 1, "the model without the constructs is not one graph"
    alone = train(images, arguments.steps, None)
    for name, wrap in {"compiled": one_graph, "eager": lambda step: step}.items():
        torch.testing.assert_close(train(images, arguments.steps, wrap), alone, rtol=1e-4, atol=1e-6)
        log(f"{name}, loss in the graph: after {arguments.steps} steps the weights of one process with all images")


if __name__ == "__main__":
    main()
