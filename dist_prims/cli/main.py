"""The argument parser of the command, and the subcommands without a module of their own."""

from __future__ import annotations

import argparse
import os
import sys

from .. import __version__
from .._output import replace_unencodable
from ..schedules.catalogue import SYMBOLS, markdown_table, text_table
from . import learn, pipeline, prove, recommend, show, synthesize, trace

__all__: list[str] = []

_BROKEN_PIPE = 141  # the status of a program that SIGPIPE has ended


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status; bad input gives status 2 and one line on stderr.

    Characters that stdout cannot encode are replaced. A reader that closes stdout ends the command without a word.

    >>> main(["show", "all_reduce", "direct", "--size", "2"])
    all_reduce direct, 2 ranks, 1 chunk, 1 step
    s ─c→ d: rank s sends chunk c to rank d, (+) adding; then the ranks in the sum
    step 0   0 ─0→ 0     0..1   1 ─0→ 0 (+) 0..1   0 ─0→ 1     0..1
             1 ─0→ 1 (+) 0..1
    <BLANKLINE>
    starts   every rank: chunk 0, its own data
    ends     every rank: chunk 0, the sum over ranks 0..1
    steps    1 = 1
    sent     1 of the data by every rank; at most n-1
    wins     tiny data
    source   folklore; as one-shot and two-shot in TensorRT-LLM and vLLM
    adds     chunk 0 on rank 0: r0+r1
    0
    """
    replace_unencodable()
    try:
        args = _parse(arguments)
        status = int(args.run(args))
        print(end="", flush=True)  # here, where a closed pipe is an error that can be caught; stdout may be None
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its exit
        return _BROKEN_PIPE
    except (ValueError, OSError) as error:
        print(f"dist_prims: {error}", file=sys.stderr)
        return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args, more = parser.parse_known_args(words)
    if more and (args.run is not show.run or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if args.run is show.run:  # argparse does not assign name=value arguments that follow an option
        args.parameters += more
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims", description="Show, prove and list algorithms.")
    parser.add_argument("--version", action="version", version=f"dist_prims {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show.add(commands)
    prove.add(commands)
    table = commands.add_parser("algorithms", help="a table of the registered algorithms")
    table.add_argument("collective", nargs="?", metavar="COLLECTIVE")
    table.add_argument("--markdown", action="store_true")
    table.set_defaults(run=_list)
    recommend.add(commands)
    synthesize.add(commands)
    pipeline.add(commands)
    learn.add(commands)
    trace.add(commands)
    tune = commands.add_parser("tune", help="measure the crossover sizes of this machine for the backend, once")
    tune.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    tune.set_defaults(run=_tune)
    doctor = commands.add_parser("doctor", help="launcher, ranks, hosts, transports, cores, memory")
    doctor.add_argument(
        "--dump", metavar="FOLDER", help="analyse the flight records in FOLDER instead: which rank is behind"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _list(args: argparse.Namespace) -> int:
    print(markdown_table(args.collective) if args.markdown else f"{text_table(args.collective)}\n\n{SYMBOLS}")
    return 0


def _tune(args: argparse.Namespace) -> int:
    from ..bench.tune import main as tune

    return tune(args.ranks)


def _doctor(args: argparse.Namespace) -> int:
    if args.dump:
        from ..tracing.read_flight_records import read

        print(read(args.dump))
        return 0
    from .doctor import report  # imports torch

    print(report())
    return 0
