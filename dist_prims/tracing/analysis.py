"""Analysis of a trace: where the time of each rank went, and measured beside predicted time for each call and step.

The results are plain dicts and lists, which can be written as JSON. All times in them are seconds; ``begin`` and
``end`` count from the beginning of the first collective. ``docs/tracing.md`` describes the fields. Times of the trace
itself are nanoseconds. *Posting* a message is the moment in which its sender hands it over; a *local* rank is the rank
within the group of a call.
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
SECOND = 1e9  # nanoseconds

# (group, call, step, segment, sender, receiver): the times at which the sender has posted these messages, ascending
Posts = dict[tuple[Any, ...], list[int]]


def analyse(trace: Trace, levels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the analysis of a trace.

    ``levels``: the costs of messages, as ``bench calibrate`` writes them; by default the costs that the groups had.

    - ``ranks``: see :func:`rank_summaries`.
    - ``calls``: each collective, see :func:`call_summary`, with its critical path, see :func:`critical_path`.
    """
    calls = trace.calls()
    posts = _post_times(calls)
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
    not sent yet (``late``) or for the link (``link``), reduced, and copied; ``waits``: the seconds of waiting by the
    global rank that was awaited."""
    # 1. What the process itself says, and zeros.
    summaries: dict[int, dict[str, Any]] = {}
    for rank, process in trace.ranks.items():
        summaries[rank] = {
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
            "actions": _summarise_actions(process),
            "waits": defaultdict(float),
        }
    # 2. Add each call to the ranks that were in it.
    for call in calls:
        for local, part in call.parts.items():
            rank = call.group.ranks[local]
            if rank in summaries:
                _add_part(summaries[rank], call, local, part, posts)
        last = call.group.ranks[call.last_to_come]
        if last in summaries and len(call.parts) > 1:
            summaries[last]["last_to_come"] += 1
    # 3. Keys of JSON are texts.
    for summary in summaries.values():
        summary["waits"] = {str(peer): seconds for peer, seconds in sorted(summary["waits"].items())}
    return list(summaries.values())


def _summarise_actions(process: ProcessTrace) -> dict[str, float] | None:
    """The actions of a pipeline: their number, seconds in them, and seconds from the first begin to the last end."""
    actions = process.events[process.events["kind"] == fmt.ACTION]
    if not len(actions):
        return None
    busy, span = (actions["end"] - actions["begin"]).sum(), actions["end"].max() - actions["begin"].min()
    return {"count": len(actions), "seconds": float(busy) / SECOND, "span": float(span) / SECOND}


def _add_part(summary: dict[str, Any], call: CollectiveCall, local: int, part: CallPart, posts: Posts) -> None:
    """Add one rank's part in a call to the summary of the rank. A wait for a message is ``late`` until the peer has
    posted the message, and ``link`` afterwards; a wait without a message, in a slot exchange, is late as a whole."""
    summary["calls"] += 1
    summary["in_calls"] += (part.end - part.begin) / SECOND
    events = part.process.events
    for number in part.inner.tolist():
        event = events[number]
        kind, seconds = int(event["kind"]), float(event["end"] - event["begin"]) / SECOND
        if kind in (fmt.REDUCE, fmt.COPY):
            summary[fmt.KINDS[kind]] += seconds
        elif kind == fmt.WAIT and 0 <= event["peer"] < len(call.group.ranks):
            posted = _post_of_awaited(call, local, event, posts)
            late = seconds
            if posted is not None:
                late = max(min(posted - int(event["begin"]), event["end"] - event["begin"]), 0) / SECOND
            summary["late"] += late
            summary["link"] += seconds - late
            summary["waits"][call.group.ranks[int(event["peer"])]] += seconds


def call_summary(call: CollectiveCall, start: int = 0, levels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One collective. ``arrival`` is the time from the begin of the first rank to the begin of the last rank,
    ``seconds`` the time from there to the last end. ``predicted`` is the prediction of ``seconds`` by the cost model;
    None without a schedule or its topology. ``start``: the time that is 0 in the result."""
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
        "last_to_come": call.group.ranks[call.last_to_come],
        "seconds": max(call.end - last, 0) / SECOND,
        "predicted": None if predicted is None else sum(predicted),
        "steps": list(_step_summaries(call, predicted, start)),
    }


