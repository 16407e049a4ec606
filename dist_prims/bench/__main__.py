"""``python -m dist_prims.bench``: measure collectives, on the ranks of a launcher or on ranks that it starts itself.

A subcommand measures something else: ``steps`` of training, collectives between ``hosts``, the ``repair`` of groups, a
``pipeline``; ``calibrate`` measures what the link costs. A *contender* is a collective of one backend or algorithm; all
contenders are measured in turn (``measure.py``).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..schedules import algorithms, lookup
from ..schedules.registry import nearest
from .arguments import dtype, positive, run_on_ranks, size, sizes
from .cases import CASES
from .measure import Line, measure
from .memory import chunk_bytes, extra_bytes
from .report import environment, heading, plot, row, write_json

_SUBCOMMANDS = ("calibrate", "hosts", "pipeline", "repair", "steps")


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in _SUBCOMMANDS:  # imported here: most import the backend, which may not be built
        return int(importlib.import_module(f".{words[0]}", __package__).main(words[1:]))
    parser = _parser()
    options = parser.parse_args(words)
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    # With --memory gloo, because torch does not see what schedules allocate in C++.
    return run_on_ranks(bench, options, "gloo" if options.memory else None)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for arguments that no rank could handle, before any rank starts."""
    _names(options.collective, options.algorithms)
    for name in filter(None, options.backends.split(",")):
        if name not in dist.Backend.backend_list:
            raise ValueError(f"--backends {name}: {nearest('backend', name, dist.Backend.backend_list)}")
    if options.limits and options.collective != "all_reduce":
        raise ValueError(f"--limits measures all_reduce only, not --collective {options.collective}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench", description=__doc__)
    parser.add_argument("--collective", choices=CASES, default="all_reduce")
    parser.add_argument("--sizes", type=sizes, default="8:64M/8", help="8,64K,16M or 8:64M or 8:64M/8")
    parser.add_argument(
        "--algorithms", default="", help="names, 'all' or 'none'; default: all with equal bits on all ranks"
    )
    parser.add_argument("--backends", default="gloo", help="backends to measure besides the default one (gloo)")
    parser.add_argument("--segment-bytes", type=size, default=0, help="cut messages into segments")
    parser.add_argument("--ranks", type=positive, default=4, help="number of ranks to start without a launcher (4)")
    parser.add_argument("--dtype", type=dtype, default="float32")
    parser.add_argument("--iterations", type=positive, help="default: fewer for larger data")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limits", action="store_true", help="also measure nothing, memcpy, direct and zero_copy")
    parser.add_argument("--memory", action="store_true", help="measure the extra memory of each algorithm instead")
    parser.add_argument("--json", type=Path, help="write all times")
    parser.add_argument("--plot", type=Path, help="write a plot (SVG)")
    return parser


def bench(options: argparse.Namespace) -> int:
    """Run the benchmark on every rank; returns 1 if any element was wrong."""
    torch.set_num_threads(1)
    is_rank_0, facts = dist.get_rank() == 0, environment()
    names = _names(options.collective, options.algorithms)
    if options.memory:
        return _memory(options, names)
    groups = {name: dist.new_group(backend=name) for name in options.backends.split(",") if name}
    more = None
    if options.limits:
        from .limits import fake_group, limits  # imports the backend, which may not be built

        more = functools.partial(limits, nothing=fake_group())
    if is_rank_0:
        print(heading(options.collective, facts), flush=True)
    lines: list[Line] = []
    for nbytes in options.sizes:
        of_size = measure(
            options.collective,
            nbytes,
            names,
            options.dtype,
            options.iterations,
            options.warmup,
            options.segment_bytes,
            groups,
            more,
        )
        lines += of_size
        if is_rank_0:
            print("\n".join(map(row, of_size)), flush=True)
    wrong = sum(line.wrong for line in lines)
    if is_rank_0:
        print(f"# wrong elements: {wrong}")
        if options.json:
            write_json(options.json, facts, lines=lines)
        if options.plot:
            plot(options.plot, facts, lines)
    return int(wrong > 0)


def _names(collective: str, text: str) -> list[str]:
    """The algorithms that ``--algorithms TEXT`` names; ValueError if there is no such algorithm."""
    if text == "none":
        return []
    if text and text != "all":
        names = text.split(",")
    else:
        names = [name for name in algorithms(collective) if text or lookup(collective, name).replicas == "same"]
    for name in names:
        lookup(collective, name)  # raises for an unknown name before any rank starts
    return names


def _memory(options: argparse.Namespace, names: list[str]) -> int:
    """Print the memory that each algorithm needs besides the tensors of the call."""
    for nbytes in options.sizes:
        for name in names:
            extra = extra_bytes(options.collective, name, nbytes, options.dtype)
            chunks = extra / chunk_bytes(options.collective, name, nbytes)
            if dist.get_rank() == 0:
                print(f"{nbytes:12} B  {name:22} {extra:12} B besides the tensors, {chunks:.2f} chunks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
