"""``prove``: verify the registered algorithms and pipelines, or the algorithms or the schedule of a file."""

from __future__ import annotations

import argparse
import traceback
from typing import Any

from ..schedules import Schedule, ScheduleError, build
from ..schedules.contract import ROOTED
from ..schedules.draw import numbers
from ..schedules.pipelines import pipeline_plan, pipeline_plans
from .registered import registered, registered_by

__all__: list[str] = []

_SIZES = (*range(1, 34), 64)
_COUNTS = (*range(1, 13),)  # of ranks and of micro-batches, for pipelines


def add(commands: Any) -> None:
    prove = commands.add_parser("prove", help="verify every algorithm, or what a file contains")
    prove.add_argument(
        "file", nargs="?", metavar="FILE", help="FILE.py registers algorithms; FILE.json and FILE.xml are schedules"
    )
    prove.add_argument("--sizes", metavar="LIST", help="e.g. 1-8 or 2,4,8 (1-33, and 64 for all algorithms)")
    prove.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.file and args.file.endswith((".json", ".xml")):
        return _prove_file(args.file)
    sizes = _sizes(args.sizes) if args.sizes else _SIZES[:-1] if args.file else _SIZES
    chosen = registered_by(args.file) if args.file else list(registered())
    pipelines = [] if args.file else pipeline_plans()
    return max(
        [_prove_one(collective, name, sizes) for collective, name in chosen]
        + [_prove_pipeline(name) for name in pipelines]
    )


def _prove_file(path: str) -> int:
    try:
        schedule = Schedule.load(path)
    except ScheduleError as error:
        print(f"✗ {path}: {error}")
        return 1
    name, same_bits = schedule.algorithm, schedule.contract.same_bits
    size = f"{schedule.size} ranks, {schedule.chunks} chunks, {len(schedule.steps)} steps"
    print(f"✓ {path}: {schedule.collective} {name}, {size}{'' if same_bits else '; the last bits may differ by rank'}")
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    """Parse ``1-4,8`` to (1, 2, 3, 4, 8)."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first) or int(first) < 1:
            raise ValueError(f"--sizes {text}: {part!r} is not a number of ranks; write for example 1-8 or 2,4,8")
        sizes += range(int(first), int(last or first) + 1)
    return tuple(sizes)


def _prove_one(collective: str, name: str, sizes: tuple[int, ...]) -> int:
    proved = 0
    for size in sizes:
        roots = [{"root": root} for root in sorted({0, size // 2, size - 1})] if collective in ROOTED else [{}]
        for root in roots:
            try:
                schedule = build(collective, name, size, **root)
                len(schedule.steps)  # finds a loop without end before the proof, which takes longer a step
                schedule.verify()
            except (Exception, SystemExit) as error:
                where = "".join(f", {key} {value}" for key, value in root.items())
                print(f"✗ {collective} {name}, size {size}{where}: {type(error).__name__}: {error}", flush=True)
                if not isinstance(error, ValueError | SystemExit):  # of the generator: the traceback shows the line
                    traceback.print_exception(error)
                    return 1
                print(f"  for a page that opens at the wrong step, show it with --size {size} --html wrong.html")
                return 1
        proved += len(roots)
    print(f"✓ {collective} {name}: {proved} schedules, sizes {numbers(sizes)}", flush=True)
    return 0


def _prove_pipeline(name: str) -> int:
    for ranks in _COUNTS:
        for num_microbatches in _COUNTS:
            pipeline_plan(name, ranks, num_microbatches).verify()
    print(f"✓ pipeline {name}: {len(_COUNTS) ** 2} plans, ranks and micro-batches {numbers(_COUNTS)}", flush=True)
    return 0
