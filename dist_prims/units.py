"""Quantities with units as text: parsers and formatters of sizes (100M), link speeds (25G) and durations (10us).

Sizes of data have prefixes of powers of 1024, as everywhere in this package: 1K is 1024 bytes. Link speeds are in bits
a second with decimal prefixes, as vendors give them: 25G is 3.125 GB/s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

__all__: list[str] = []

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes(text: str) -> int:
    """Convert ``512``, ``16K``, ``100M`` or ``2G`` to a number of bytes.

    >>> parse_bytes("16K")
    16384
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512, 16K, 1M or 2G")
    return int(match[1]) * _BYTES[match[2]]


def check_bytes(where: str, nbytes: float) -> None:
    """ValueError, with the name of the function, unless ``nbytes`` can be the size of data."""
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"{where}(nbytes={nbytes!r}): it must be a finite number of bytes, at least 0")


def parse_link_speed(text: str) -> float:
    """Convert ``25G``, a link of 25 Gbit/s, to seconds a byte.

    >>> parse_link_speed("8G")
    1e-09
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(BIT/S|BPS)?", text.upper())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a link speed; write 1G, 25G or 400G (bits a second)")
    return 8 / (float(match[1]) * _BITS[match[2]])


def parse_duration(text: str) -> float:
    """Convert ``10us`` to seconds.

    >>> parse_duration("2.5ms")
    0.0025
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 500ns, 10us or 1.5ms")
    return float(match[1]) * _SECONDS[match[2]]


def format_duration(seconds: float) -> str:
    """Format seconds with three digits and a unit.

    >>> format_duration(0.0727)
    '72.7 ms'
    """
    return _with_unit(seconds * 1e9, ("ns", "µs", "ms", "s"), 1000)


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits and a unit.

    >>> format_bytes(65536)
    '64 KB'
    """
    return _with_unit(count, ("B", "KB", "MB", "GB", "TB"), 1024)


def _with_unit(value: float, units: Sequence[str], base: float) -> str:
    """The value in the first unit in which it has at most three digits; each unit is ``base`` times the one before."""
    number = 0
    while value >= 999.5 and number < len(units) - 1:
        value, number = value / base, number + 1
    return f"{value:.3g} {units[number]}" if value < 999.5 else f"{value:,.0f} {units[number]}"
