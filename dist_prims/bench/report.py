"""Report of the results: a table in the layout of nccl-tests, JSON, and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from .._chart import line_chart
from ..launch import init
from ..schedules.contract import ROOTED
from .cases import CASES
from .measure import Line

__all__: list[str] = []

_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("root", "", 6),
    ("contender", "", 22),
    ("time", "(us)", 12),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("", "", 9),  # the ratio; its heading names the backend and is known at run time
)


def environment() -> dict[str, Any]:
    """The environment that the figures depend on. Every rank must call it."""
    return {
        "dist_prims": __version__,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "hosts": len(init().hosts),
        "backend": dist.get_backend(),
        "cores": len(os.sched_getaffinity(0)),
    }


def heading(collective: str, facts: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {value}" for name, value in facts.items())
    own = f"vs {facts['backend']}"
    names = "".join((name or own).rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    ratio = f"# {own}: time divided by the time of {facts['backend']}; the median of the ratios of each iteration"
    return f"# {collective}: {values}\n{ratio}\n#{names[1:]}\n#{units[1:]}"


def row(line: Line) -> str:
    bus = CASES[line.collective].bus(dist.get_world_size())
    cells = (
        line.nbytes,
        line.count,
        line.dtype,
        line.op,
        0 if line.collective in ROOTED else -1,
        line.contender,
        f"{line.median * 1e6:.1f}",
        f"{line.bandwidth():.2f}",
        f"{line.bandwidth(bus):.2f}",
        line.wrong,
        f"{line.ratio:.2f}",
    )
    return "".join(str(cell).rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))


def write_json(path: Path, facts: Mapping[str, Any], **results: Iterable[Any]) -> None:
    """Write every measured time, so that plots can be made later. ``results``: lists of objects with ``as_dict()``."""
    lists = {name: [each.as_dict() for each in results_] for name, results_ in results.items()}
    path.write_text(json.dumps({"environment": facts, **lists}, indent=1))


def plot(path: Path, facts: Mapping[str, Any], lines: list[Line]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        series.setdefault(line.contender, []).append((float(line.nbytes), line.median * 1e6))
    title = f"{lines[0].collective}, {facts['ranks']} ranks on {facts['cores']} cores over {facts['backend']}"
    line_chart(path, title, "bytes", "microseconds, median", series, log_x=True, log_y=True)
