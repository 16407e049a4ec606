"""``recommend``: the fastest algorithm for hosts joined by links, and the reasons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..schedules.piggyback import added_seconds, fits
from ..schedules.recommend import MUCH_SHORTER, PERSONALIZED, recommend
from ..schedules.recommendation_report import describe_answer, describe_question
from ..schedules.topology import Level, Topology
from ..units import format_duration, parse_bytes, parse_duration, parse_link_speed

__all__: list[str] = []

_LINKS = {"link": "25G", "latency": "10us", "inner_link": "80G", "inner_latency": "1us"}  # the defaults
_GAMMA = 1e-10  # seconds a byte reduced
_WITHOUT_CHOICE = ("barrier", "scan", "exclusive_scan")  # the backend chooses no schedule for them


def add(commands: Any) -> None:
    parser = commands.add_parser("recommend", help="which algorithm to use on hosts joined by links, and why")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="number of hosts (1)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of each host (8)")
    parser.add_argument("--bytes", default="100M", metavar="SIZE", help="of the data: 512, 16K, 100M, 2G (100M)")
    parser.add_argument("--collective", default="all_reduce", metavar="NAME", help="a collective (all_reduce)")
    parser.add_argument("--link", metavar="SPEED", help="of a host, in bits a second (25G)")
    parser.add_argument("--latency", metavar="TIME", help="of a message between hosts (10us)")
    parser.add_argument("--inner-link", metavar="SPEED", help="of a rank within its host, in bits a second (80G)")
    parser.add_argument("--inner-latency", metavar="TIME", help="of a message within a host (1us)")
    parser.add_argument(
        "--calibration", metavar="FILE", help="a file written by `bench calibrate`, instead of these four"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.hosts < 1 or args.ranks < 1:
        raise ValueError(f"--hosts {args.hosts} --ranks {args.ranks}: both must be at least 1")
    count = parse_bytes(args.bytes)
    topology, source = _topology(args)
    found = recommend(args.collective, count, topology)
    print(f"{describe_question(args.collective, count, topology, source)}\n\n{describe_answer(found)}")
    print(_how_to_run(args.collective, args.hosts, found.candidates[0].schedule.algorithm))
    if args.hosts > 1 and args.collective not in _WITHOUT_CHOICE and fits(args.collective, count, topology):
        print(_with_agreement(added_seconds(args.collective, count, topology), found.candidates[0].seconds))
    return 0


def _with_agreement(added: float, best: float) -> str:
    """A sentence on data that the backend sends in the messages by which the ranks agree on the call."""
    adds = f"The data adds {format_duration(added)} to the messages by which the ranks agree on the call"
    return f"{adds}, so the backend {'sends it in them and needs no schedule' if added < best else 'uses a schedule'}."


def _how_to_run(collective: str, hosts: int, algorithm: str) -> str:
    """A sentence that says whether the backend uses the recommendation automatically."""
    if hosts > 1 and collective not in _WITHOUT_CHOICE:
        figures = "from the file that `bench calibrate` writes, or else of the link as measured when a group is made"
        choice = f"The backend dist_prims chooses by the same prices, {figures}"
        shorter = f"unless another algorithm takes {MUCH_SHORTER} of that time"
        return f"{choice}{f', but sends each block straight to its receiver {shorter}' * (collective in PERSONALIZED)}."
    by_hand = f"dist_prims.{collective}(..., algorithm={algorithm!r}) uses this algorithm on any backend"
    if collective in _WITHOUT_CHOICE:
        return f"The backend dist_prims uses no schedule for {collective}; {by_hand.replace('exclusive_', '')}."
    return f"The backend dist_prims uses no schedule here: it works in shared memory on one host; {by_hand}."


def _topology(args: argparse.Namespace) -> tuple[Topology, str]:
    """The topology with links as given, measured or assumed, and a text that says which."""
    hosts = (args.ranks,) * args.hosts
    asked = {name: value for name in _LINKS if (value := getattr(args, name)) is not None}
    if args.calibration:
        if asked:
            raise ValueError(f"--calibration and --{next(iter(asked)).replace('_', '-')}: one or the other")
        try:
            return Topology.measured(hosts, json.loads(Path(args.calibration).read_text())), args.calibration
        except ValueError as error:
            raise ValueError(f"{args.calibration}: {error}") from None
    links = {**_LINKS, **asked}
    inner = Level(parse_duration(links["inner_latency"]), parse_link_speed(links["inner_link"]))
    outer = Level(parse_duration(links["latency"]), parse_link_speed(links["link"]))
    assumed = ", ".join(name.replace("_", " ") for name in _LINKS if name not in asked)
    return Topology(hosts, inner, outer, _GAMMA), f"assumed: {', '.join(filter(None, [assumed, 'reducing']))}"
