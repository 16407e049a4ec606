"""Results as a table in the layout of nccl-tests, as JSON, and as a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from .._chart import line_chart
from .cases import CASES
from .measure import Line

__all__ = ["environment", "heading", "plot", "row", "write_json"]

_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("algorithm", "", 22),
    ("time", "(us)", 12),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("ratio", "", 7),
)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "dist_prims": __version__,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "cores": len(os.sched_getaffinity(0)),
    }


def heading(collective: str) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in environment().items())
    names = "".join(name.rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    ratio = f"# ratio: time by that of {dist.get_backend()}'s own, median"
    return f"# {collective}: {facts}\n{ratio}\n#{names[1:]}\n#{units[1:]}"


def row(line: Line) -> str:
    bus = CASES[line.collective].bus(dist.get_world_size())
    cells = (
        line.nbytes,
        line.count,
        line.dtype,
        line.op,
        line.contender,
        f"{line.median * 1e6:.1f}",
        f"{line.bandwidth():.2f}",
        f"{line.bandwidth(bus):.2f}",
        line.wrong,
        f"{line.ratio:.2f}",
    )
    return "".join(str(cell).rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))


def write_json(path: Path, lines: Iterable[Line]) -> None:
    """Every time that was taken, so that a plot can be made again."""
    path.write_text(json.dumps({"environment": environment(), "lines": [line.as_dict() for line in lines]}, indent=1))


def plot(path: Path, lines: list[Line]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        series.setdefault(line.contender, []).append((float(line.nbytes), line.median * 1e6))
    facts = environment()
    title = f"{lines[0].collective}, {facts['ranks']} ranks on {facts['cores']} cores over {facts['backend']}"
    line_chart(path, title, "bytes", "microseconds, median", series, log_x=True, log_y=True)
