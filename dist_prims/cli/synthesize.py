"""``synthesize``: a schedule for a topology that is a graph, found, proved, priced and saved."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..schedules import Graph, synthesize
from ..units import format_bytes, format_duration, parse_bytes

__all__: list[str] = []


def add(commands: Any) -> None:
    parser = commands.add_parser("synthesize", help="find a schedule for a graph of ranks, switches and links")
    parser.add_argument("topology", metavar="FILE.json", help="the graph, as Graph.save writes it")
    parser.add_argument("--collective", default="all_reduce", metavar="NAME", help="a collective (all_reduce)")
    parser.add_argument("--bytes", default="16M", metavar="SIZE", help="of the data: 512, 16K, 100M, 2G (16M)")
    parser.add_argument(
        "--chunks", type=int, metavar="N", help="the most chunks of a rank, or of a block (16; broadcast 64)"
    )
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="of the search (120)")
    parser.add_argument("--root", type=int, default=0, metavar="R", help="of a broadcast (0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")
    parser.add_argument("--save", metavar="FILE", help="write the schedule, for Schedule.load")
    parser.add_argument("--draw", metavar="FILE.svg", help="draw how long each link works")
    parser.set_defaults(run=run)


def _progress(elapsed: float, candidate: Any) -> None:
    size = f"{candidate.schedule.chunks} chunks, {len(candidate.schedule.steps)} steps"
    print(f"{elapsed:7.1f} s   {size}: {format_duration(candidate.seconds)}", file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    graph, nbytes = Graph.load(args.topology), parse_bytes(args.bytes)
    options = args.chunks, args.root, args.seed, args.seconds
    result = synthesize(graph, args.collective, nbytes, *options, progress=_progress)
    print(f"{args.collective} of {format_bytes(nbytes)}: {graph.ranks} ranks, {len(graph.links)} links")
    bound = result.bound
    library = "scipy" if args.collective == "all_to_all" else "networkx"
    unknown = f"unknown: pip install {library}, or a longer --seconds"
    print(f"bound       {unknown if bound is None else format_duration(bound)}")
    if result.halves:
        print(f"halves      {format_duration(result.halves)}, the bounds of reduce_scatter and all_gather together")
    has_found = result.found is not result.registered
    for title, priced in (("registered", result.registered), ("found", result.found))[: 1 + has_found]:
        times = f", {priced.seconds / bound:.2f} times the bound" if bound else ""
        print(f"{title:<12}{priced.name}: {format_duration(priced.seconds)}{times}")
    steps, chunks = len(result.found.schedule.steps), result.found.schedule.chunks
    print(f"            {steps} steps, {chunks} chunks; proved, after {result.elapsed:.1f} s")
    if result.is_cut_short:
        when = "before all candidates were tried" if has_found else "before the first schedule was found"
        print(f"limit       --seconds {args.seconds:g} ended the search {when}")
    is_found = result.best is not result.registered
    print(f"Use {'the schedule found' if is_found else f'{result.best.name}: nothing found is faster'}.")
    if args.save:
        print(f"saved       {result.schedule.save(args.save)}")
    if args.draw:
        print(f"drawn       {result.schedule.draw(args.draw, topology=graph)}")
    return 0
