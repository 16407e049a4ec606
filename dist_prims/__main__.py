"""``python -m dist_prims``: show, prove and list algorithms; ``doctor`` tells what is here."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from typing import Any

from .schedules import COLLECTIVES, ScheduleError, algorithms, build, lookup
from .schedules.catalogue import markdown_table, text_table
from .schedules.contract import ROOTED
from .schedules.draw import terminal

_SIZES = (*range(1, 34), 64)
_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "scan")


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except ValueError as error:  # a name or number that cannot be: one line says it all
        print(f"dist_prims: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="the steps of an algorithm")
    show.add_argument("collective", choices=COLLECTIVES)
    show.add_argument("algorithm")
    show.add_argument("--size", type=int, default=4, help="number of ranks (4)")
    show.add_argument("--root", type=int)
    show.add_argument("--svg", metavar="FILE", help="write the picture, too")
    show.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter, e.g. hosts=2,2")
    show.set_defaults(run=_show)
    prove = commands.add_parser("prove", help="verify every algorithm, or those that a file registers")
    prove.add_argument("file", nargs="?", metavar="FILE.py")
    prove.set_defaults(run=_prove)
    table = commands.add_parser("algorithms", help="a table of what is registered")
    table.add_argument("collective", nargs="?", choices=COLLECTIVES)
    table.add_argument("--markdown", action="store_true")
    table.set_defaults(run=_list)
    doctor = commands.add_parser("doctor", help="launcher, ranks, hosts, engines, cores, memory")
    doctor.set_defaults(run=_doctor)
    return parser


def _show(given: argparse.Namespace) -> int:
    parameters = dict(_parameter(text) for text in given.p)
    root = {"root": given.root or 0} if given.collective in ROOTED else {}
    schedule = build(given.collective, given.algorithm, given.size, **root, **parameters)
    print(terminal(schedule))
    sent = [schedule.bytes_sent(rank) for rank in range(schedule.size)]
    print(f"\nsent       {' '.join(f'{float(each):.3g}' for each in sent)}   (a rank; of the data)")
    if card := lookup(given.collective, given.algorithm).card:
        print(f"wins when  {card.wins}\nsource     {card.source}")
    if given.collective in _REDUCING:
        rank = schedule.root or (0 if given.collective != "scan" else schedule.size - 1)
        chunk = int(schedule.contract.end(rank).chunk[0])
        print(f"adds       {schedule.order(chunk, rank)}   (chunk {chunk} on rank {rank})")
    if given.svg:
        print(f"picture    {schedule.draw(given.svg)}")
    return 0


def _parameter(text: str) -> tuple[str, Any]:
    """``hosts=2,2`` and the like, as numbers where they are."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is no parameter; write name=value")
    values = [int(each) if each.lstrip("-").isdigit() else each for each in value.split(",")]
    return name, values[0] if len(values) == 1 else tuple(values)


def _prove(given: argparse.Namespace) -> int:
    before = {each: lookup(*each) for each in _registered()}
    if given.file:
        runpy.run_path(given.file, run_name="__dist_prims_prove__")
    chosen = [each for each in _registered() if not given.file or lookup(*each) is not before.get(each)]
    if not chosen:
        raise ValueError(f"{given.file} registers no algorithm; decorate a generator with @algorithm(collective, ...)")
    return max(_prove_one(collective, name) for collective, name in chosen)


def _registered() -> Iterator[tuple[str, str]]:
    return ((collective, name) for collective in COLLECTIVES for name in algorithms(collective))


def _prove_one(collective: str, name: str) -> int:
    proved = 0
    for size in _SIZES:
        roots = [{"root": root} for root in {0, size // 2, size - 1}] if collective in ROOTED else [{}]
        for root in roots:
            try:
                build(collective, name, size, **root).verify()
            except ScheduleError as error:
                where = "".join(f", {key} {value}" for key, value in root.items())
                print(f"✗ {collective} {name}, {size} ranks{where}: {error}")
                return 1
        proved += len(roots)
    print(f"✓ {collective} {name}: {proved} schedules of {_SIZES[0]} to {_SIZES[-1]} ranks", flush=True)
    return 0


def _list(given: argparse.Namespace) -> int:
    print(markdown_table() if given.markdown else text_table(given.collective))
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from .launch.doctor import report  # it alone needs torch

    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
