"""A trace in the JSON format of Chrome's trace viewer, which Perfetto reads: https://ui.perfetto.dev.

A rank is a process of the viewer, a thread is a row. What may overlap on one thread (messages, steps of several
segments, buckets, collectives in the queue) is an asynchronous event with a row of its own. Times in the file are
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import format as fmt
from .reader import ProcessTrace, Trace, collective_name

__all__: list[str] = []

_OVERLAPPING = {fmt.QUEUED, fmt.STEP, fmt.SEND, fmt.RECEIVE, fmt.BUCKET}


def write_chrome(trace: Trace, path: Path | str) -> int:
    """Write the trace to a file; return the number of events."""
    start = min((int(each.events["begin"][0]) for each in trace.ranks.values() if len(each.events)), default=0)
    count = 0
    with Path(path).open("w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [')
        for number, event in enumerate(_events(trace, start)):
            file.write(("\n" if number == 0 else ",\n") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    return count


def _events(trace: Trace, start: int) -> Iterator[dict[str, Any]]:
    for rank, process in trace.ranks.items():
        name = f"rank {rank} on {process.facts['host']}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for number in range(len(process.events)):
            yield from _viewer_events(process, rank, number, start)


def _viewer_events(process: ProcessTrace, rank: int, number: int, start: int) -> Iterator[dict[str, Any]]:
    """Event ``number`` of a process for the viewer: one complete event, or the begin and end of an asynchronous one."""
    event = process.events[number]
    kind = int(event["kind"])
    begin, end = (int(event["begin"]) - start) / 1e3, (int(event["end"]) - start) / 1e3
    common = {"name": _title(process, number), "cat": fmt.KINDS[kind], "pid": rank, "tid": int(event["thread"])}
    arguments = _arguments(process, number)
    if kind not in _OVERLAPPING:
        yield {**common, "ph": "X", "ts": begin, "dur": end - begin, "args": arguments}
        return
    identity = f"{rank}.{number}"
    yield {**common, "ph": "b", "id": identity, "ts": begin, "args": arguments}
    yield {**common, "ph": "e", "id": identity, "ts": end}


def _title(process: ProcessTrace, number: int) -> str:
    """What the viewer writes into the bar of an event, such as "send to rank 1"."""
    event, name = process.events[number], process.name_of(number)
    kind, peer = int(event["kind"]), int(event["peer"])
    group = process.group_of(number)
    other = f"rank {group.ranks[peer] if group and peer < len(group.ranks) else peer}" if peer >= 0 else ""
    if kind in (fmt.COLLECTIVE, fmt.QUEUED):
        what = collective_name(event) + (f" ({name})" if name else "")
        return what if kind == fmt.COLLECTIVE else f"{what} in the queue"
    if kind == fmt.STEP:
        return f"step {event['step']}, segment {event['segment']}"
    if name:
        return name
    word = {fmt.SEND: "send to", fmt.RECEIVE: "receive from", fmt.WAIT: "wait for"}.get(kind)
    return f"{word} {other}" if word and other else fmt.KINDS[kind]


def _arguments(process: ProcessTrace, number: int) -> dict[str, Any]:
    """What the viewer shows of a selected event."""
    event, group = process.events[number], process.group_of(number)
    arguments: dict[str, Any] = {"bytes": int(event["bytes"]), "call": int(event["sequence"])}
    if group:
        arguments["group"] = group.name
    if event["step"] >= 0:
        arguments["step"] = int(event["step"])
    if event["failed"]:
        arguments["failed"] = True
    return arguments
