"""``pipeline``: the plan of a pipeline as a chart, with its bubble and memory."""

from __future__ import annotations

import argparse
from typing import Any

from ..schedules.pipelines import markdown_table, pipeline_plan
from ..schedules.pipelines import show as show_pipeline

__all__: list[str] = []


def add(commands: Any) -> None:
    pipeline = commands.add_parser("pipeline", help="the plan of a pipeline: chart, bubble and memory")
    pipeline.add_argument("name", nargs="?", metavar="NAME", help="a schedule; default: print a table of all schedules")
    pipeline.add_argument("--ranks", type=int, default=4, metavar="N", help="(4)")
    pipeline.add_argument("--microbatches", type=int, default=8, metavar="N", help="micro-batches (8)")
    pipeline.add_argument(
        "--stages-a-rank", type=int, metavar="N", help="default: the number that the schedule is made for"
    )
    pipeline.add_argument("--svg", metavar="FILE", help="also write the chart")
    pipeline.add_argument("--html", metavar="FILE", help="also write an interactive page")
    pipeline.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        print(markdown_table())
        return 0
    print(show_pipeline(args.name, args.ranks, args.microbatches, args.stages_a_rank))
    plan = pipeline_plan(args.name, args.ranks, args.microbatches, args.stages_a_rank)
    if args.svg:
        print(f"picture  {plan.draw(args.svg)}")
    if args.html:
        print(f"page     {plan.html(args.html)}")
    return 0
