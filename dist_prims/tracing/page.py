"""The data of the page of a trace: for each collective the timeline of its ranks, its steps beside the prediction, and
its critical path; and where the time of each rank went."""

from __future__ import annotations

from typing import Any

from ..schedules.html.document import Page
from . import format as fmt
from .analysis import SECOND, analyse
from .reader import CallPart, CollectiveCall, Trace

__all__: list[str] = []

MOST_EVENTS = 40_000
_SCRIPTS = ("format", "elements", "player", "timeline", "run")
_SHOWN = (fmt.WAIT, fmt.REDUCE, fmt.COPY, fmt.SEND, fmt.RECEIVE)


def trace_page(trace: Trace, levels: dict[str, Any] | None = None) -> Page:
    """The page of a trace; ``levels``: the costs of messages, as :func:`.analysis.analyse` takes them.

    A page has at most 40,000 events: the first collectives with as many.
    """
    analysis = analyse(trace, levels)
    calls: list[dict[str, Any]] = []
    events = 0
    for call, summary in zip(trace.calls(), analysis["calls"], strict=True):
        events += sum(len(part.inner) for part in call.parts.values())
        if calls and events > MOST_EVENTS:
            break
        calls.append({**summary, "lanes": [_lane(call, local, part) for local, part in sorted(call.parts.items())]})
    title = f"trace of {len(trace.ranks)} rank{'s' * (len(trace.ranks) != 1)}, {len(analysis['calls'])} collectives"
    data = {
        "ranks": analysis["ranks"],
        "calls": calls,
        "all": len(analysis["calls"]),
        "kinds": [fmt.KINDS[kind] for kind in _SHOWN],
    }
    return Page(title, _SCRIPTS, data)


def _lane(call: CollectiveCall, local: int, part: CallPart) -> dict[str, Any]:
    """One rank of a call: begin and end, and its events as (kind, begin, end, peer, step, bytes); times in seconds."""
    ranks = call.group.ranks
    events = part.process.events[part.inner]
    rows = []
    for event in events:
        kind, peer = int(event["kind"]), int(event["peer"])
        if kind in _SHOWN:
            other = ranks[peer] if 0 <= peer < len(ranks) else -1
            begin, end = (_seconds(int(event[name]) - call.begin) for name in ("begin", "end"))
            rows.append((_SHOWN.index(kind), begin, end, other, int(event["step"]), int(event["bytes"])))
    begin, end = _seconds(part.begin - call.begin), _seconds(part.end - call.begin)
    return {"rank": ranks[local], "begin": begin, "end": end, "events": rows}


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / SECOND, 9)
