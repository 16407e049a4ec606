"""Console output of programs with many ranks: rank 0 prints, and a check holds only if it holds on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .collectives import all_reduce

__all__: list[str] = []


class Console:
    """Output of rank 0, and the counts of checks that held and failed."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.held = self.failed = 0

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n{'─' * len(text)}")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; the first column is aligned left, the others, usually numbers, right."""
        lines = [[str(cell) for cell in row] for row in (headings, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            first, *others = (
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.say(("  " + "   ".join([first, *others])).rstrip())

    def progress(self, text: str, last: bool) -> None:
        """Print progress: on a terminal the line overwrites itself, otherwise each call prints a line."""
        if self.rank == 0 and sys.stdout.isatty():
            print(f"\r\033[K{text}", end="\n" if last else "", flush=True)
        else:
            self.say(text)

    def check(self, holds: bool, claim: str) -> None:
        """Count and print a check, which holds only if it holds on every rank. Every rank must call it."""
        bad = torch.zeros(dist.get_world_size(), dtype=torch.int32)
        bad[self.rank] = not holds
        all_reduce(bad)
        ranks = [rank for rank, count in enumerate(bad.tolist()) if count]
        self.held += not ranks
        self.failed += bool(ranks)
        self.say(f"  ✗ {claim}: not on ranks {ranks}" if ranks else f"  ✓ {claim}")
