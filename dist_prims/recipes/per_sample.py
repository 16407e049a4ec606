"""Per-sample gradients: which items of a pool would change the model most, without their gradients."""

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

__all__ = ["run"]

POOL, BATCH = 300, 50


class Net(torch.nn.Module):
    """The article's: two convolutions of images of 10 by 10, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = torch.nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = torch.nn.Linear(500, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.conv2(self.conv1(x)).flatten(1))
        return found


def one_by_one(model: Net, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The norms of the gradient of conv2, as the article's question computes them."""
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
    console.check(
        torch.allclose(rows.gather(), alone, rtol=1e-5, atol=1e-5), "norms of a layer are the loop's, in order"
    )
    values, items = rows.top(3)
    console.check(torch.equal(items, rows.gather().topk(3).indices), "the largest of all ranks are found")
    console.say(f"    items {items.tolist()} would change conv2 most: {[round(value, 4) for value in values.tolist()]}")

    xs, ys = (each[:BATCH] for each in pool.tensors)
    whole, vectorised, loop = (PerSampleGradients(model, loss, method=method) for method in ("trick", "vmap", "loop"))
    wanted = loop.norms(xs, ys)
    near = [torch.allclose(way.norms(xs, ys), wanted, rtol=1e-5, atol=1e-5) for way in (whole, vectorised)]
    console.check(all(near), "norms over all layers, too, by the trick and by vmap(grad)")
    grads, theirs = whole.gradients(xs, ys), loop.gradients(xs, ys)
    same = [torch.allclose(grads[name], theirs[name], rtol=1e-5, atol=1e-5) for name in theirs]
    console.check(all(same), "and the gradients themselves, where they are wanted")
    grad_layer = PerSampleGradients(model, loss, "conv2", method="vmap")
    _times(console, pool, {
        "one by one": lambda x, y: one_by_one(model, x, y),
        "vmap(grad)": grad_layer.norms,
        "norm trick": layer.norms,
    })  # fmt: skip


def _times(console: Console, pool: TensorDataset, ways: dict[str, Callable[..., Any]]) -> None:
    """One after another in turn, so that whatever else the machine does meets all of them."""
    xs, ys = (each[:BATCH] for each in pool.tensors)
    small = TensorDataset(xs, ys)
    alone: dict[str, list[float]] = {name: [] for name in ways}
    shared: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            for times, call in ((alone, lambda way=way: way(xs, ys)), (shared, lambda way=way: over_pool(way, small))):
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
        "each rank all",
        "speed",
        f"shared by {dist.get_world_size()} ranks",
    )
    console.table(headings, rows)
