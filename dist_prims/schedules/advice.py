"""A recommendation in words, and the quantities that it is asked with: 100M, 25G, 10us.

Bytes count in 1024s as everywhere here; links are sold in bits a second and count in thousands: 25G is 3.125 GB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .recommend import Advice, Candidate
from .topology import Topology

__all__ = ["bits", "describe", "duration", "moment", "nbytes", "tell"]

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_HEADS = ("algorithm", "segments", "predicted", "latency", "processor", "link", "bound by", "busiest link")
_MOMENTS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def nbytes(text: str) -> int:
    """``512``, ``16K``, ``100M`` or ``2G`` as a number of bytes.

    >>> nbytes("16K")
    16384
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512, 16K, 1M or 2G")
    return int(match[1]) * _BYTES[match[2]]


def bits(text: str) -> float:
    """``25G`` as seconds a byte on a link of 25 Gbit/s.

    >>> bits("8G")
    1e-09
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(BIT/S|BPS)?", text.upper())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not the speed of a link; write 1G, 25G or 400G (bits a second)")
    return 8 / (float(match[1]) * _BITS[match[2]])


def moment(text: str) -> float:
    """``10us`` as seconds.

    >>> moment("2.5ms")
    0.0025
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 500ns, 10us or 1.5ms")
    return float(match[1]) * _MOMENTS[match[2]]


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(0.0727)
    '72.7 ms'
    """
    return _with_unit(seconds * 1e9, ("ns", "µs", "ms", "s"), 1000)


def _amount(count: float) -> str:
    return _with_unit(count, ("B", "KB", "MB", "GB", "TB"), 1024)


def _with_unit(value: float, units: Sequence[str], base: float) -> str:
    at = 0
    while value >= 999.5 and at < len(units) - 1:
        value, at = value / base, at + 1
    return f"{value:.3g} {units[at]}" if value < 999.5 else f"{value:,.0f} {units[at]}"


def describe(collective: str, count: int, topology: Topology, source: str) -> str:
    """What was asked: the collective, the hosts, what a message and a byte are taken to cost and who says so."""
    size = f" of {_amount(count)}" if collective != "barrier" else ""
    hosts, ranks = len(topology.hosts), topology.hosts[0]
    lines = [f"{collective}{size}: {hosts} host{'s'[: hosts > 1]} x {ranks} rank{'s'[: ranks > 1]}; {source}"]
    for name, level, where in (("within a host", topology.inner, "rank"), ("between hosts", topology.outer, "host")):
        speed = f"{8e-9 / level.beta:.3g} Gbit/s" if level.beta else "no limit to bytes"
        lines.append(f"{name}: {duration(level.alpha)} a message, {speed} a {where} each way")
    lines.append(f"reducing: {f'{1e-9 / topology.gamma:.3g} GB/s' if topology.gamma else 'free'}")
    if topology.cores is not None:
        lines.append(f"cores: {topology.cores} {'for all hosts' if topology.one_machine else 'a host'}")
    return "\n".join(lines)


def tell(advice: Advice) -> str:
    """The candidates as a table, what was left out, and in a few sentences which one to take and why."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for each in advice.candidates:
        times = (duration(value) for value in (each.seconds, each.latency, each.processor, each.link))
        rows.append((each.name, str(each.segments), *times, each.bound_by, _amount(each.link_bytes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"{'lower bound'.ljust(widths[0] + widths[1] + 2)}  {duration(advice.bound)}")
    if advice.left_out:
        named = "; ".join(f"{name} ({many})" for name, many in advice.left_out)
        lines += ["", f"Left out, as they have too many transfers to count: {named}."]
    return "\n".join([*lines, "", *_reasons(advice)])


def _reasons(advice: Advice) -> Iterator[str]:
    best, others = advice.candidates[0], advice.candidates[1:]
    near = f", {best.seconds / advice.bound:.2f} times the lower bound" if advice.bound else ""
    yield f"Take {best.name}: {duration(best.seconds)} predicted{near}."
    if best.seconds:
        yield f"{getattr(best, best.bound_by) / best.seconds:.0%} of its time {_limit(best)}."
    if best.segments > 1:
        uncut = f"uncut it takes {duration(best.uncut)}"
        yield f"Cut into {best.segments} segments, one can be on the way while another is reduced: {uncut}."
    plain = [other for other in others if other.schedule.algorithm != best.schedule.algorithm]
    if plain and best.seconds:
        other = plain[0]
        yield f"{other.name} takes {other.seconds / best.seconds:.2f} times as long: there {_limit(other)}."


def _limit(candidate: Candidate) -> str:
    """What the candidate waits for most."""
    return {
        "link": f"the busiest link carries {_amount(candidate.link_bytes)}",
        "latency": f"{len(candidate.schedule.steps)} steps of messages follow each other",
        "processor": "ranks copy and reduce",
    }[candidate.bound_by]
