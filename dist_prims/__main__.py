"""``python -m dist_prims``: show, prove, list and recommend algorithms; ``doctor`` tells what is here.

A plan can be looked at before anything runs it: so all but ``doctor`` do without torch and answer at once.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .schedules import COLLECTIVES, Schedule, advice, algorithms, build, lookup
from .schedules.catalogue import LETTERS, markdown_table, text_table
from .schedules.contract import ROOTED
from .schedules.draw import caption, numbers, promise, terminal
from .schedules.native import FOLLOWED
from .schedules.pipelines import markdown_table as pipeline_table
from .schedules.pipelines import pipeline_plan, pipeline_plans
from .schedules.pipelines import show as show_pipeline
from .schedules.recommend import recommend
from .schedules.topology import Level, Topology

_SIZES = (*range(1, 34), 64)
_PIPELINES = (*range(1, 13),)
_LINKS = {"link": "25G", "latency": "10us", "inner_link": "80G", "inner_latency": "1us"}  # plan, where nothing is said
_GAMMA = 1e-10  # seconds a byte reduced
_READABLE = 64  # ranks whose sum is still worth writing out
_ADDING = ("all_reduce", "reduce_scatter", "reduce", "scan", "exclusive_scan")


def main(arguments: list[str] | None = None) -> int:
    given = _parse(arguments)
    try:
        return int(given.run(given))
    except (ValueError, OSError) as error:  # a name, number or file that cannot be: one line says it all
        print(f"dist_prims: {error}", file=sys.stderr)
        return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    given, more = parser.parse_known_args(arguments)
    if more and (given.run is not _show or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if given.run is _show:  # argparse leaves the name=value that come after an option
        given.parameters += more
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims", description="Show, prove and list algorithms.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="the steps of an algorithm, what it promises and what it costs")
    show.add_argument(
        "collective", metavar="COLLECTIVE|FILE.py", help="a collective, or a file that registers algorithms"
    )
    show.add_argument("algorithm", metavar="ALGORITHM", nargs="?", help="unless given, a table of those that there are")
    show.add_argument("parameters", nargs="*", metavar="name=value", help="of the algorithm, e.g. hosts=2,2")
    show.add_argument("--size", type=int, default=4, metavar="N", help="number of ranks (4)")
    show.add_argument("--root", type=int, metavar="R", help="of a collective that has one (0)")
    show.add_argument("--svg", metavar="FILE", help="write the picture, too")
    show.set_defaults(run=_show)
    prove = commands.add_parser("prove", help="verify every algorithm, or those that a file registers")
    prove.add_argument("file", nargs="?", metavar="FILE.py")
    prove.add_argument("--sizes", metavar="LIST", help="e.g. 1-8 or 2,4,8 (1-33; of all algorithms 64, too)")
    prove.set_defaults(run=_prove)
    table = commands.add_parser("algorithms", help="a table of what is registered")
    table.add_argument("collective", nargs="?", metavar="COLLECTIVE")
    table.add_argument("--markdown", action="store_true")
    table.set_defaults(run=_list)
    _add_plan(commands)
    pipeline = commands.add_parser("pipeline", help="a pipeline's schedule: its chart, bubble and memory")
    pipeline.add_argument("name", nargs="?", metavar="NAME", help="unless given, a table of all")
    pipeline.add_argument("--ranks", type=int, default=4, metavar="N", help="(4)")
    pipeline.add_argument("--micros", type=int, default=8, metavar="N", help="micro-batches (8)")
    pipeline.add_argument("--stages-a-rank", type=int, metavar="N", help="unless given, what the schedule is for")
    pipeline.add_argument("--svg", metavar="FILE", help="write the chart, too")
    pipeline.set_defaults(run=_pipeline)
    tune = commands.add_parser("tune", help="measure once what is quicker on this machine, for the backend")
    tune.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    tune.set_defaults(run=_tune)
    doctor = commands.add_parser("doctor", help="launcher, ranks, hosts, engines, cores, memory")
    doctor.add_argument(
        "--dump", metavar="FOLDER", help="instead: which rank is behind, from what the ranks wrote there"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="which algorithm to take on hosts joined by links, and why")
    plan.add_argument("--hosts", type=int, default=1, metavar="N", help="number of hosts (1)")
    plan.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of each host (8)")
    plan.add_argument("--bytes", default="100M", metavar="SIZE", help="of the data: 512, 16K, 100M, 2G (100M)")
    plan.add_argument("--collective", default="all_reduce", metavar="NAME", help="(all_reduce)")
    plan.add_argument("--link", metavar="SPEED", help="of a host, in bits a second (25G)")
    plan.add_argument("--latency", metavar="TIME", help="of a message between hosts (10us)")
    plan.add_argument("--inner-link", metavar="SPEED", help="of a rank within its host, in bits a second (80G)")
    plan.add_argument("--inner-latency", metavar="TIME", help="of a message within a host (1us)")
    plan.add_argument("--calibration", metavar="FILE", help="what `bench calibrate` has measured, instead of all these")
    plan.set_defaults(run=_plan)


def _show(given: argparse.Namespace) -> int:
    collective, algorithm, parameters = _shown(given)
    if algorithm is None:
        print(f"{text_table(collective)}\n\n{LETTERS}")
        return 0
    root = {} if given.root is None else {"root": given.root}
    schedule = build(collective, algorithm, given.size, **root, **parameters)
    print(f"{_steps(schedule)}\n")
    for name, value in _facts(schedule):
        print(f"{name.ljust(9)}{value}")
    if given.svg:
        print(f"picture  {schedule.draw(given.svg)}")
    return 0


def _shown(given: argparse.Namespace) -> tuple[str, str | None, dict[str, Any]]:
    """Collective, algorithm and parameters: of the registry, or of what a file registers."""
    words = [given.algorithm, *given.parameters] if given.algorithm else []
    algorithm = words.pop(0) if words and "=" not in words[0] else None
    parameters = dict(map(_parameter, words))
    if not given.collective.endswith(".py"):
        return given.collective, algorithm, parameters
    registered = _registered_by(given.collective)
    found = [each for each in registered if algorithm in (None, each[1])]
    if len(found) != 1:
        names = ", ".join(name for _, name in registered)
        raise ValueError(f"{given.collective} registers {names}; name one of them: show {given.collective} ALGORITHM")
    return *found[0], parameters


def _parameter(text: str) -> tuple[str, Any]:
    """``hosts=2,2`` and the like, as numbers where they are."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is no parameter; write name=value")
    values = [int(each) if each.lstrip("-").isdigit() else each for each in value.split(",")]
    return name, values[0] if len(values) == 1 else tuple(values)


