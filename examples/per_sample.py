"""Per-sample gradients: the items that would change a model most, without their gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from .._console import Console
from ..patterns.per_sample import PerSampleGradients, over_pool

__all__: list[str] = []

POOL, BATCH = 300, 50


class Net(torch.nn.Module):
    """The model of the article: two convolutions of images of 10 by 10, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = torch.nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = torch.nn.Linear(500, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.conv2(self.conv1(x)).flatten(1))
        return found


def one_by_one(model: Net, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The norms of the gradient of conv2, one sample at a time, as in the article."""
    norms = []
    for number in range(len(xs)):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(xs[number : number + 1]), ys[number : number + 1])
        torch.autograd.backward(loss)
        assert model.conv2.weight.grad is not None
        norms.append(model.conv2.weight.grad.norm())
    return torch.stack(norms)


def run(console: Console) -> None:
    torch.manual_seed(0)  # the same model and pool on every rank
    model = Net()
    pool = TensorDataset(torch.rand(POOL, 3, 10, 10), torch.arange(POOL) % 10)
    loss = torch.nn.functional.cross_entropy
    alone = one_by_one(model, *pool.tensors)

    layer = PerSampleGradients(model, loss, "conv2")
    rows = over_pool(layer.norms, pool, chunk=BATCH)
    near_loop = torch.allclose(rows.gather(), alone, rtol=1e-5, atol=1e-5)
    console.check(near_loop, "the norms of a layer equal those of a loop, in order")
    values, items = rows.top(3)
    console.check(torch.equal(items, rows.gather().topk(3).indices), "the largest norms of all ranks are found")
    console.say(f"    items {items.tolist()} would change conv2 most: {[round(value, 4) for value in values.tolist()]}")

    xs, ys = (each[:BATCH] for each in pool.tensors)
    whole, vectorised, loop = (PerSampleGradients(model, loss, method=method) for method in ("trick", "vmap", "loop"))
    wanted = loop.norms(xs, ys)
    near = [torch.allclose(each.norms(xs, ys), wanted, rtol=1e-5, atol=1e-5) for each in (whole, vectorised)]
    console.check(all(near), "so do the norms over all layers, by the norm trick and by vmap(grad)")
    grads, theirs = whole.gradients(xs, ys), loop.gradients(xs, ys)
    same = [torch.allclose(grads[name], theirs[name], rtol=1e-5, atol=1e-5) for name in theirs]
    console.check(all(same), "so do the gradients themselves")
    grad_layer = PerSampleGradients(model, loss, "conv2", method="vmap")
    _times(console, pool, {
        "one by one": lambda x, y: one_by_one(model, x, y),
        "vmap(grad)": grad_layer.norms,
        "norm trick": layer.norms,
    })  # fmt: skip


def _times(console: Console, pool: TensorDataset, methods: dict[str, Callable[..., Any]]) -> None:
    """Print the time of each method; the methods run in rotation, so that disturbances affect all equally."""
    xs, ys = (each[:BATCH] for each in pool.tensors)
    small = TensorDataset(xs, ys)
    alone: dict[str, list[float]] = {name: [] for name in methods}
    shared: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(5):
        for name, norms in methods.items():
            for times, call in ((alone, lambda f=norms: f(xs, ys)), (shared, lambda f=norms: over_pool(f, small))):
                dist.barrier()
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in alone.items()}
    first = next(iter(medians.values()))
    rows = [
        (name, f"{1e3 * each:.2f} ms", f"{first / each:.1f} x", f"{1e3 * statistics.median(shared[name]):.2f} ms")
        for name, each in medians.items()
    ]
    console.say("")
    headings = (
        f"norms of conv2, {BATCH} samples",
        "all on each rank",
        "speed",
        f"distributed over {dist.get_world_size()} ranks",
    )
    console.table(headings, rows)
