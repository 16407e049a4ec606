"""Per-sample gradients: the items that would change a model most, without their gradients.

torchrun --nproc-per-node 2 per_sample.py --pool 300
"""

import argparse
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dist_prims
from dist_prims.patterns.per_sample import PerSampleGradients, over_pool

BATCH = 50


class Net(torch.nn.Module):
    """Two convolutions of images of 10 by 10, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = torch.nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = torch.nn.Linear(500, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.conv2(self.conv1(x)).flatten(1))
        return found


def one_by_one(model: Net, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The norms of the gradient of conv2, one sample at a time."""
    losses = (cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0)) for x, y in zip(xs, ys, strict=True))
    return torch.stack([torch.autograd.grad(loss, model.conv2.weight)[0].norm() for loss in losses])


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    times = timeit.repeat(lambda: function(*arguments), setup=dist.barrier, number=1, repeat=5)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pool", type=int, default=300, help="items of the pool")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    log = print if dist.get_rank() == 0 else lambda text: None
    torch.manual_seed(0)  # the same model and pool on every rank
    model = Net()
    pool = TensorDataset(torch.rand(arguments.pool, 3, 10, 10), torch.arange(arguments.pool) % 10)

    layer = PerSampleGradients(model, cross_entropy, "conv2")
    rows = over_pool(layer.norms, pool, chunk=BATCH)
    assert_near(rows.gather(), one_by_one(model, *pool.tensors))
    values, items = rows.top(3)
    assert torch.equal(items, rows.gather().topk(3).indices), "top(3) has not found the largest norms of all ranks"
    log(f"items {items.tolist()} of {len(pool)} would change conv2 most: norms {[f'{each:.4f}' for each in values]}")

    xs, ys = (each[:BATCH] for each in pool.tensors)
    loop = PerSampleGradients(model, cross_entropy, method="loop")
    for method in ("trick", "vmap"):
        whole = PerSampleGradients(model, cross_entropy, method=method)
        assert_near(whole.norms(xs, ys), loop.norms(xs, ys))
        assert_near(dict(whole.gradients(xs, ys)), dict(loop.gradients(xs, ys)))
    log("norms and gradients are those of a loop over the samples\n")

    small = TensorDataset(xs, ys)
    methods: dict[str, Callable[..., torch.Tensor]] = {
        "one by one": lambda x, y: one_by_one(model, x, y),
        "vmap(grad)": PerSampleGradients(model, cross_entropy, "conv2", method="vmap").norms,
        "norm trick": layer.norms,
    }
    log(f"ms for the norms of {BATCH} samples    all on each rank   distributed over the ranks")
    for name, norms in methods.items():
        each, shared = milliseconds(norms, xs, ys), milliseconds(over_pool, norms, small)
        log(f"{name:31} {each:16.2f} {shared:28.2f}")


if __name__ == "__main__":
    main()
