"""Parser of SLURM's compressed node lists."""

import re
from collections.abc import Iterator
from itertools import product

__all__: list[str] = []


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of a compressed node list.

    >>> expand_nodelist("node[08-10,12],gpu5")
    ['node08', 'node09', 'node10', 'node12', 'gpu5']
    >>> expand_nodelist("rack[1-2]n[0,7]-ib")
    ['rack1n0-ib', 'rack1n7-ib', 'rack2n0-ib', 'rack2n7-ib']
    """
    hosts: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", pattern)  # literal, ranges, literal, ranges, ..., literal
        choices = [list(_numbers(piece)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
