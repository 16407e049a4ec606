"""A ring all-reduce of a small vector: its schedule step by step, printed by rank 0, then a real run on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._console import Console
from ..collectives import all_reduce
from ..schedules import build
from ..schedules.schedule import Schedule
from ..schedules.simulate import states

__all__: list[str] = []

_FEW = 6  # ranks that fit on a screen


def show_ring(console: Console) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    console.title(f"Ring all-reduce of {size} numbers on {size} ranks")
    ring = build("all_reduce", "ring", size)
    vectors = [[10**other * (chunk + 1) for chunk in range(size)] for other in range(size)]
    if size <= _FEW:
        _show(console, ring, vectors)
        console.say(f"  chunk 0 is {ring.order(0)} on every rank: the same order, so the same bits\n")
    tensor = torch.tensor(vectors[rank])
    all_reduce(tensor, algorithm="ring")
    sums = [sum(vector[chunk] for vector in vectors) for chunk in range(size)]
    console.check(tensor.tolist() == sums, f"after a real run every rank holds {' '.join(map(str, sums[:_FEW]))}")


def _show(console: Console, ring: Schedule, vectors: list[list[int]]) -> None:
    """Print the chunks of each rank after each step; ``+`` marks an addition in that step, ``=`` a copy."""
    size = ring.size
    width = max(len(str(sum(column))) for column in zip(*vectors, strict=True)) + 2
    console.say(" " * 9 + "".join(f"rank {rank}".center(size * width) + "  " for rank in range(size)))

    def line(name: str, rows: list[list[int]], marks: dict[tuple[int, int], str]) -> None:
        cells = (
            "".join(f"{marks.get((rank, chunk), '')}{number}".rjust(width) for chunk, number in enumerate(row))
            for rank, row in enumerate(rows)
        )
        console.say(f"  {name:<7}" + "  ".join(cells))

    line("start", vectors, {})
    for number, (step, held) in enumerate(states(ring, vectors), start=1):
        marks = {(dst, into): "+" if reduce else "=" for _, dst, _, into, reduce in step.rows()}
        line(f"step {number}", [[int(row[chunk]) for chunk in range(size)] for row in held], marks)
    console.say("")
