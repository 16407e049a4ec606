"""Minimal DDP: DistributedDataParallel in 60 lines, with the same bits on 2 ranks.

A hook reports each gradient; a full bucket is reduced during the backward; the end of backward waits for all buckets.
GradientAverager adds the needs of real models: unused parameters, sparse gradients, compression.

    torchrun --nproc-per-node 2 ddp_twin.py --layers 6
"""

import argparse
import copy
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import dist_prims

WIDTH, STEPS = 192, 12


class MinimalDDP:
    """Averages the gradients of ``model`` over the ranks in every backward; every parameter must get a gradient."""

    def __init__(self, model: torch.nn.Module, bucket_bytes: int = 2**18) -> None:
        for each in model.parameters():
            dist.broadcast(each.detach(), 0)
        lists: list[list[torch.Tensor]] = [[]]
        for parameter in reversed([each for each in model.parameters() if each.requires_grad]):  # order of gradients
            last = lists[-1]
            if last and (sum(each.nbytes for each in last) >= bucket_bytes or last[0].dtype != parameter.dtype):
                lists.append([])
            lists[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self.buckets = [Bucket(each) for each in lists]
        self._of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._arrivals = self._next = 0

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._arrivals == 0:  # as DistributedDataParallel does; torch has no public hook for the end of a backward
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


class Bucket:
    """Gradients that are reduced together."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters, self.missing = parameters, len(parameters)

    def send(self) -> None:
        self.flat = torch.cat([each.grad.reshape(-1) for each in self.parameters if each.grad is not None])
        self.work = dist.all_reduce(self.flat.div_(dist.get_world_size()), async_op=True)

    def finish(self, whole: bool) -> None:
        self.missing = len(self.parameters)
        if whole:
            self.work.wait()
            means = self.flat.split([each.numel() for each in self.parameters])
            for parameter, mean in zip(self.parameters, means, strict=True):
                parameter.grad = mean.view_as(parameter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(arguments.layers)))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"  # DataParallel requires the first GPU
    models: dict[str, torch.nn.Module] = {
        "DistributedDataParallel": DistributedDataParallel(copy.deepcopy(net)),
        "MinimalDDP": copy.deepcopy(net),
        "GradientAverager": copy.deepcopy(net),
        "average_gradients, after backward": copy.deepcopy(net),
        "DataParallel, batches of all ranks": torch.nn.DataParallel(copy.deepcopy(net).to(device)),
    }
    MinimalDDP(models["MinimalDDP"])
    dist_prims.GradientAverager(models["GradientAverager"])
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(STEPS):
        batches = torch.randn(size, 32, WIDTH)  # the same on every rank
        for name, model in models.items():
            x = batches.flatten(0, 1) if name.startswith("DataParallel") else batches[rank]
            dist.barrier()
            began = time.perf_counter()
            optimizers[name].zero_grad()
            (model(x).to(x.device) - x.roll(1, 1)).square().mean().backward()
            if name.startswith("average_gradients"):
                dist_prims.average_gradients(model)
            optimizers[name].step()
            times[name].append(time.perf_counter() - began)
    weights = {name: parameters_to_vector(each.parameters()).detach().cpu() for name, each in models.items()}
    expected = weights["DistributedDataParallel"]
    log = print if rank == 0 else lambda text: None
    log(f"{'method':34}   ms a step   largest difference from DDP after {STEPS} steps")
    for name, found in weights.items():
        bound = 0 if size <= 2 and not name.startswith("DataParallel") else 1e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=f"{name} differs from DDP")
        log(f"{name:34} {1000 * sorted(times[name])[STEPS // 2]:11.2f}   {(found - expected).abs().max():.0e}")


if __name__ == "__main__":
    main()
