"""Training that loses a rank and gains one, without a restart of the others; equal in bits to one process.

A rank of three kills itself. The others go on with two, repeat the step that failed, and start a new process, which
joins them. One process then computes the same steps, with each batch split as it was.

    python survive.py

torchrun ends all ranks when one dies, and mpirun does so by default. Under a launcher, as in
``torchrun --nproc-per-node 2 survive.py``, rank 0 therefore starts the three ranks, and the others do nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.datasets import digits
from dist_prims.training import ReplicatedState
from dist_prims.training.data import GlobalBatches

RANK_OF_LAUNCHER = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
RANKS, STEPS, DIES_AT, JOINS_AT = 3, 12, 4, 8


def parts() -> tuple[nn.Module, torch.optim.Optimizer, GlobalBatches]:
    torch.set_num_threads(1)  # as in the ranks of spawn: the bits of a product depend on it
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), GlobalBatches(digits(), 50, seed=3)


def train(place: str) -> tuple[list[int], list[float]]:
    """Return the number of ranks in each step, and the parameters; ``place`` is where new ranks announce themselves."""
    model, optimizer, batches = parts()
    sizes = torch.zeros(STEPS, dtype=torch.int64)
    state = ReplicatedState({"model": model, "optimizer": optimizer, "batches": batches, "sizes": sizes})
    children: list[subprocess.Popen[bytes]] = []
    while True:
        try:
            if state.group is dist.group.WORLD:  # a new rank and one that repairs its group go on to resize()
                dist_prims.grow(place)
                while state.step == JOINS_AT and dist.get_world_size() < RANKS:
                    dist_prims.grow(place)
            if state.group is not dist.group.WORLD:
                state.resize()
                averager = dist_prims.GradientAverager(model)
            if state.step == STEPS:
                dist.barrier()  # no rank leaves before all have made the last step
                break
            with state.attempt() as step:
                images, labels, weight = next(batches)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels) * weight
                if (step, dist.get_rank(), dist.get_world_size()) == (DIES_AT, 1, RANKS):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                sizes[step] = dist.get_world_size()
        except (dist_prims.MismatchError, dist_prims.LeftOutError):
            raise  # an error of the program, or of this rank
        except dist_prims.CommError as error:
            print(f"step {state.step}: {type(error).__name__}", flush=True)
            dist_prims.shrink()
            if dist.get_rank() == 0:
                children.append(subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--join", place]))
    averager.remove()
    for child in children:
        assert child.wait(60) == 0
    return sizes.tolist(), parameters_to_vector(model.parameters()).tolist()


def reference(sizes: list[int]) -> list[float]:
    """Return the parameters after the same steps in one process: each batch is split, the gradients are averaged."""
    model, optimizer, batches = parts()
    for size in sizes:
        images, labels, _ = next(batches)
        ends, gradients = [rank * len(labels) // size for rank in range(size + 1)], []
        for begin, end in pairwise(ends):
            loss = F.cross_entropy(model(images[begin:end]), labels[begin:end]) * ((end - begin) * size / len(labels))
            gradients.append([each * (1 / size) for each in torch.autograd.grad(loss, [*model.parameters()])])
        for parameter, *shares in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(shares[1:], start=shares[0])
        optimizer.step()
    return parameters_to_vector(model.parameters()).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--join", help="join the running ranks at this place")
    parser.add_argument("--backend", help="ignored: only groups of dist_prims can be repaired")
    arguments = parser.parse_args()
    if arguments.join:
        dist_prims.join(arguments.join)
        train(arguments.join)
        dist.destroy_process_group()
        return
    if next((os.environ[name] for name in RANK_OF_LAUNCHER if name in os.environ), "0") == "0":
        with tempfile.TemporaryDirectory() as folder:
            place = f"file://{folder}/place"
            found = dist_prims.spawn(train, RANKS, (place,), backend="dist_prims", timeout=100, min_ranks=RANKS - 1)
        (sizes, weights), *_ = (each for each in found if each)
        assert weights == dist_prims.spawn(reference, 1, (sizes,))[0], "the parameters differ from those of one process"
        print(f"{sizes.count(3)} steps on 3 ranks, {sizes.count(2)} on 2, with the bits of one process: {sizes}")


if __name__ == "__main__":
    main()