def _steps(schedule: Schedule) -> str:
    try:
        return terminal(schedule)
    except ValueError as too_big:  # what it promises and costs can be told all the same
        return f"{caption(schedule)}\n{too_big}"


def _facts(schedule: Schedule) -> Iterator[tuple[str, str]]:
    card = lookup(schedule.collective, schedule.algorithm).card
    yield from promise(schedule)
    yield "steps", f"{len(schedule.steps)}{f' = {card.steps}' if card and not schedule.parameters else ''}"
    yield "sent", f"{_sent(schedule)}{f'; at most {card.sent}' if card and not schedule.parameters else ''}"
    if card:
        yield "wins", card.wins
        yield "source", card.source
    if schedule.collective in _ADDING and schedule.size <= _READABLE:
        rank = schedule.size - 1 if "scan" in schedule.collective else schedule.root or 0
        if 0 in schedule.contract.end(rank).chunk:
            yield "adds", f"chunk 0 on rank {rank}: {schedule.order(0, rank)}"


def _sent(schedule: Schedule) -> str:
    """How much of the data each rank sends, ranks that send the same together."""
    rows = np.zeros(schedule.size, np.int64)
    for step in schedule.steps:
        rows += np.bincount(step.src[step.src != step.dst], minlength=schedule.size)
    alike = {count: np.flatnonzero(rows == count).tolist() for count in dict.fromkeys(rows.tolist())}
    if len(alike) == 1:
        return f"{int(rows[0]) * schedule.share} of the data by every rank"
    told = [
        f"{count * schedule.share} by rank{'s' * (len(ranks) > 1)} {numbers(ranks)}" for count, ranks in alike.items()
    ]
    return f"of the data: {'; '.join(told)}"


def _prove(given: argparse.Namespace) -> int:
    sizes = _sizes(given.sizes) if given.sizes else _SIZES[:-1] if given.file else _SIZES
    chosen = _registered_by(given.file) if given.file else list(_registered())
    pipelines = [] if given.file else pipeline_plans()
    return max(
        [_prove_one(collective, name, sizes) for collective, name in chosen]
        + [_prove_pipeline(name) for name in pipelines]
    )


