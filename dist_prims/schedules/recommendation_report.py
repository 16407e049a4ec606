"""The report of ``python -m dist_prims recommend``: the question, a table of candidates, and the reasons in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import format_bytes, format_duration
from .recommend import Advice, Candidate
from .topology import Topology

__all__: list[str] = []

_HEADINGS = ("algorithm", "segments", "predicted", "latency", "processor", "link", "bound by", "busiest link")


def describe_question(collective: str, nbytes: int, topology: Topology, source: str) -> str:
    """The question: collective, hosts with equally many ranks, costs; ``source``: the origin of the costs."""
    size = f" of {format_bytes(nbytes)}" if collective != "barrier" else ""
    hosts, ranks = len(topology.hosts), topology.hosts[0]
    lines = [f"{collective}{size}: {hosts} host{'s'[: hosts > 1]} x {ranks} rank{'s'[: ranks > 1]}; {source}"]
    for name, level, where in (("within a host", topology.inner, "rank"), ("between hosts", topology.outer, "host")):
        speed = f"{8e-9 / level.beta:.3g} Gbit/s" if level.beta else "unlimited bandwidth"
        lines.append(f"{name}: {format_duration(level.alpha)} a message, {speed} a {where} each way")
    lines.append(f"reducing: {f'{1e-9 / topology.gamma:.3g} GB/s' if topology.gamma else 'free'}")
    if topology.cores is not None:
        lines.append(f"cores: {topology.cores} {'for all hosts' if topology.one_machine else 'a host'}")
    return "\n".join(lines)


def describe_answer(advice: Advice) -> str:
    """The candidates as a table, and the recommendation with its reasons."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for candidate in advice.candidates:
        spent = candidate.spent
        times = map(format_duration, (spent.total, spent.latency, spent.processor, spent.link))
        rows.append((candidate.name, str(candidate.segments), *times, spent.most, format_bytes(candidate.link_bytes)))
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
