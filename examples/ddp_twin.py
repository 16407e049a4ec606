"""Minimal DDP: DistributedDataParallel in 60 lines, with the same bits on 2 ranks.

A hook reports each gradient; a full bucket is reduced during the backward; the end of backward waits for all buckets.
GradientAverager adds the needs of real models: unused parameters, sparse gradients, compression.
"""

from __future__ import annotations

import copy
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._console import Console
from ..collectives.flat import cut
from ..training import GradientAverager, average_gradients

__all__: list[str] = []
_WIDTH, _DEPTH, _BATCH, _STEPS = 192, 6, 32, 12


class MinimalDDP:
    """Averages the gradients of ``model`` over the ranks in every backward; every parameter must get a gradient."""

    def __init__(self, model: torch.nn.Module, bucket_bytes: int = 2**18) -> None:
        for each in model.parameters():
            dist.broadcast(each.detach(), 0)
        self.buckets: list[_Bucket] = []
        for parameter in reversed([each for each in model.parameters() if each.requires_grad]):  # order of gradients
            last = self.buckets[-1] if self.buckets else None
            if last is None or last.nbytes >= bucket_bytes or last.parameters[0].dtype != parameter.dtype:
                self.buckets.append(_Bucket())
            self.buckets[-1].add(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        self._of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._arrivals = self._next = 0

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._arrivals == 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._arrivals += 1
        self._of[parameter].missing -= 1
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:  # in one order on all ranks
            self.buckets[self._next].send()
            self._next += 1

    def _end(self) -> None:
        absent, self._arrivals, self._next = len(self._of) - self._arrivals, 0, 0
        for bucket in self.buckets:
            bucket.finish(whole=not absent)
        if absent:
            raise RuntimeError(f"MinimalDDP: {absent} parameters have no gradient")


class _Bucket:  # gradients that are reduced together
    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []
        self.nbytes = self.missing = 0

    def add(self, parameter: torch.Tensor) -> None:
        self.parameters.append(parameter)
        self.nbytes += parameter.nbytes
        self.missing += 1

    def send(self) -> None:
        flat = torch.cat([each.grad.reshape(-1) for each in self.parameters if each.grad is not None])
        self.flat = flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self, whole: bool) -> None:
        self.missing = len(self.parameters)
        if whole:
            self.work.wait()
            means = cut(self.flat, [each.numel() for each in self.parameters])
            for parameter, mean in zip(self.parameters, means, strict=True):
                parameter.grad = mean.view_as(parameter)


def run(console: Console) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"  # DataParallel requires the first GPU
    models: dict[str, torch.nn.Module] = {
        "DistributedDataParallel": DistributedDataParallel(copy.deepcopy(net)),
        "MinimalDDP": copy.deepcopy(net),
        "GradientAverager": copy.deepcopy(net),
        "average_gradients, after backward": copy.deepcopy(net),
        "DataParallel, batches of all ranks": torch.nn.DataParallel(copy.deepcopy(net).to(device)),
    }
    MinimalDDP(models["MinimalDDP"])
    GradientAverager(models["GradientAverager"])
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    draws = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    for _ in range(_STEPS):
        batches = [torch.randn(_BATCH, _WIDTH, generator=draw) for draw in draws]
        for name, model in models.items():
            x = torch.cat(batches) if name.startswith("DataParallel") else batches[console.rank]
            dist.barrier()
            began = time.perf_counter()
            optimizers[name].zero_grad()
            (model(x).to(x.device) - x.roll(1, 1)).square().mean().backward()
            if name.startswith("average_gradients"):
                average_gradients(model)
            optimizers[name].step()
            times[name].append(time.perf_counter() - began)
    weights = {name: torch.nn.utils.parameters_to_vector(model.parameters()).cpu() for name, model in models.items()}
    ddp, *others = weights
    for name in others:
        bound = 0 if len(draws) <= 2 and name in others[:-1] else 1e-6 if device == "cpu" else 1e-5
        error = (weights[name] - weights[ddp]).abs().max().item()
        console.check(error <= bound, f"{name}: DDP's weights after {_STEPS} steps, within {bound:g}")
    medians = {name: sorted(each)[_STEPS // 2] for name, each in times.items()}
    rows = [(name, f"{1000 * each:.2f} ms", f"{each / medians[ddp]:.2f}") for name, each in medians.items()]
    console.table(("method", "time a step", "relative to DDP"), rows)
    console.say(f"  DataParallel finds {torch.cuda.device_count()} GPUs; with fewer than 2 it only runs the module.")
