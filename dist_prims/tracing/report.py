"""The report of a trace in the terminal: the slowest rank, waits by peer, predicted and measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from .analysis import analyse
from .reader import ProcessTrace, Trace

__all__: list[str] = []

_MOST_RANKS = 16  # in the table of waits
_MOST_KINDS = 20


def report(trace: Trace, levels: Mapping[str, Any] | None = None) -> str:
    """Return the report; ``levels``: see :func:`.analysis.analyse`."""
    analysis = analyse(trace, levels)
    parts = [_head(trace, analysis), _ranks(analysis), _slowest(analysis), _waits(analysis), _calls(analysis)]
    lines = [line for part in parts for line in ("", *part)][1:] + _pipeline(analysis)
    lines += ["", *(f"ignored {each}" for each in analysis["ignored"])] if analysis["ignored"] else []
    return "\n".join(lines)


def _head(trace: Trace, analysis: dict[str, Any]) -> Iterator[str]:
    ranks, hosts = analysis["ranks"], {rank["host"] for rank in analysis["ranks"]}
    count = len(analysis["calls"])
    yield (
        f"trace   {len(ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}, {count} collectives, "
        f"{sum(rank['events'] for rank in ranks)} events"
    )
    missing = sorted({r for p in trace.ranks.values() for g in p.groups.values() for r in g.ranks} - set(trace.ranks))
    if missing:
        yield f"missing no trace of rank {', '.join(map(str, missing))}"
    for rank in ranks:
        if rank["dropped"]:
            yield f"dropped {rank['dropped']} events of rank {rank['rank']}: its file was full; use trace(events=...)"
        if not rank["ended"]:
            yield f"killed  rank {rank['rank']} did not end its trace; {rank['unfinished']} events are unfinished"
    yield f"clocks  {_clocks(trace)}"


def _clocks(trace: Trace) -> str:
    domains = {process.facts["clock"] for process in trace.ranks.values()}
    if len(domains) == 1:
        return "one monotonic clock"
    shifts = {process.facts["clock"]: process for process in trace.ranks.values()}
    references = {point["reference"] for process in trace.ranks.values() for point in process.clocks}
    return "; ".join(f"host {each.facts['host']}: {_shift(each, references)}" for each in shifts.values())


def _shift(process: ProcessTrace, references: set[str]) -> str:
    if process.facts["clock"] in references:
        return "the reference"
    return f"{_time(process.shift)} ± {_time(process.error)}" if process.error else "its offset was not measured"


def _time(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.1f} µs"


def _ranks(analysis: dict[str, Any]) -> list[str]:
    head = ["rank", "calls", "in calls", "peer late", "link", "reducing", "copying", "rest"]
    rows = []
    for rank in analysis["ranks"]:
        parts = [rank[name] for name in ("late", "link", "reduce", "copy")]
        numbers = [rank["in_calls"], *parts, max(rank["in_calls"] - sum(parts), 0.0)]
        rows.append([str(rank["rank"]), str(rank["calls"]), *(f"{each:.6f}" for each in numbers)])
    return ["seconds of each rank in collectives", *_table([head, *rows])]


def _slowest(analysis: dict[str, Any]) -> Iterator[str]:
    """The rank for which the others have waited most."""
    awaited: dict[str, float] = defaultdict(float)
    for rank in analysis["ranks"]:
        for peer, seconds in rank["waits"].items():
            awaited[peer] += seconds
    if not awaited:
        yield "slowest no rank has waited for another"
        return
    slowest = max(awaited, key=awaited.__getitem__)
    several = sum(call["recorded_ranks"] > 1 for call in analysis["calls"])
    last = sum(call["recorded_ranks"] > 1 and str(call["last_to_come"]) == slowest for call in analysis["calls"])
    often = f"the last to come in {last} of {several} collectives"
    yield f"slowest rank {slowest}: others waited {awaited[slowest]:.6f} s for it; {often}"


def _waits(analysis: dict[str, Any]) -> list[str]:
    ranks = analysis["ranks"][:_MOST_RANKS]
    peers = [str(rank["rank"]) for rank in ranks]
    rows = [[str(rank["rank"]), *(f"{rank['waits'].get(peer, 0.0):.6f}" for peer in peers)] for rank in ranks]
    more = f" (the first {_MOST_RANKS} ranks)" if len(analysis["ranks"]) > _MOST_RANKS else ""
    return [f"seconds that a rank (row) has waited for another (column){more}", *_table([["", *peers], *rows])]


def _calls(analysis: dict[str, Any]) -> list[str]:
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for call in analysis["calls"]:
        kinds[call["group"], call["collective"], call["algorithm"], call["bytes"]].append(call)
    head = ["group", "collective", "algorithm", "bytes", "calls", "measured", "predicted", "ratio", "arrival"]
    rows = []
    longest_first = sorted(kinds.items(), key=lambda kind: -sum(call["end"] - call["begin"] for call in kind[1]))
    for (group, what, algorithm, nbytes), calls in longest_first:
        measured, predicted = median(call["seconds"] for call in calls), calls[0]["predicted"]
        known = [f"{predicted * 1e6:.1f}", f"{measured / predicted:.2f}"] if predicted else ["", ""]
        arrival = median(call["arrival"] for call in calls)
        facts = [group, what, algorithm or "(slots)", str(nbytes), str(len(calls))]
        rows.append([*facts, f"{measured * 1e6:.1f}", *known, f"{arrival * 1e6:.1f}"])
    title = "µs of a collective from the last rank's begin (median), predicted, and between the first and last begin"
    return [title, *_table([head, *rows[:_MOST_KINDS]])]


def _pipeline(analysis: dict[str, Any]) -> list[str]:
    rows = [["rank", "actions", "seconds", "of", "bubble"]]
    for rank in analysis["ranks"]:
        if actions := rank["actions"]:
            bubble = 1 - actions["seconds"] / actions["span"] if actions["span"] else 0.0
            numbers = [f"{actions[name]:.6f}" for name in ("seconds", "span")]
            rows.append([str(rank["rank"]), str(actions["count"]), *numbers, f"{bubble:.1%}"])
    title = "seconds in actions of a pipeline, of those from the first to the last one"
    return ["", title, *_table(rows)] if len(rows) > 1 else []


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
