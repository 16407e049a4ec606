"""The report of a recommendation, and the parsers of the quantities in its command line: 100M, 25G, 10us.

Sizes of data are in units of 1024 bytes, as everywhere in this package. Link speeds are in bits a second with decimal
prefixes, as vendors give them: 25G is 3.125 GB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .recommend import Advice, Candidate
from .topology import Topology

__all__: list[str] = []

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_HEADINGS = ("algorithm", "segments", "predicted", "latency", "processor", "link", "bound by", "busiest link")
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
    at = 0
    while value >= 999.5 and at < len(units) - 1:
        value, at = value / base, at + 1
    return f"{value:.3g} {units[at]}" if value < 999.5 else f"{value:,.0f} {units[at]}"


def describe(collective: str, count: int, topology: Topology, source: str) -> str:
    """The question: the collective, the hosts, the costs of a message and of a byte, and the source of these costs."""
    size = f" of {format_bytes(count)}" if collective != "barrier" else ""
    hosts, ranks = len(topology.hosts), topology.hosts[0]
    lines = [f"{collective}{size}: {hosts} host{'s'[: hosts > 1]} x {ranks} rank{'s'[: ranks > 1]}; {source}"]
    for name, level, where in (("within a host", topology.inner, "rank"), ("between hosts", topology.outer, "host")):
        speed = f"{8e-9 / level.beta:.3g} Gbit/s" if level.beta else "unlimited bandwidth"
        lines.append(f"{name}: {format_duration(level.alpha)} a message, {speed} a {where} each way")
    lines.append(f"reducing: {f'{1e-9 / topology.gamma:.3g} GB/s' if topology.gamma else 'free'}")
    if topology.cores is not None:
        lines.append(f"cores: {topology.cores} {'for all hosts' if topology.one_machine else 'a host'}")
    return "\n".join(lines)


def report(advice: Advice) -> str:
    """The candidates as a table, and the recommendation with its reasons."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for each in advice.candidates:
        spent = each.spent
        times = map(format_duration, (spent.total, spent.latency, spent.processor, spent.link))
        rows.append((each.name, str(each.segments), *times, spent.most, format_bytes(each.link_bytes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"{'lower bound'.ljust(widths[0] + widths[1] + 2)}  {format_duration(advice.bound)}")
    return "\n".join([*lines, "", *_reasons(advice)])


def _reasons(advice: Advice) -> Iterator[str]:
    best, others = advice.candidates[0], advice.candidates[1:]
    near = f", {best.seconds / advice.bound:.2f} times the lower bound" if advice.bound else ""
    yield f"Use {best.name}: {format_duration(best.seconds)} predicted{near}."
    if best.seconds:
        yield f"{getattr(best.spent, best.spent.most) / best.seconds:.0%} of its time {_bottleneck(best)}."
    if best.segments > 1:
        uncut = f"in one segment it takes {format_duration(best.uncut)}"
        yield f"With {best.segments} segments the link carries one while another is reduced; {uncut}."
    different = [other for other in others if other.schedule.algorithm != best.schedule.algorithm]
    if different and best.seconds:
        other = different[0]
        yield f"{other.name} takes {other.seconds / best.seconds:.2f} times as long, because {_bottleneck(other)}."


def _bottleneck(candidate: Candidate) -> str:
    """The resource that most of the candidate's time is spent on, in words."""
    return {
        "link": f"the busiest link carries {format_bytes(candidate.link_bytes)}",
        "latency": f"{candidate.load.steps} steps of messages run one after the other",
        "processor": "ranks copy and reduce",
    }[candidate.spent.most]
