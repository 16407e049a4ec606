"""Per-sample gradients: the items of a pool that would change a model most, found without their gradients.

The norms of one layer's gradients, for each sample by itself: in a loop, by vmap(grad), and from the layer's input and
the gradient of its output, which an ordinary backward of the whole batch computes. The pool is split over the ranks.

    torchrun --nproc-per-node 2 per_sample.py --pool 300
"""

import argparse
import functools
import statistics
import timeit
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import dist_prims

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


def by_loop(model: Net, name: str, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    weight = model.get_parameter(f"{name}.weight")
    losses = (F.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0)) for x, y in zip(xs, ys, strict=True))
    return torch.stack([torch.autograd.grad(loss, weight)[0].norm() for loss in losses])


def by_vmap(model: Net, name: str, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    def loss(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, {f"{name}.weight": weight}, x.unsqueeze(0)), y.unsqueeze(0))

    weight = model.get_parameter(f"{name}.weight").detach()
    gradients = vmap(grad(loss), (None, 0, 0))(weight, xs, ys)
    norms: torch.Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1)
    return norms


def by_trick(model: Net, name: str, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """A sample's gradient is d @ a.mT: d (R, T) is the gradient of the layer's output, a (C, T) the layer's input."""
    seen: list[Any] = []
    layer: Any = model.get_submodule(name)
    hook = layer.register_forward_hook(lambda layer, inputs, output: seen.extend([inputs[0].detach(), output]))
    loss = F.cross_entropy(model(xs), ys, reduction="sum")  # a sum, so that samples do not depend on each other
    hook.remove()
    a, (d,) = seen[0], torch.autograd.grad(loss, seen[1])
    if a.dim() == 4:  # a convolution, which is linear on the windows under its kernel
        a, d = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride), d.flatten(2)
    else:
        a, d = (each.reshape(len(xs), -1, each.shape[-1]).mT for each in (a, d))
    positions, rows, columns = a.shape[2], d.shape[1], a.shape[1]
    if positions * (rows + columns) < rows * columns:  # these matrices (T, T) are smaller than the gradient
        return torch.sum((a.mT @ a) * (d.mT @ d), (1, 2)).clamp(min=0).sqrt()
    norms: torch.Tensor = torch.linalg.vector_norm(d @ a.mT, dim=(1, 2))
    return norms


def top(norms: torch.Tensor, items: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest norms of all ranks, and the numbers of their items; each rank sends its own ``k`` largest."""
    own, places = norms.topk(k)
    every, numbers = own.new_empty(dist.get_world_size() * k), items.new_empty(dist.get_world_size() * k)
    dist_prims.all_gather(every, own)
    dist_prims.all_gather(numbers, items[places])
    largest, places = every.topk(k)
    return largest, numbers[places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pool", type=int, default=300, help="items of the pool, at least 3 for each rank")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    log = print if dist.get_rank() == 0 else lambda text: None
    torch.manual_seed(0)  # the same model and pool on every rank
    model, xs, ys = Net(), torch.rand(arguments.pool, 3, 10, 10), torch.arange(arguments.pool) % 10
    items = torch.arange(len(xs)).tensor_split(dist.get_world_size())[dist.get_rank()]  # of this rank
    for name in ("conv1", "conv2", "fc"):
        alone = by_loop(model, name, xs, ys)
        for method in (by_vmap, by_trick):
            norms = torch.cat([method(model, name, xs[chunk], ys[chunk]) for chunk in items.split(BATCH)])
            torch.testing.assert_close(norms, alone[items], rtol=1e-5, atol=1e-5)
        largest, chosen = top(norms, items, 3)
        torch.testing.assert_close(largest, alone.topk(3).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone[chosen], largest, rtol=1e-5, atol=1e-5)
        log(f"items {chosen.tolist()} of {len(xs)} would change {name} most; norms {largest.numpy().round(4)}")
    log("norms are those of a loop over the samples\n")
    log(f"ms for the norms of conv2 of {BATCH} samples")
    for method in (by_loop, by_vmap, by_trick):
        call = functools.partial(method, model, "conv2", xs[:BATCH], ys[:BATCH])
        log(f"{method.__name__:10} {1000 * statistics.median(timeit.repeat(call, number=1, repeat=10)):6.2f}")


if __name__ == "__main__":
    main()
