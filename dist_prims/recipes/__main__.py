"""``python -m dist_prims.recipes``: list the recipes, or run one or all, with or without a launcher."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time

import torch
import torch.distributed as dist

from .._console import Console
from ..launch import detect, init, spawn
from ..schedules.registry import nearest
from . import names, recipe, summary

_SECONDS = 300.0  # time limit of each recipe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.recipes", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", help="a recipe, or 'all'")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks to start without a launcher (2)")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group (dist_prims)")
    given = parser.parse_args()
    if given.name is None:
        width = max(map(len, names()))
        print("\n".join(f"{name:{width}}   {summary(name)}" for name in names()))
        return 0
    if given.name not in ("all", *names()):
        parser.error(f"unknown recipe {given.name!r}; known: {', '.join(names())}, and 'all'")
    if given.backend not in dist.Backend.backend_list:
        parser.error(f"--backend: {nearest('backend', given.backend, dist.Backend.backend_list)}")
    if given.ranks < 1:
        parser.error(f"--ranks {given.ranks}: at least 1")
    chosen = names() if given.name == "all" else [given.name]
    importlib.import_module("torch._dynamo")  # once, before the fork; an optimizer would import it on every rank
    if detect().size != 1:
        init(given.backend, timeout=_SECONDS)
        return run_recipes(chosen)
    return int(
        max(
            spawn(
                run_recipes, given.ranks, (chosen,), backend=given.backend, timeout=_SECONDS * len(chosen), prefix=False
            )
        )
    )


def run_recipes(chosen: list[str]) -> int:
    """Run the recipes one after another on every rank of the group; returns 0 if all checks held."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    console = Console()
    times = []
    for name in chosen:
        torch.manual_seed(0)
        failed, began = console.failed, time.monotonic()
        console.title(f"{name}: {summary(name)}")
        recipe(name)(console)
        times.append((name, f"{time.monotonic() - began:.1f} s", "FAILED" if console.failed > failed else "held"))
    if len(chosen) > 1:
        console.title("All recipes")
        console.table(("recipe", "time", "checks"), times)
    all_held = not console.failed
    verdict = f"All {console.held}" if all_held else f"{console.failed} of {console.held + console.failed}"
    console.say(f"\n{verdict} checks {'held' if all_held else 'FAILED'}")
    return int(not all_held)


if __name__ == "__main__":
    sys.exit(main())
