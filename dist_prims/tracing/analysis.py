"""Analysis of a trace: where the time of each rank went, and measured beside predicted time for each call and step.

The results are plain dicts and lists, which can be written as JSON. All times are seconds, and those called ``begin``
and ``end`` count from the begin of the trace. ``docs/tracing.md`` describes the fields.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from . import format as fmt
from .prediction import predicted_steps
from .reader import CallPart, CollectiveCall, ProcessTrace, Trace

__all__: list[str] = []

VERSION = 1
SECOND = 1e9

# (group, call, step, segment, sender, receiver): when the sender has posted, in order
Posts = dict[tuple[Any, ...], list[int]]


def analyse(trace: Trace, levels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the analysis of a trace.

    ``levels``: the costs of messages, as ``bench calibrate`` writes them, in place of those that the groups had.

    - ``ranks``: see :func:`rank_summaries`.
    - ``calls``: each collective, see :func:`call_summary`, with its critical path, see :func:`critical_path`.
    """
    calls = trace.calls()
    posts = _posts(calls)
    start = min((call.begin for call in calls), default=0)
    return {
        "version": VERSION,
        "ranks": rank_summaries(trace, calls, posts),
        "calls": [
            {**call_summary(call, start, levels), "critical_path": critical_path(call, posts, start)} for call in calls
        ],
        "ignored": trace.ignored,
    }


def rank_summaries(trace: Trace, calls: list[CollectiveCall], posts: Posts) -> list[dict[str, Any]]:
    """For each rank: the seconds in collectives, and of these the seconds in which it has waited for a peer that had
    not sent yet (``late``) or for the link (``link``), reduced, and copied; ``waits``: the seconds by global rank."""
    found: dict[int, dict[str, Any]] = {}
    for rank, process in trace.ranks.items():
        found[rank] = {
            "rank": rank,
            "host": process.facts["host"],
            "events": len(process.events),
            "dropped": process.dropped,
            "unfinished": process.unfinished,
            "ended": process.ended,
            "clock_shift": process.shift / SECOND,
            "clock_error": process.error / SECOND,
            **dict.fromkeys(("calls", "last_to_come"), 0),
            **dict.fromkeys(("in_calls", "late", "link", "reduce", "copy"), 0.0),
            "actions": _actions(process),
            "waits": defaultdict(float),
        }
    for call in calls:
        for local, part in call.parts.items():
            rank = call.group.ranks[local]
            if rank in found:
                _add_part(found[rank], call, local, part, posts)
        last = call.group.ranks[max(call.parts, key=lambda each: call.parts[each].begin)]
        if last in found and len(call.parts) > 1:
            found[last]["last_to_come"] += 1
    for each in found.values():
        each["waits"] = {str(peer): seconds for peer, seconds in sorted(each["waits"].items())}
    return list(found.values())


def _actions(process: ProcessTrace) -> dict[str, float] | None:
    """The actions of a pipeline: their number, seconds in them, and from the first begin to the last end."""
    found = process.events[process.events["kind"] == fmt.ACTION]
    if not len(found):
        return None
    busy, span = (found["end"] - found["begin"]).sum(), found["end"].max() - found["begin"].min()
    return {"count": len(found), "seconds": float(busy) / SECOND, "span": float(span) / SECOND}


def _add_part(summary: dict[str, Any], call: CollectiveCall, local: int, part: CallPart, posts: Posts) -> None:
    summary["calls"] += 1
    summary["in_calls"] += (part.end - part.begin) / SECOND
    events = part.process.events
    for number in part.inner.tolist():
        event = events[number]
        kind, seconds = int(event["kind"]), float(event["end"] - event["begin"]) / SECOND
        if kind in (fmt.REDUCE, fmt.COPY):
            summary[fmt.KINDS[kind]] += seconds
        elif kind == fmt.WAIT and 0 <= event["peer"] < len(call.group.ranks):
            posted = _posted(call, local, event, posts)
            late = (
                seconds
                if posted is None
                else max(min(posted - int(event["begin"]), event["end"] - event["begin"]), 0) / SECOND
            )
            summary["late"] += late
            summary["link"] += seconds - late
            summary["waits"][call.group.ranks[int(event["peer"])]] += seconds