def _step_summaries(call: CollectiveCall, predicted: list[float] | None, start: int) -> Iterator[dict[str, Any]]:
    """The steps of a schedule: when the first rank began the step, when the last rank ended it, and ``seconds``, by
    which the end is later than the end of the step before. The seconds of all steps together are the time from the last
    arrival to the end of the last step."""
    # 1. The begin and end of each step on each rank.
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    segments = 1
    for part in call.parts.values():
        events = part.process.events[part.inner]
        for event in events[events["kind"] == fmt.STEP]:
            begins[int(event["step"])].append(int(event["begin"]))
            ends[int(event["step"])].append(int(event["end"]))
            segments = max(segments, int(event["segment"]) + 1)
    # 2. Measure each step from the end of the steps before. Steps of several segments overlap: they have no prediction.
    latest_end = max(part.begin for part in call.parts.values())
    predictions = predicted if predicted is not None and segments == 1 else []
    for step in sorted(begins):
        end = max(ends[step])
        yield {
            "step": step,
            "begin": (min(begins[step]) - start) / SECOND,
            "end": (end - start) / SECOND,
            "seconds": max(end - latest_end, 0) / SECOND,
            "predicted": predictions[step] if step < len(predictions) else None,
        }
        latest_end = max(latest_end, end)


def critical_path(call: CollectiveCall, posts: Posts, start: int = 0) -> list[dict[str, Any]]:
    """What the end of a call has waited for, in the order of time: pieces of ``{"rank", "begin", "end", "what"}``.

    ``what`` is "work" on ``rank``, or "link": from the post of a message on ``rank`` to its arrival on ``to``. The path
    is followed backwards from the last end: from a wait to the rank that it has waited for.
    """
    # 1. Begin with the rank that has ended last. ``local`` and ``now`` are where the path stands: a rank and a time.
    ranks = call.group.ranks
    local = max(call.parts, key=lambda each: call.parts[each].end)
    now = call.parts[local].end
    path: list[dict[str, Any]] = []
    for _ in range(sum(len(part.inner) for part in call.parts.values()) + 1):  # each wait is passed once at most
        # 2. The rank has worked since the end of its last wait, or since the begin of the call.
        part = call.parts[local]
        wait = _last_wait(call, part, now)
        begin = part.begin if wait is None else int(wait["end"])
        path.append(_piece(ranks[local], min(begin, now), now, "work", start))
        if wait is None:
            break
        # 3. It has waited for a message of the peer: on the link since the post. The path goes on with the peer.
        now, peer = begin, int(wait["peer"])
        posted = _post_of_awaited(call, local, wait, posts)
        if posted is not None:
            path.append({**_piece(ranks[peer], min(posted, now), now, "link", start), "to": ranks[local]})
            now = min(posted, now)
        local = peer
    return [piece for piece in reversed(path) if piece["end"] > piece["begin"]]


def _last_wait(call: CollectiveCall, part: CallPart, before: int) -> Any:
    """The last wait of a rank for another recorded rank that has ended before a time; None if there is none."""
    last = None
    for number in part.inner.tolist():
        event = part.process.events[number]
        is_wait = event["kind"] == fmt.WAIT and int(event["peer"]) in call.parts and int(event["end"]) < before
        if is_wait and (last is None or event["end"] > last["end"]):
            last = event
    return last


def _piece(rank: int, begin: int, end: int, what: str, start: int) -> dict[str, Any]:
    return {"rank": rank, "begin": (begin - start) / SECOND, "end": (end - start) / SECOND, "what": what}


def _post_times(calls: list[CollectiveCall]) -> Posts:
    """When each rank has posted its messages."""
    posts: Posts = defaultdict(list)
    for call in calls:
        for local, part in call.parts.items():
            events = part.process.events[part.inner]
            for event in events[events["kind"] == fmt.SEND]:
                posts[(*_step_of(call, event), local, int(event["peer"]))].append(int(event["begin"]))
    for times in posts.values():
        times.sort()
    return posts


def _step_of(call: CollectiveCall, event: Any) -> tuple[Any, ...]:
    return call.group.key, call.sequence, int(event["step"]), int(event["segment"])


def _post_of_awaited(call: CollectiveCall, local: int, wait: Any, posts: Posts) -> int | None:
    """When the awaited rank has posted the last message that came before the end of a wait; None without messages."""
    times = posts.get((*_step_of(call, wait), int(wait["peer"]), local))
    if not times:
        return None
    return times[max(bisect.bisect_right(times, int(wait["end"])) - 1, 0)]
