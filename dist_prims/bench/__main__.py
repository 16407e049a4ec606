"""``python -m dist_prims.bench``: under mpirun or torchrun on their ranks, alone on ranks of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..launch import detect, init, spawn
from ..schedules import algorithms, lookup
from .cases import CASES
from .measure import Line, measure
from .memory import extra_chunks
from .report import heading, plot, row, write_json

_SECONDS = 3600.0
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if detect().size > 1:
        init(timeout=_SECONDS)
        return bench(given)
    return int(max(spawn(bench, given.ranks, (given,), timeout=_SECONDS)))


def sizes(text: str) -> list[int]:
    """Bytes: a list, or a range that doubles, quadruples with ``/4``.

    >>> sizes("8,64K,1M"), sizes("1K:8K"), sizes("1K:16K/4")
    ([8, 65536, 1048576], [1024, 2048, 4096, 8192], [1024, 4096, 16384])
    """
    if ":" not in text:
        return [_size(each) for each in text.split(",")]
    low, _, rest = text.partition(":")
    high, _, factor = rest.partition("/")
    found = [_size(low)]
    while found[-1] * int(factor or 2) <= _size(high):
        found.append(found[-1] * int(factor or 2))
    return found


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in {"", *_UNITS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512, 16K, 1M or 2G")
    return int(number) * _UNITS.get(unit, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench", description=__doc__)
    parser.add_argument("--collective", choices=CASES, default="all_reduce")
    parser.add_argument("--sizes", type=sizes, default="8:64M/8", help="8,64K,16M or 8:64M or 8:64M/8")
    parser.add_argument("--algorithms", default="", help="names, 'all' or 'none'; else those with the same bits on all")
    parser.add_argument("--backends", default="dist_prims", help="more backends to measure beside gloo (dist_prims)")
    parser.add_argument("--segment-bytes", type=_size, default=0, help="cut messages into segments")
    parser.add_argument("--ranks", type=int, default=4, help="to start where no launcher has (4)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--iterations", type=int, help="unless given, fewer for larger data")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="measure the extra memory of each algorithm instead")
    parser.add_argument("--json", type=Path, help="write all times")
    parser.add_argument("--plot", type=Path, help="write a plot (SVG)")
    return parser


def bench(given: argparse.Namespace) -> int:
    """On every rank; 1 if any element was wrong."""
    torch.set_num_threads(1)
    speaks = dist.get_rank() == 0
    names = _names(given.collective, given.algorithms)
    if given.memory:
        return _memory(given, names)
    groups = {name: dist.new_group(backend=name) for name in given.backends.split(",") if name}
    if speaks:
        print(heading(given.collective), flush=True)
    lines: list[Line] = []
    for nbytes in given.sizes:
        dtype = getattr(torch, given.dtype)
        found = measure(
            given.collective, nbytes, names, dtype, given.iterations, given.warmup, given.segment_bytes, groups
        )
        lines += found
        if speaks:
            print("\n".join(map(row, found)), flush=True)
    wrong = sum(line.wrong for line in lines)
    if speaks:
        print(f"# wrong elements: {wrong}")
        if given.json:
            write_json(given.json, lines)
        if given.plot:
            plot(given.plot, lines)
    return int(wrong > 0)


def _names(collective: str, text: str) -> list[str]:
    if text == "none":
        return []
    if text and text != "all":
        names = text.split(",")
    else:
        names = [name for name in algorithms(collective) if text or lookup(collective, name).replicas == "same"]
    for name in names:
        lookup(collective, name)  # a name that is none is told before anything runs
    return names


def _memory(given: argparse.Namespace, names: list[str]) -> int:
    for nbytes in given.sizes:
        for name in names:
            chunks = extra_chunks(given.collective, name, nbytes)
            if dist.get_rank() == 0:
                print(f"{nbytes:12} B  {name:22} {chunks:.2f} chunks beside the tensors", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
