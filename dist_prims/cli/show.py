"""``show``: the steps of an algorithm, its contract and its cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleError, build, lookup
from ..schedules.catalogue import SYMBOLS, text_table
from ..schedules.cost import chunks_sent
from ..schedules.cost_card import Card
from ..schedules.draw import caption, describe_contract, numbers, terminal
from ..schedules.proof import error_of
from ..schedules.trust import MOST_RANKS
from .registered import in_line, registered_by

__all__: list[str] = []

_READABLE = 64  # the most ranks whose sum is printed
_ADDING = ("all_reduce", "reduce_scatter", "reduce", "scan", "exclusive_scan")


def add(commands: Any) -> None:
    show = commands.add_parser("show", help="the steps of an algorithm, its contract and its cost")
    show.add_argument(
        "collective",
        nargs="?",
        metavar="COLLECTIVE|FILE",
        help="a collective, FILE.py that registers algorithms, or a schedule, FILE.json or FILE.xml; "
        "default: print a table of all algorithms",
    )
    show.add_argument("algorithm", metavar="ALGORITHM", nargs="?", help="default: print a table of them")
    show.add_argument("parameters", nargs="*", metavar="name=value", help="of the algorithm, e.g. hosts=2,2")
    show.add_argument("--size", type=int, metavar="N", help="number of ranks (4)")
    show.add_argument("--root", type=int, metavar="R", help="the root of a rooted collective (0)")
    show.add_argument("--svg", metavar="FILE", help="also write the picture")
    show.add_argument("--animate", metavar="FILE", help="also write a picture whose steps appear one after the other")
    show.add_argument("--html", metavar="FILE", help="also write an interactive page")
    show.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.collective and args.collective.endswith((".json", ".xml")):
        return _show_file(args)
    collective, algorithm, parameters = _named(args)
    if algorithm is None:
        print(f"{text_table(collective)}\n\n{SYMBOLS}")
        return 0
    root = {} if args.root is None else {"root": args.root}
    assert collective is not None
    schedule = build(collective, algorithm, 4 if args.size is None else args.size, **root, **parameters)
    if _is_file(args) and (unusable := _unusable(args.collective, schedule)):
        print(f"✗ {unusable}")
        return 1
    return _show(args, schedule, lookup(collective, algorithm).card)


def _show_file(args: argparse.Namespace) -> int:
    """Show the schedule of a file; it has no card, even if an algorithm has its name."""
    if args.algorithm:
        raise ValueError(f"show {args.collective} {args.algorithm}: the file has one schedule; omit the algorithm")
    if (args.size, args.root) != (None, None):
        raise ValueError(f"show {args.collective}: the file has its size and its root; omit --size and --root")
    try:
        return _show(args, Schedule.load(args.collective), card=None)
    except ScheduleError as error:
        print(f"✗ {args.collective}: {error}")
        return 1


def _show(args: argparse.Namespace, schedule: Schedule, card: Card | None) -> int:
    if args.html:  # first, because the page of a wrong schedule shows its error
        print(f"page     {schedule.html(args.html)}")
    print(f"{_steps(schedule)}\n")
    error = error_of(schedule) if schedule.size <= MOST_RANKS else None
    for name, value in describe_contract(schedule) if error else _facts(schedule, card):
        print(f"{'must end' if error and name == 'ends' else name.ljust(8)} {value}")
    if args.svg:
        print(f"picture  {schedule.draw(args.svg)}")
    if args.animate:
        print(f"picture  {schedule.draw(args.animate, animate=True)}")
    if error:
        print(f"✗ {error}\n  For a page that opens at the wrong step, add --html wrong.html")
    return int(bool(error))


def _unusable(file: str, schedule: Schedule) -> str | None:
    """Why the generator of a file yields no steps that could be shown."""
    try:
        len(schedule.steps)
    except ScheduleError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return in_line(file, error)
    return None


def _is_file(args: argparse.Namespace) -> bool:
    return bool(args.collective and args.collective.endswith(".py"))


def _named(args: argparse.Namespace) -> tuple[str | None, str | None, dict[str, Any]]:
    """Collective, algorithm and parameters, from the registry or from a file that registers algorithms."""
    words = [args.algorithm, *args.parameters] if args.algorithm else []
    algorithm = words.pop(0) if words and "=" not in words[0] else None
    parameters = dict(map(_parameter, words))
    if not _is_file(args):
        return args.collective, algorithm, parameters
    registered = registered_by(args.collective)
    found = [each for each in registered if algorithm in (None, each[1])]
    if len(found) != 1:
        names = ", ".join(name for _, name in registered)
        raise ValueError(f"{args.collective} registers {names}; name one of them: show {args.collective} ALGORITHM")
    return *found[0], parameters


def _parameter(text: str) -> tuple[str, Any]:
    """Parse ``name=value``, for example ``hosts=2,2``; integers become numbers, lists become tuples."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not a parameter; write name=value")
    if name in ("collective", "algorithm", "size"):
        raise ValueError(f"{text!r} is not a parameter of an algorithm; write show COLLECTIVE ALGORITHM --size N")
    values = [int(each) if each.lstrip("-").isdigit() else each for each in value.split(",")]
    return name, values[0] if len(values) == 1 else tuple(values)


def _steps(schedule: Schedule) -> str:
    try:
        return terminal(schedule)
    except ValueError as too_large:  # contract and cost are printed anyway
        return f"{caption(schedule)}\n{too_large}"


def _facts(schedule: Schedule, card: Card | None) -> Iterator[tuple[str, str]]:
    yield from describe_contract(schedule)
    yield "steps", f"{len(schedule.steps)}{f' = {card.steps}' if card and not schedule.parameters else ''}"
    yield "sent", f"{_sent(schedule)}{f'; at most {card.sent}' if card and not schedule.parameters else ''}"
    if schedule.size > MOST_RANKS:
        yield "proof", f"not made for more than {MOST_RANKS} ranks"
    if card:
        yield "wins", card.wins
        yield "source", card.source
    if schedule.collective in _ADDING and schedule.size <= _READABLE:
        rank = schedule.size - 1 if "scan" in schedule.collective else schedule.root or 0
        if 0 in schedule.contract.end(rank).chunk:
            yield "adds", f"chunk 0 on rank {rank}: {schedule.order(0, rank)}"


def _sent(schedule: Schedule) -> str:
    """The fraction of the data that each rank sends; ranks that send the same are grouped."""
    chunks = chunks_sent(schedule)
    by_count = {count: np.flatnonzero(chunks == count).tolist() for count in dict.fromkeys(chunks.tolist())}
    if len(by_count) == 1:
        return f"{int(chunks[0]) * schedule.share} of the data by every rank"
    groups = [
        f"{count * schedule.share} by rank{'s' * (len(ranks) > 1)} {numbers(ranks)}"
        for count, ranks in by_count.items()
    ]
    return f"of the data: {'; '.join(groups)}"
