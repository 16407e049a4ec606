"""``trace``: the report of a trace, its analysis as JSON, and its events for Chrome's trace viewer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__: list[str] = []


def add(commands: Any) -> None:
    parser = commands.add_parser("trace", help="what the ranks of a traced run have waited for (DIST_PRIMS_TRACE)")
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("report", _report, "slowest rank, waits by peer, predicted and measured times"),
        ("chrome", _chrome, "events for https://ui.perfetto.dev and chrome://tracing"),
        ("page", _page, "an interactive page: the timeline, steps and critical path of each collective"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("folder", metavar="FOLDER", help="with the files of all ranks")
        kind.set_defaults(run=run)
        if name != "report":
            kind.add_argument("-o", "--output", metavar="FILE", required=True)
        else:
            kind.add_argument("--json", metavar="FILE", help="also write the analysis")
        if name != "chrome":
            kind.add_argument(
                "--calibration",
                metavar="FILE",
                help="costs of messages, by `bench calibrate`; default: those of the run",
            )


def _report(args: argparse.Namespace) -> int:
    from ..tracing.analysis import analyse
    from ..tracing.reader import read
    from ..tracing.report import report

    trace = read(args.folder)
    levels = _levels(args)
    print(report(trace, levels))
    if args.json:
        Path(args.json).write_text(json.dumps(analyse(trace, levels)))
    return 0


def _chrome(args: argparse.Namespace) -> int:
    from ..tracing.chrome import write_chrome
    from ..tracing.reader import read

    count = write_chrome(read(args.folder), args.output)
    print(f"{count} events in {args.output}")
    return 0


def _page(args: argparse.Namespace) -> int:
    from ..schedules.html.document import write_html
    from ..tracing.page import trace_page
    from ..tracing.reader import read

    print(f"page     {write_html(trace_page(read(args.folder), _levels(args)), args.output)}")
    return 0


def _levels(args: argparse.Namespace) -> Any:
    """The costs of messages in the file of --calibration, or None."""
    return json.loads(Path(args.calibration).read_text()) if args.calibration else None