def _sizes(text: str) -> tuple[int, ...]:
    """``1-4,8`` as (1, 2, 3, 4, 8)."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first) or int(first) < 1:
            raise ValueError(f"--sizes {text}: {part!r} is no number of ranks; write for example 1-8 or 2,4,8")
        sizes += range(int(first), int(last or first) + 1)
    return tuple(sizes)


def _registered() -> Iterator[tuple[str, str]]:
    return ((collective, name) for collective in COLLECTIVES for name in algorithms(collective))


def _registered_by(file: str) -> list[tuple[str, str]]:
    """The algorithms that a file registers when it is run."""
    before = {each: lookup(*each) for each in _registered()}
    try:
        runpy.run_path(file, run_name="__dist_prims_prove__")
    except OSError:
        raise
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
        where = f"{file}, line {lines[-1]}" if lines else file  # a syntax error names its line itself
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    found = [each for each in _registered() if lookup(*each) is not before.get(each)]
    if not found:
        raise ValueError(f"{file} registers no algorithm; decorate a generator with @algorithm(collective, ...)")
    return found


def _prove_one(collective: str, name: str, sizes: tuple[int, ...]) -> int:
    proved = 0
    for size in sizes:
        roots = [{"root": root} for root in sorted({0, size // 2, size - 1})] if collective in ROOTED else [{}]
        for root in roots:
            try:
                build(collective, name, size, **root).verify()
            except Exception as error:
                where = "".join(f", {key} {value}" for key, value in root.items())
                print(f"✗ {collective} {name}, size {size}{where}: {type(error).__name__}: {error}", flush=True)
                if not isinstance(error, ValueError):
                    raise  # a fault in the generator itself: the traceback shows where
                return 1
        proved += len(roots)
    print(f"✓ {collective} {name}: {proved} schedules, sizes {numbers(sizes)}", flush=True)
    return 0


def _prove_pipeline(name: str) -> int:
    for ranks in _PIPELINES:
        for micros in _PIPELINES:
            pipeline_plan(name, ranks, micros).verify()
    print(f"✓ pipeline {name}: {len(_PIPELINES) ** 2} plans, ranks and micro-batches {numbers(_PIPELINES)}", flush=True)
    return 0


def _pipeline(given: argparse.Namespace) -> int:
    if given.name is None:
        print(pipeline_table())
        return 0
    print(show_pipeline(given.name, given.ranks, given.micros, given.stages_a_rank))
    if given.svg:
        print(f"picture  {pipeline_plan(given.name, given.ranks, given.micros, given.stages_a_rank).draw(given.svg)}")
    return 0


def _list(given: argparse.Namespace) -> int:
    print(markdown_table(given.collective) if given.markdown else f"{text_table(given.collective)}\n\n{LETTERS}")
    return 0


def _plan(given: argparse.Namespace) -> int:
    if given.hosts < 1 or given.ranks < 1:
        raise ValueError(f"--hosts {given.hosts} --ranks {given.ranks}: one host or more, of one rank or more")
    count = advice.nbytes(given.bytes)
    topology, source = _topology(given)
    found = recommend(given.collective, count, topology)
    print(f"{advice.describe(given.collective, count, topology, source)}\n\n{advice.tell(found)}")
    print(_how_to_run(given.collective, given.hosts, found.candidates[0].schedule.algorithm))
    return 0


def _how_to_run(collective: str, hosts: int, algorithm: str) -> str:
    """Whether the backend takes this advice by itself."""
    if hosts > 1 and collective in FOLLOWED:
        return "The backend dist_prims chooses by the same prices, of what `bench calibrate` has measured."
    own = "works in shared memory on one host" if hosts == 1 else "sends every block straight to its rank"
    by_hand = f"dist_prims.{collective}(..., algorithm={algorithm!r}) follows it on any backend"
    if collective in ("barrier", "scan", "exclusive_scan"):
        return f"The backend dist_prims follows no schedule for it; {by_hand.replace('exclusive_', '')}."
    return f"The backend dist_prims follows no schedule here, it {own}; {by_hand}."


def _topology(given: argparse.Namespace) -> tuple[Topology, str]:
    """The hosts, with links as asked, measured or supposed, and a word on which of these."""
    hosts = (given.ranks,) * given.hosts
    asked = {name: value for name in _LINKS if (value := getattr(given, name)) is not None}
    if given.calibration:
        if asked:
            raise ValueError(f"--calibration and --{next(iter(asked)).replace('_', '-')}: one or the other")
        try:
            return Topology.measured(hosts, json.loads(Path(given.calibration).read_text())), given.calibration
        except ValueError as error:
            raise ValueError(f"{given.calibration}: {error}") from None
    links = {**_LINKS, **asked}
    inner = Level(advice.moment(links["inner_latency"]), advice.bits(links["inner_link"]))
    outer = Level(advice.moment(links["latency"]), advice.bits(links["link"]))
    supposed = ", ".join(name.replace("_", " ") for name in _LINKS if name not in asked)
    return Topology(hosts, inner, outer, _GAMMA), f"supposed: {', '.join(filter(None, [supposed, 'reducing']))}"


def _tune(given: argparse.Namespace) -> int:
    from .bench.tune import main as tune

    return tune(given.ranks)


def _doctor(given: argparse.Namespace) -> int:
    if given.dump:
        from .launch.flight_records import read

        print(read(given.dump))
        return 0
    from .launch.doctor import report  # it alone needs torch

    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
