"""Checkpoints: a run continues bit for bit, on another number of ranks, and never from a damaged save.

Six steps of a network with dropout, Adam and a sampler; then again from step 4, which is saved in the background.

    torchrun --nproc-per-node 2 checkpoint.py --megabytes 16
"""

import argparse
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.datasets import digits
from dist_prims.training.checkpoint import CheckpointError, Checkpoints


class Training:
    """The whole state that a checkpoint must restore."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 10))
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), group=group, group_src=0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = dist_prims.ShardedSampler(1797, group=group, seed=1)
        state = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.checkpoints = Checkpoints(folder, state, group=group)

    def train(self, first: int, last: int) -> torch.Tensor:
        """Train from step ``first`` to step ``last``; return the parameters."""
        images, labels = digits().tensors
        for _ in range(first, last):
            drawn = list(self.sampler)[:20]
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images[drawn]), labels[drawn]).backward()
            dist_prims.average_gradients(self.model)
            self.optimizer.step()
            self.sampler.advance(20)
        return parameters_to_vector(self.model.parameters()).detach()


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def check_restores(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())  # a different dropout mask on each rank
    run = Training(folder)
    saved = run.train(0, 4)
    run.checkpoints.save(4, background=True)
    expected = run.train(4, 6)
    run.checkpoints.wait()

    torch.manual_seed(99)
    again = Training(folder)
    assert again.checkpoints.restore() == 4
    torch.testing.assert_close(again.train(4, 6), expected, rtol=0, atol=0)
    log("restored from step 4: step 6 has the same bits")

    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        one = Training(folder, alone)
        one.checkpoints.restore()
        torch.testing.assert_close(parameters_to_vector(one.model.parameters()), saved, rtol=0, atol=0)
        os.truncate(folder / "step-4/rank-0.pt", 1000)
    dist.barrier()
    log("restored by one rank: the parameters have the bits of those of all ranks")

    try:
        again.checkpoints.restore()
    except CheckpointError as error:  # on all ranks
        log(f"damaged: {str(error).replace(str(folder), 'folder')}\n")


def print_times(folder: Path, megabytes: int) -> None:
    state = {f"{number}": torch.zeros(megabytes << 14) for number in range(16)}
    checkpoints, steps = Checkpoints(folder / "times", {"state": state}), iter(range(1, 100))
    dcp.save(state, checkpoint_id=folder / "dcp")
    calls: dict[str, Callable[[], object]] = {
        "dcp.save": lambda: dcp.save(state, checkpoint_id=folder / f"dcp-{next(steps)}"),
        "Checkpoints.save": lambda: checkpoints.save(next(steps)),
        "save(background=True)": lambda: checkpoints.save(next(steps), background=True),
        "wait()": checkpoints.wait,
        "dcp.load": lambda: dcp.load(state, checkpoint_id=folder / "dcp"),
        "Checkpoints.restore": checkpoints.restore,
    }
    rounds = [[timeit.timeit(call, dist.barrier, number=1) for call in calls.values()] for _ in range(7)]
    log(f"{f'{megabytes} MB of state, median':24}   ms")
    for name, times in zip(calls, zip(*rounds, strict=True), strict=True):
        log(f"{name:24} {1000 * statistics.median(times):4.0f}")


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
