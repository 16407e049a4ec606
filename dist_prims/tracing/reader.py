"""Reader of the files of a trace: the events of all ranks, on one clock, as arrays.

A file belongs to one process. Files belong to one run if their groups have a token in common, which the ranks have
exchanged when the group was made. ``read()`` returns the last run in a folder, with the times of all processes on one
clock. Times are nanoseconds.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import format as fmt

__all__: list[str] = []

_OFFSETS = [struct.calcsize(f"<{fmt.EVENT_TYPES[:number]}") for number in range(len(fmt.EVENT_TYPES) - 1)]
EVENTS = np.dtype(
    {
        "names": fmt.EVENT_FIELDS,
        "formats": [f"<{code}" for code in fmt.EVENT_TYPES],
        "offsets": [*_OFFSETS, fmt.SLOT - 1],  # the last field is the last byte of the slot
        "itemsize": fmt.SLOT,
    }
)
Events = NDArray[np.void]


@dataclass(frozen=True)
class Group:
    """A group of a trace, as one process has described it."""

    key: tuple[str, str, str]  # the same on all its ranks: name, what its calls are counted by, token
    rank: int  # of the process in the group
    ranks: tuple[int, ...]  # the global ranks of its members
    facts: dict[str, Any] = field(compare=False)  # the whole description

    @property
    def name(self) -> str:
        return self.key[0]


@dataclass(frozen=True, eq=False)
class ProcessTrace:
    """The events of one process. Python and C++ number their groups and names apart, so a key of ``groups`` and
    ``names`` is (whether C++ has given the number, number)."""

    path: Path
    facts: dict[str, Any]  # the description of the process, see recorder.py
    events: Events  # of Python and C++, in the order of their begin
    is_cpp: NDArray[np.bool_]  # for each event, whether C++ has recorded it
    groups: dict[tuple[bool, int], Group]
    names: dict[tuple[bool, int], str]
    clocks: list[dict[str, Any]]  # measurements of the offset to the clock of rank 0, see clock.py
    dropped: int  # events for which the file had no slot
    unfinished: int  # events that had begun to be written when the process was killed
    ended: bool
    shift: int = 0  # was added to the times, to bring them to the clock of rank 0
    error: int = 0  # the largest error of the shift

    @cached_property
    def rank(self) -> int:
        """The global rank, by the largest group; without groups, by the launcher's variable RANK."""
        if self.groups:
            largest = max(self.groups.values(), key=lambda group: len(group.ranks))
            return largest.ranks[largest.rank]
        return int(self.facts.get("rank") or 0) if str(self.facts.get("rank") or 0).isdigit() else 0

    @property
    def tokens(self) -> set[str]:
        """What only processes of the same run have in common: the tokens of the groups, or else names and ranks."""
        return {group.key[2] or f"{group.name} {group.ranks}" for group in self.groups.values()}

    def group_of(self, number: int) -> Group | None:
        """The group of the event with this number."""
        return self.groups.get((bool(self.is_cpp[number]), int(self.events["group"][number])))

    def name_of(self, number: int) -> str:
        """The name of the event with this number; empty if it has none."""
        return self.names.get((bool(self.is_cpp[number]), int(self.events["name"][number])), "")


@dataclass(frozen=True)
class CallPart:
    """One rank's part in a call."""

    begin: int
    end: int
    process: ProcessTrace
    event: int  # the index of the call itself in ``process.events``
    inner: NDArray[np.int64]  # the indices of the events within the call: messages, waits, copies, ...

    @property
    def failed(self) -> bool:
        return bool(self.process.events["failed"][self.event])


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of a group, on all ranks that have recorded it. ``parts``: by rank of the group."""

    group: Group
    what: str
    algorithm: str  # empty: the slot exchange of one host
    sequence: int  # the number of the call in the group
    nbytes: int
    root: int  # -1: a collective without a root
    parts: dict[int, CallPart]

    @property
    def begin(self) -> int:
        return min(part.begin for part in self.parts.values())

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts.values())

    @property
    def last_to_come(self) -> int:
        """The rank of the group that has begun the call last."""
        return max(self.parts, key=lambda rank: self.parts[rank].begin)


@dataclass(frozen=True)
class Trace:
    """The processes of a run, by rank; ``ignored``: the files of other runs, and files that are not traces."""

    ranks: dict[int, ProcessTrace]
    ignored: list[str]

    def calls(self) -> list[CollectiveCall]:
        """The collectives, in the order of their begin."""
        calls: dict[tuple[Any, int], CollectiveCall] = {}
        for process in self.ranks.values():
            for group, part in _call_parts(process):
                event = process.events[part.event]
                sequence = int(event["sequence"])
                call = calls.get((group.key, sequence))
                if call is None:
                    what, algorithm = collective_name(event), process.name_of(part.event)
                    nbytes, root = int(event["bytes"]), int(event["peer"])
                    call = CollectiveCall(group, what, algorithm, sequence, nbytes, root, {})
                    calls[group.key, sequence] = call
                call.parts[group.rank] = part
        return sorted(calls.values(), key=lambda call: call.begin)


def read(folder: Path | str) -> Trace:
    """Read the last run in a folder; ValueError if it has no trace."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} does not exist or is not a folder; name the folder of DIST_PRIMS_TRACE in the job")
    processes: list[ProcessTrace] = []
    ignored: list[str] = []
    for path in sorted(Path(folder).glob("*.trace")):
        try:
            processes.append(read_file(path))
        except ValueError as error:
            ignored.append(f"{path.name}: {error}")
    if not processes:
        others = f" ({'; '.join(ignored)})" if ignored else ""
        raise ValueError(f"{folder} has no trace{others}; set DIST_PRIMS_TRACE to the folder before the job starts")
    runs = _runs(processes)
    last_run = max(runs, key=lambda run: max(process.facts["began"] for process in run))
    earlier = [process for run in runs if run is not last_run for process in run]
    ignored += [f"{process.path.name}: an earlier trace" for process in earlier]
    return Trace(aligned(_by_rank(last_run, ignored)), ignored)


