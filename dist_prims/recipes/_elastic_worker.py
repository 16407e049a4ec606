"""The program that torchrun starts in the recipe ``elastic`` and in its tests: training from checkpoints.

Training is data-parallel, and the moments of Adam are sharded by rows: rank r updates its rows of the parameters, and
all ranks gather them. ``--die rank@step`` makes that rank kill itself in that step of the job's first attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..collectives import all_gather
from ..collectives.flat import cut, split_evenly
from ..datasets import digits
from ..launch import init
from ..training import average_gradients
from ..training.checkpoint import Checkpoints
from ..training.elastic import GlobalBatches, elastic_steps

__all__: list[str] = []


def train(
    folder: Path,
    last: int,
    every: int,
    *,
    dropout: float = 0.2,
    before: Callable[[int], None] = lambda step: None,
) -> torch.Tensor:
    """Train to step ``last``, from the newest checkpoint if there is one, and return the parameters.

    ``before`` is called in each step.
    """
    torch.set_num_threads(1)  # every attempt must add in the same order
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))
    flat = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(flat, model.parameters())  # the parameters become views of flat
    rank, lengths = dist.get_rank(), split_evenly(len(flat), dist.get_world_size())
    parts = cut(flat, lengths)
    mine = nn.Parameter(parts[rank])
    adam = torch.optim.Adam([mine], lr=0.01)
    batches = GlobalBatches(digits(), 50, seed=3)
    checkpoints = Checkpoints(folder, {"model": model, "batches": batches}, sharded={"adam": adam})
    torch.manual_seed(1 + rank)  # a different dropout mask on each rank
    for step, (images, labels, weight) in zip(elastic_steps(checkpoints, last, every=every), batches, strict=False):
        before(step)
        model.zero_grad()
        (F.cross_entropy(model(images), labels) * weight).backward()
        average_gradients(model)
        gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        mine.grad = cut(gradients, lengths)[rank]
        adam.step()
        all_gather(parts, parts[rank])
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step until a file 'hurry' exists")
    parser.add_argument("--die", help="rank@step")
    parser.add_argument("--backend", default="dist_prims")
    given = parser.parse_args()
    init(given.backend, timeout=60)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    death = tuple(map(int, given.die.split("@"))) if given.die and first else None

    hurry = given.folder.parent / "hurry"

    def before(step: int) -> None:
        time.sleep(0 if hurry.exists() else given.pause)
        if dist.get_rank() == 0:
            with (given.folder.parent / "log.jsonl").open("a") as log:
                print(
                    json.dumps({"step": step, "ranks": dist.get_world_size(), "pid": os.getpid(), "at": time.time()}),
                    file=log,
                )
        if death == (dist.get_rank(), step):
            os.kill(os.getpid(), signal.SIGKILL)

    flat = train(given.folder, given.last, given.every, dropout=given.dropout, before=before)
    if dist.get_rank() == 0:
        torch.save(flat, given.folder.parent / "weights.pt")


if __name__ == "__main__":
    main()
