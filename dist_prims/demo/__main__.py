"""``python -m dist_prims.demo``: run the demo on the ranks of mpirun, torchrun or srun, or on 4 ranks of its own."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from .._chart import line_chart
from .._console import Console
from .._output import replace_unencodable
from ..launch import detect, init, spawn
from ..schedules import build
from .check import check_algorithms
from .pipeline import train_pipeline
from .ring import show_ring
from .train import train_digits

_RANKS_ALONE = 4
_SECONDS = 300.0  # time limit of the whole demo


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo_pictures"), help="folder for the pictures")
    out = parser.parse_args().out
    replace_unencodable()
    if detect().size != 1:
        init(timeout=_SECONDS)
        return demo(out)
    print(f"dist_prims: no launcher, so the demo starts {_RANKS_ALONE} ranks of its own", flush=True)
    return int(max(spawn(demo, _RANKS_ALONE, (out,), timeout=_SECONDS, prefix=False)))


def demo(out: Path) -> int:
    """Run the demo on every rank of the group; returns 0 if every check held."""
    began = time.monotonic()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    console = Console()
    show_ring(console)
    check_algorithms(console)
    losses = train_digits(console)
    if console.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    pictures = train_pipeline(console, out)
    if console.rank == 0:
        pictures = [
            build("all_reduce", "ring", min(dist.get_world_size(), 8)).draw(out / "ring.svg"),
            line_chart(out / "loss.svg", "Loss of the digits", "step", "cross entropy", losses),
            *pictures,
        ]
        console.say(f"\nPictures: {', '.join(map(str, pictures))}")
    count = f"{console.failed} of {console.held + console.failed}" if console.failed else f"All {console.held}"
    console.say(f"{count} checks {'FAILED' if console.failed else 'held'}, {time.monotonic() - began:.0f} s")
    return 1 if console.failed else 0


if __name__ == "__main__":
    sys.exit(main())
