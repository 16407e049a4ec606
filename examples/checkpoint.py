"""Checkpoints: a run continues bit for bit, past a damaged file, and on another number of ranks.

Six steps of a network with dropout, Adam with its state sharded over the ranks, and a sampler; then again from the
checkpoints of steps 2 and 4.

    torchrun --nproc-per-node 2 checkpoint.py --megabytes 16
"""

import argparse
import os
import statistics
import tempfile
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.datasets import digits
from dist_prims.training.checkpoint import Checkpoints
from dist_prims.training.sharding import ZeroOptimizer


class Training:
    """The whole state that a checkpoint must restore."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 10))
        self.optimizer = ZeroOptimizer(self.model.parameters(), torch.optim.Adam, lr=0.01, group=group)
        self.sampler = dist_prims.ShardedSampler(1797, group=group, seed=1)
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.checkpoints = Checkpoints(folder, state, group=group)

    def train(self, first: int, last: int) -> torch.Tensor:
        """Train from step ``first`` to step ``last``; return the parameters."""
        images, labels = digits().tensors
        for _ in range(first, last):
            drawn = list(self.sampler)[:20]
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images[drawn]), labels[drawn]).backward()
            self.optimizer.step()  # averages the gradients as well
            self.sampler.advance(20)
        return parameters_to_vector(self.model.parameters()).detach()


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def check_restores(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())  # a different dropout mask on each rank
    run = Training(folder)
    for step in (0, 2):
        run.train(step, step + 2)
        run.checkpoints.save(step + 2)
    moments = run.optimizer.state_dict()["state"]  # the whole state, on every rank
    expected = run.train(4, 6)

    torch.manual_seed(99)
    again = Training(folder)
    assert again.checkpoints.restore() == 4
    torch.testing.assert_close(again.train(4, 6), expected, rtol=0, atol=0)
    log("restored from step 4: step 6 has the same bits")

    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        one = Training(folder, alone)
        one.checkpoints.restore()
        torch.testing.assert_close(one.optimizer.state_dict()["state"], moments, rtol=0, atol=0)
        (damaged,) = folder.glob("step-4.*/state.pt")
        os.truncate(damaged, 1000)
    dist.barrier()
    log("restored by one rank: Adam's moments have the bits of those of all ranks")

    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        assert again.checkpoints.restore() == 2, "all ranks must use the previous checkpoint"
    log(f"damaged: {issued[0].message}" if issued else "")
    torch.testing.assert_close(again.train(2, 6), expected, rtol=0, atol=0)
    log("restored from step 2: step 6 has the same bits\n")


def print_times(folder: Path, megabytes: int) -> None:
    state = torch.zeros(megabytes << 18)
    checkpoints = Checkpoints(folder / "times", {"state": state})
    calls: dict[str, Callable[[], object]] = {
        "torch.save by each rank, unsynced": lambda: torch.save(state, folder / f"{dist.get_rank()}.pt"),
        "Checkpoints.save": lambda: checkpoints.save(1),
        "Checkpoints.restore": lambda: checkpoints.restore(),
    }
    log(f"{f'{megabytes} MB of state, median':34}   ms")
    for name, call in calls.items():
        times = timeit.repeat(call, setup=dist.barrier, number=1, repeat=5)
        log(f"{name:34} {1000 * statistics.median(times):4.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=16, help="state of the time measurement")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder)]
        dist.broadcast_object_list(folders)  # all ranks use rank 0's
        check_restores(folders[0])
        print_times(folders[0], arguments.megabytes)
        dist.barrier()


if __name__ == "__main__":
    main()