def read_file(path: Path) -> ProcessTrace:
    """Read the file of one process; ValueError if the file is not a whole trace."""
    # 1. The header: is this a whole trace of this version?
    data = path.read_bytes()
    if len(data) < fmt.HEADER_BYTES or int.from_bytes(data[:8], "little") != fmt.MAGIC:
        raise ValueError("not a trace")
    header = fmt.TraceHeader(*fmt.HEADER.unpack_from(data))
    if header.version != fmt.VERSION:
        raise ValueError(f"of format {header.version}; this version reads format {fmt.VERSION}")
    ends = header.cpp_offset + header.cpp_slots * fmt.SLOT, fmt.HEADER_BYTES + header.python_slots * fmt.SLOT
    if max(ends) > len(data):
        raise ValueError("incomplete")
    # 2. The slots of the two sources, Python and C++.
    sources = [
        np.frombuffer(data, EVENTS, header.python_slots, fmt.HEADER_BYTES),
        np.frombuffer(data, EVENTS, min(header.cpp_taken, header.cpp_slots), header.cpp_offset),
    ]
    # 3. Texts are spread over slots; all other slots are events, which are sorted by their begin.
    texts = [_texts(source) for source in sources]
    process = [*texts[0].get(fmt.PROCESS, {}).values()]
    if not process:
        raise ValueError("without a description of its process")
    events = [source[np.isin(source["kind"], [*fmt.KINDS])] for source in sources]
    whole = np.concatenate(events)
    order = np.argsort(whole["begin"], kind="stable")
    # 4. Python and C++ number groups and names each for themselves, so a key says which of them has given the number.
    numbered = [*zip((False, True), texts, strict=True)]
    return ProcessTrace(
        path=path,
        facts=_facts(process[0]),
        events=whole[order],
        is_cpp=np.repeat([False, True], [len(each) for each in events])[order],
        groups={
            (is_cpp, number): group
            for is_cpp, by_kind in numbered
            for number, text in by_kind.get(fmt.GROUP, {}).items()
            if (group := _group(text))
        },
        names={(is_cpp, n): text for is_cpp, by_kind in numbered for n, text in by_kind.get(fmt.NAME, {}).items()},
        clocks=[*filter(None, map(_clock_measurement, texts[0].get(fmt.CLOCK, {}).values()))],
        dropped=header.dropped + max(header.cpp_taken - header.cpp_slots, 0),
        unfinished=int((sources[1]["kind"] == 0).sum()),
        ended=bool(header.ended),
    )


def _texts(slots: Events) -> dict[int, dict[int, str]]:
    """The texts among the slots, by kind and number; a text of which a piece is missing is left out."""
    pieces: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
    raw = slots.view(np.uint8).reshape(len(slots), fmt.SLOT)  # a copy of the fields would lack what is between them
    for slot in raw[slots["kind"] == fmt.TEXT_SLOT]:
        number, part, length, text, kind, _ = fmt.TEXT.unpack(slot.tobytes())
        pieces[kind, number][part] = text[:length]
    texts: dict[int, dict[int, str]] = defaultdict(dict)
    for (kind, number), parts in pieces.items():
        if sorted(parts) == list(range(len(parts))):
            texts[kind][number] = b"".join(parts[at] for at in range(len(parts))).decode(errors="replace")
    return texts


