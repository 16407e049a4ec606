"""Elasticity: under torchrun a rank is killed in some step; the final weights have the bits of an undisturbed run.

In the first attempt of the job one rank kills itself with SIGKILL. torchrun restarts all ranks, which resume from the
last checkpoint: only the steps since then run twice. Afterwards the same training runs undisturbed, for comparison.

    torchrun --nproc-per-node 2 --max-restarts 1 elastic.py --kill 0@13
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.datasets import digits
from dist_prims.training.checkpoint import Checkpoints
from dist_prims.training.data import GlobalBatches


def train(
    folder: Path, last: int, every: int, *, dropout: float = 0.2, before: Callable[[int], None] = lambda step: None
) -> torch.Tensor:
    """Train to step ``last``, from the newest checkpoint if there is one, and return the parameters.

    ``before`` is called in each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = GlobalBatches(digits(), 50, seed=3)
    checkpoints = Checkpoints(folder, {"model": model, "optimizer": optimizer, "batches": batches})
    torch.manual_seed(1 + dist.get_rank())  # a different dropout mask on each rank
    stop = torch.zeros(1)  # 1 after SIGTERM, which torchrun sends before it changes the membership
    handler = signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, handler))
    for step in range(checkpoints.restore(), last):
        before(step)
        images, labels, weight = next(batches)
        optimizer.zero_grad()
        (F.cross_entropy(model(images), labels) * weight).backward()
        dist_prims.average_gradients(model)
        optimizer.step()
        leave = stop.clone()
        dist.all_reduce(leave, dist.ReduceOp.MAX)  # all ranks stop after the same step
        if leave or (step + 1) % every == 0 or step + 1 == last:
            checkpoints.save(step + 1)
        if leave and step + 1 < last:
            sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    return parameters_to_vector(model.parameters()).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--last", type=int, default=20, help="number of steps")
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--kill", default="0@13", help="rank@step")
    parser.add_argument("--folder", type=Path, help="directory that all hosts see; default: a temporary one")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    killed = tuple(map(int, arguments.kill.split("@"))) if attempt == 0 < restarts else None
    folder = arguments.folder or Path(tempfile.gettempdir(), f"elastic-{os.getppid()}")  # the same after a restart
    if rank == 0 and not restarts:
        print("No rank is killed, because nothing would restart it: use torchrun --max-restarts 1.")

    def before(step: int) -> None:
        if rank == 0:
            print(f"attempt {attempt}, {size} ranks: step {step}", flush=True)
        if (rank, step) == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    weights = train(folder / "job", arguments.last, arguments.every, before=before)
    expected = train(folder / "undisturbed", arguments.last, arguments.every)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    dist.barrier()
    if rank == 0:
        print(f"The weights after {arguments.last} steps have the bits of an undisturbed run.")
        if not arguments.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
