"""The program of tests/training/test_elastic.py: the training of examples/elastic.py, with a pause in each step.

Rank 0 writes step and number of ranks of each step to ``log.jsonl``, and at the end the parameters to ``weights.pt``.
The pauses end when a file ``hurry`` exists. All are in the directory that is the argument.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from elastic import train

import dist_prims


def main() -> None:
    folder, last, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist_prims.init("dist_prims", timeout=60)

    def before(step: int) -> None:
        time.sleep(0 if (folder / "hurry").exists() else 0.25)
        if dist.get_rank() == 0:
            with (folder / "log.jsonl").open("a") as log:
                print(json.dumps({"step": step, "ranks": dist.get_world_size()}), file=log)

    weights = train(folder / "c", last, every, before=before)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")


if __name__ == "__main__":
    main()