def _group(text: str) -> Group | None:
    """The group of a description; None for a damaged one, such as the last text of a killed process."""
    try:
        facts = json.loads(text)
        ranks, rank = tuple(map(int, facts["ranks"])), int(facts["rank"])
        key = (str(facts["name"]), str(facts["counter"]), str(facts.get("token", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return Group(key, rank, ranks, facts) if 0 <= rank < len(ranks) else None


def _clock_measurement(text: str) -> dict[str, Any] | None:
    """One measurement of clock.py: ``offset`` and ``error`` at the time ``at``; None for a damaged one."""
    try:
        facts = json.loads(text)
        numbers = {name: int(facts[name]) for name in ("at", "offset", "error")}
        return {**numbers, "reference": str(facts["reference"])}
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _facts(text: str) -> dict[str, Any]:
    """The description of a process; ValueError if it is damaged."""
    facts = json.loads(text)
    types = {"pid": int, "host": str, "clock": str, "number": int, "began": int}
    if not (isinstance(facts, dict) and all(isinstance(facts.get(name), type_) for name, type_ in types.items())):
        raise ValueError("the description of its process is damaged")
    return facts


def _runs(processes: Sequence[ProcessTrace]) -> list[list[ProcessTrace]]:
    """The processes of each run. Processes of one run share a token of a group, in traces of the same number: a program
    may make several traces one after the other, and its processes number them."""
    runs: list[tuple[set[tuple[str, int]], list[ProcessTrace]]] = []  # the tokens of a run, and its processes
    for process in processes:
        number = int(process.facts["number"])
        tokens = {(token, number) for token in process.tokens} or {(str(process.path), 0)}
        members: list[ProcessTrace] = []
        for run in [run for run in runs if run[0] & tokens]:  # the process shows that these runs are the same
            runs.remove(run)
            tokens |= run[0]
            members += run[1]
        runs.append((tokens, [*members, process]))
    return [members for _, members in runs]


def _by_rank(processes: Iterable[ProcessTrace], ignored: list[str]) -> dict[int, ProcessTrace]:
    """The last process of each rank: a launcher may have started a rank again. The earlier ones are ignored."""
    last: dict[int, ProcessTrace] = {}
    for process in sorted(processes, key=lambda process: int(process.facts["began"])):
        if process.rank in last:
            ignored.append(f"{last[process.rank].path.name}: an earlier process of rank {process.rank}")
        last[process.rank] = process
    return dict(sorted(last.items()))


def _call_parts(process: ProcessTrace) -> Iterator[tuple[Group, CallPart]]:
    """For each collective of a process its group, and the part of the process in the call."""
    events = process.events
    indices = np.arange(len(events))
    is_call = events["kind"] == fmt.COLLECTIVE

    def call_of(index: int) -> tuple[bool, int, int]:
        """What a call and the events within it have in common: source, group, and number of the call."""
        return bool(process.is_cpp[index]), int(events["group"][index]), int(events["sequence"][index])

    # 1. The events of each call.
    within = defaultdict(list)
    for index in indices[~is_call & (events["group"] > 0)].tolist():
        within[call_of(index)].append(index)
    # 2. Of these, the events that overlap with the call in time. Its time in the queue, for example, ends before it.
    for index in indices[is_call].tolist():
        if (group := process.group_of(index)) is not None:
            begin, end = int(events["begin"][index]), int(events["end"][index])
            inner = np.array(within.get(call_of(index), []), np.int64)
            inner = inner[(events["end"][inner] >= begin) & (events["begin"][inner] <= end)]
            yield group, CallPart(begin, end, process, index, inner)


def collective_name(event: Any) -> str:
    """The name of the collective of an event; a number that this version does not know is named by itself."""
    number = int(event["collective"])
    return fmt.COLLECTIVES[number] if number < len(fmt.COLLECTIVES) else f"collective {number}"


_DRIFT = 1e-4  # by which two clocks may differ in speed: an error before the first and after the last measurement


def aligned(processes: dict[int, ProcessTrace]) -> dict[int, ProcessTrace]:
    """The processes on one clock: the reference, to which processes with other clocks have measured their offset."""
    references = Counter(point["reference"] for process in processes.values() for point in process.clocks)
    reference = references.most_common(1)[0][0] if references else None
    measurements: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by clock
    for process in processes.values():
        if process.facts["clock"] != reference:
            measurements[process.facts["clock"]] += [each for each in process.clocks if each["reference"] == reference]
    return {rank: _shifted(process, measurements[process.facts["clock"]]) for rank, process in processes.items()}


def _shifted(process: ProcessTrace, measurements: list[dict[str, Any]]) -> ProcessTrace:
    """The process with the offset added to its times, interpolated between the measurements of its clock."""
    if not measurements or not len(process.events):
        return process
    measurements = sorted(measurements, key=lambda each: int(each["at"]))
    at, offset, error = (
        np.array([each[name] for each in measurements], np.int64) for name in ("at", "offset", "error")
    )
    events = process.events.copy()
    begin, end = int(events["begin"].min()), int(events["end"].max())
    for side in ("begin", "end"):  # as differences, because a float cannot hold an absolute time to the nanosecond
        change = np.interp((events[side] - at[0]).astype(float), (at - at[0]).astype(float), offset - offset[0])
        events[side] += offset[0] + np.rint(change).astype(np.int64)
    outside = max(int(at[0]) - begin, end - int(at[-1]), 0)
    shift = int(offset[len(offset) // 2])
    return replace(process, events=events, shift=shift, error=int(error.max()) + int(outside * _DRIFT))
