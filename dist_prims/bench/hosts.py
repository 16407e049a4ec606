"""``python -m dist_prims.bench hosts``: the collectives between hosts, beside gloo's and beside what the link carries.

To be run by a launcher on several hosts. The contenders at each size are gloo's own collective, a group of dist_prims
for each transport, and a stream: plain TCP that carries only what the busiest link must carry, so no collective can be
faster. A round trip is a message to the last rank and one back. The table is in Markdown; its ratios are medians
over the iterations of one run. "busy" is the part of the time of all cores in which they worked, on the host where this
part is largest: near 1, the processors are the limit. It is empty for short runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..backend.options import BackendOptions
from ..launch import init
from ..units import format_bytes, format_duration
from .arguments import names_of, positive, sizes
from .cases import CASES, MESSAGES, Buffers
from .measure import Contender, Line, measure
from .report import environment, write_json
from .stream import ONE_WAY, Hosts, Stream, least_bytes

__all__: list[str] = []

_TRANSPORTS = ("tcp", "ucx", "mpi")
_NAMES = (*CASES, *MESSAGES)
_TIMEOUT = 600.0  # seconds of one wait for another rank


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench hosts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--collectives", type=names_of(_NAMES), default=list(_NAMES), help="default: all")
    parser.add_argument("--sizes", type=sizes, default="64,64K,1M,16M", help="64,64K,1M,16M")
    parser.add_argument(
        "--transports", type=names_of(_TRANSPORTS), default=["tcp"], help="contenders, of tcp, ucx, mpi"
    )
    parser.add_argument("--iterations", type=positive, default=7)
    parser.add_argument("--json", type=Path, help="write all times")
    options = parser.parse_args(arguments)
    hosts = init("gloo", timeout=_TIMEOUT).hosts
    if len(hosts) < 2:
        parser.error("all ranks are on one host; on one machine, ./launch_scripts/netns-hosts.sh makes several")
    torch.set_num_threads(1)
    return _bench(options, hosts)


def _bench(options: argparse.Namespace, hosts: Hosts) -> int:
    """Measure on every rank, and print a row for each collective and size; returns 1 if any element was wrong."""
    facts = environment()
    groups: dict[str, Any] = {
        f"dist_prims over {transport}": dist.new_group(
            backend="dist_prims", pg_options=BackendOptions(transport=transport)
        )
        for transport in options.transports
    }
    _print(_heading(facts, list(groups)))
    lines: list[Line] = []
    with Stream.connect(hosts, 2 * max(options.sizes) * max(map(len, hosts)), _TIMEOUT) as stream:
        for collective in options.collectives:
            for nbytes in options.sizes[: 1 if collective == "barrier" else None]:
                limit = _limit(stream, collective, least_bytes(collective, nbytes, hosts))
                of_size = measure(collective, nbytes, [], iterations=options.iterations, groups=groups, more=limit)
                _print(_row(collective, nbytes, of_size))
                lines += of_size
    wrong = sum(line.wrong for line in lines)
    _print(f"\nWrong elements: {wrong}")
    if options.json and dist.get_rank() == 0:
        write_json(options.json, facts, lines=lines)
    return int(wrong > 0)


def _print(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _limit(stream: Stream, collective: str, nbytes: int) -> Any:
    """The argument ``more`` of ``measure``: a contender that sends ``nbytes`` over the stream."""

    def make(buffers: Buffers) -> Mapping[str, Contender]:
        carry = Contender(lambda _: stream.carry(nbytes, collective in ONE_WAY), buffers, checked=False)
        return {"stream": carry}

    return make


def _heading(facts: Mapping[str, Any], groups: Sequence[str]) -> str:
    names = ["collective", "size", "gloo", "stream", "busy"]
    for group in groups:
        names += [group, "by gloo", "by stream", "busy"]
    values = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{values}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}"


def _row(collective: str, nbytes: int, lines: Sequence[Line]) -> str:
    gloo, *ours, stream = lines
    cells = [
        collective,
        format_bytes(max(nbytes, gloo.nbytes)),  # at least an element of each rank
        format_duration(gloo.median),
        format_duration(stream.median),
        _busy(stream),
    ]
    for line in ours:
        by_stream = statistics.median(map(float.__truediv__, line.seconds, stream.seconds))
        cells += [format_duration(line.median), f"{line.ratio:.2f}", f"{by_stream:.2f}", _busy(line)]
    return f"| {' | '.join(cells)} |"


def _busy(line: Line) -> str:
    return "" if line.busy is None else f"{line.busy:.2f}"
