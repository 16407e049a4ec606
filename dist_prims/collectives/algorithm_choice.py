"""Selection of an algorithm: the one that an environment variable names for a size, or the one of the lowest cost.

    DIST_PRIMS_ALL_REDUCE=ring
    DIST_PRIMS_ALL_REDUCE="recursive_doubling:0-16K;halving_doubling:16K-1M;ring:1M-max"

A range includes its start and excludes its end.
"""

from __future__ import annotations

import functools
import os
import re

from ..schedules import algorithms, build, lookup
from ..schedules.cost import Cost
from ..schedules.registry import Algorithm
from ..schedules.trust import may_be_chosen

__all__: list[str] = []

CHEAPEST = "cheapest"  # as the name of an algorithm

# Seconds a message, a byte moved, a byte reduced: gloo over loopback, measured on a 2-core machine. The numbers only
# serve to compare algorithms. Where the choice matters, measure and pin an algorithm.
ALPHA, BETA, GAMMA = 60e-6, 0.5e-9, 0.1e-9

# Algorithms of all_to_all that send each block directly to its destination, and support uneven splits: both ranks know
# the length of the block, whereas a rank that forwards blocks does not know the lengths of other ranks' blocks.
UNFORWARDED = ("pairwise", "direct")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str, variable: str) -> int:
    if text == "max":
        return 1 << 63
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None:
        raise ValueError(f"{variable}: {text!r} is not a size; write 512, 16K, 1M, 2G or max")
    return int(match[1]) * _UNITS[match[2]]


@functools.lru_cache(maxsize=64)
def parse_ranges(text: str, collective: str, variable: str) -> tuple[tuple[str, int, int], ...]:
    """Parse a setting into (algorithm, start, end) for each range.

    >>> parse_ranges("ring:1M-max", "all_reduce", "DIST_PRIMS_ALL_REDUCE")
    (('ring', 1048576, 9223372036854775808),)
    """
    ranges = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, span = part.partition(":")
        low, dash, high = (span or "0-max").partition("-")
        if not dash:
            raise ValueError(f"{variable}: {span!r} is not a range; write e.g. {name}:16K-1M")
        lookup(collective, name.strip())
        ranges.append((name.strip(), _bytes(low.strip(), variable), _bytes(high.strip(), variable)))
    return tuple(ranges)


@functools.lru_cache(maxsize=1024)
def _price(registered: Algorithm, size: int) -> Cost:
    return build(registered.collective, registered.name, size).price


def configured(collective: str, nbytes: int) -> str | None:
    """Return the algorithm that the environment names for data of ``nbytes``, or None."""
    variable = f"DIST_PRIMS_{collective.upper()}"
    for name, low, high in parse_ranges(os.environ.get(variable, ""), collective, variable):
        if low <= nbytes < high:
            return name
    return None


def cheapest(collective: str, size: int, nbytes: int, even: bool = True) -> str:
    """Return the algorithm of the lowest cost for data of ``nbytes``, in blocks of the same length if ``even``."""
    candidates = [lookup(collective, name) for name in algorithms(collective) if even or name in UNFORWARDED]
    fit = [each for each in candidates if may_be_chosen(each, size)]
    return min(fit, key=lambda each: _price(each, size).seconds(nbytes, ALPHA, BETA, GAMMA)).name
