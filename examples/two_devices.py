"""Two devices: a model cut over two devices of each rank, with data parallelism over the ranks.

The first layer is on one device, the second on another: two GPUs for each rank if there are enough, otherwise the CPU
twice, which shows the code but no speedup. DistributedDataParallel accepts such a model with ``device_ids=None``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .._console import Console
from ..training import DevicePipeline, GradientAverager

__all__: list[str] = []

_BATCH, _STEPS, _RATE = 12, 10, 0.1

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TwoDevices(torch.nn.Module):
    """Two linear layers, each on its own device; ``forward`` moves the activations between them."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.net1, self.net2 = torch.nn.Linear(10, 10).to(first), torch.nn.Linear(10, 5).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.net1(x.to(self.devices[0])))
        y: torch.Tensor = self.net2(hidden.to(self.devices[1]))
        return y


def run(console: Console) -> None:
    rank, size = console.rank, dist.get_world_size()
    first, second = _devices(rank)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    cut = TwoDevices(first, second)
    for mine, theirs in zip(cut.parameters(), plain.parameters(), strict=True):
        mine.data.copy_(theirs.detach())
    stages = [torch.nn.Sequential(copy.deepcopy(cut.net1), torch.nn.ReLU()), copy.deepcopy(cut.net2)]
    pipeline = DevicePipeline(stages, num_microbatches=2, devices=[first, second], loss=F.mse_loss)
    piped, alone = torch.nn.ModuleList(stages), copy.deepcopy(cut)
    parallel = copy.deepcopy(cut)
    averager = GradientAverager(piped)
    shared = DistributedDataParallel(parallel, device_ids=None)
    forms: dict[str, tuple[torch.nn.Module, Step, bool]] = {  # and whether it gets only this rank's data
        "one device, one process": (plain, lambda x, y: _backward(plain, x, y), False),
        "two devices": (alone, lambda x, y: _backward(alone, x, y), False),
        "two devices and DDP": (parallel, lambda x, y: _backward(shared, x, y), True),
        "two devices, pipelined, averaged": (piped, pipeline.step, True),
    }
    optimizers = {name: torch.optim.SGD(form[0].parameters(), lr=_RATE) for name, form in forms.items()}
    draw = torch.Generator().manual_seed(1)
    losses = dict.fromkeys(forms, 0.0)
    for _ in range(_STEPS):
        x = torch.randn(size * _BATCH, 10, generator=draw)
        y = x[:, :5] - x[:, 5:]
        own = slice(rank * _BATCH, (rank + 1) * _BATCH)
        for name, (_, step, part) in forms.items():
            optimizers[name].zero_grad()
            losses[name] = float(step(x[own], y[own]) if part else step(x, y))
            optimizers[name].step()
    averager.remove()
    weights = {name: [each.detach().cpu() for each in form[0].parameters()] for name, form in forms.items()}
    expected, *others = weights
    for name in others:
        close = all(
            torch.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(weights[name], weights[expected], strict=True)
        )
        console.check(close, f"{name}: the weights of one device in one process, within 1e-6")
    rows = [(name, f"{first}, {second}" if name in others else "cpu", size if form[2] else 1, f"{losses[name]:.4f}")
            for name, form in forms.items()]  # fmt: skip
    console.table(("form", "devices", "ranks that share a batch", "rank 0's last loss"), rows)


def _devices(rank: int) -> tuple[torch.device, torch.device]:
    """Two GPUs for each rank if there are enough for all ranks, otherwise the CPU twice."""
    if torch.cuda.device_count() < 2 * dist.get_world_size():
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)


def _backward(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    loss = F.mse_loss(output, y.to(output.device))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