def call_summary(call: CollectiveCall, start: int = 0, levels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One collective: ``arrival`` is the time from the first rank's begin to the last one's, ``seconds`` from there to
    the last end, and ``predicted`` what the cost model says of the latter; None without a schedule or its topology."""
    last = max(part.begin for part in call.parts.values())
    predicted = predicted_steps(call, levels)
    return {
        "group": call.group.name,
        "collective": call.what,
        "algorithm": call.algorithm,
        "sequence": call.sequence,
        "bytes": call.nbytes,
        "ranks": len(call.group.ranks),
        "recorded_ranks": len(call.parts),
        "failed": any(part.failed for part in call.parts.values()),
        "begin": (call.begin - start) / SECOND,
        "end": (call.end - start) / SECOND,
        "arrival": (last - call.begin) / SECOND,
        "last_to_come": call.group.ranks[max(call.parts, key=lambda each: call.parts[each].begin)],
        "seconds": max(call.end - last, 0) / SECOND,
        "predicted": None if predicted is None else sum(predicted),
        "steps": list(_steps(call, predicted, start)),
    }


def _steps(call: CollectiveCall, predicted: list[float] | None, start: int) -> Iterator[dict[str, Any]]:
    """The steps of a schedule: when the first rank began it, when the last ended it, and ``seconds``, by which its end
    is later than that of the step before: together the time from the last arrival to the end of the last step."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    segments = 1
    for part in call.parts.values():
        events = part.process.events[part.inner]
        for event in events[events["kind"] == fmt.STEP]:
            begins[int(event["step"])].append(int(event["begin"]))
            ends[int(event["step"])].append(int(event["end"]))
            segments = max(segments, int(event["segment"]) + 1)
    front = max(part.begin for part in call.parts.values())
    for step in sorted(begins):
        end = max(ends[step])
        known = segments == 1 and predicted is not None and step < len(predicted)
        yield {
            "step": step,
            "begin": (min(begins[step]) - start) / SECOND,
            "end": (end - start) / SECOND,
            "seconds": max(end - front, 0) / SECOND,
            "predicted": predicted[step] if known and predicted is not None else None,
        }
        front = max(front, end)


def critical_path(call: CollectiveCall, posts: Posts, start: int = 0) -> list[dict[str, Any]]:
    """What the end of a call has waited for, in the order of time: pieces of ``{"rank", "begin", "end", "what"}``.

    ``what`` is "work", on that rank, or "link", from the post of a message on ``rank`` to its arrival on ``to``. The
    path is followed from the last end backwards: from a wait to the rank that it has waited for.
    """
    ranks = call.group.ranks
    local = max(call.parts, key=lambda each: call.parts[each].end)
    now = call.parts[local].end
    path: list[dict[str, Any]] = []
    for _ in range(sum(len(part.inner) for part in call.parts.values()) + 1):
        part = call.parts[local]
        wait = _last_wait(call, part, now)
        begin = part.begin if wait is None else int(wait["end"])
        path.append(_piece(ranks[local], min(begin, now), now, "work", start))
        if wait is None:
            break
        now, peer = begin, int(wait["peer"])
        posted = _posted(call, local, wait, posts)
        if posted is not None:
            path.append({**_piece(ranks[peer], min(posted, now), now, "link", start), "to": ranks[local]})
            now = min(posted, now)
        local = peer
    return [piece for piece in reversed(path) if piece["end"] > piece["begin"]]


def _last_wait(call: CollectiveCall, part: CallPart, before: int) -> Any:
    """The last wait of a rank for another recorded rank that has ended before a time; None if there is none."""
    found = None
    for number in part.inner.tolist():
        event = part.process.events[number]
        is_wait = event["kind"] == fmt.WAIT and int(event["peer"]) in call.parts and int(event["end"]) < before
        if is_wait and (found is None or event["end"] > found["end"]):
            found = event
    return found


def _piece(rank: int, begin: int, end: int, what: str, start: int) -> dict[str, Any]:
    return {"rank": rank, "begin": (begin - start) / SECOND, "end": (end - start) / SECOND, "what": what}


def _posts(calls: list[CollectiveCall]) -> Posts:
    """When each rank has posted its messages."""
    found: Posts = defaultdict(list)
    for call in calls:
        for local, part in call.parts.items():
            events = part.process.events[part.inner]
            for event in events[events["kind"] == fmt.SEND]:
                found[(*_place(call, event), local, int(event["peer"]))].append(int(event["begin"]))
    for each in found.values():
        each.sort()
    return found


def _place(call: CollectiveCall, event: Any) -> tuple[Any, ...]:
    return call.group.key, call.sequence, int(event["step"]), int(event["segment"])


def _posted(call: CollectiveCall, local: int, wait: Any, posts: Posts) -> int | None:
    """When the awaited rank has posted the last message that came before the end of a wait; None without messages."""
    times = posts.get((*_place(call, wait), int(wait["peer"]), local))
    if not times:
        return None
    return times[max(bisect.bisect_right(times, int(wait["end"])) - 1, 0)]
