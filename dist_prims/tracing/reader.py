"""Reader of the files of a trace: the events of all ranks, on one clock, as arrays.

>>> import numpy as np
>>> EVENTS.itemsize, EVENTS.names[:4]
(64, ('begin', 'end', 'bytes', 'sequence'))

A file belongs to one process. Files belong to one run if their groups have a token in common, which the ranks have
exchanged when the group was made. ``read()`` returns the last run in a folder.
"""

from __future__ import annotations

import json
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

_NAMES = ["begin", "end", "bytes", "sequence", "peer", "step", "thread", "group", "name", "segment"]
_NAMES += ["collective", "dtype", "op", "failed", "kind"]
EVENTS = np.dtype(
    {
        "names": _NAMES,
        "formats": ["<i8", "<i8", "<u8", "<u8", "<i4", "<i4", "<u4", "<u4", "<u4", "<u2", "u1", "u1", "u1", "u1", "u1"],
        "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 48, 52, 54, 55, 56, 57, 63],
        "itemsize": fmt.SLOT,
    }
)
Events = NDArray[np.void]


@dataclass(frozen=True)
class Group:
    """A group of a trace: the key that its ranks share, its global ranks, and the rank of one process in it."""

    key: tuple[str, str, str]  # name, counter, token
    rank: int
    ranks: tuple[int, ...]
    facts: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        return self.key[0]


@dataclass(frozen=True, eq=False)
class ProcessTrace:
    """The events of one process. ``python`` and ``cpp`` number their groups and names apart; so ``group_of`` and
    ``name_of`` take the source, "python" or "cpp"."""

    path: Path
    facts: dict[str, Any]
    events: Events  # of both sources, in the order of their begin
    is_cpp: NDArray[np.bool_]  # of each event
    groups: dict[tuple[bool, int], Group]
    names: dict[tuple[bool, int], str]
    clocks: list[dict[str, Any]]  # measurements of the offset to the reference clock
    dropped: int
    unfinished: int
    ended: bool
    shift: int = 0  # nanoseconds that were added to the times
    error: int = 0  # of that shift

    @cached_property
    def rank(self) -> int:
        """The rank in the largest group, which is the job's as far as the trace shows it."""
        if self.groups:
            largest = max(self.groups.values(), key=lambda group: len(group.ranks))
            return largest.ranks[largest.rank]
        return int(self.facts.get("rank") or 0) if str(self.facts.get("rank") or 0).isdigit() else 0

    @property
    def tokens(self) -> set[str]:
        return {group.key[2] or f"{group.name} {group.ranks}" for group in self.groups.values()}

    def group_of(self, number: int) -> Group | None:
        """The group of the event with this number."""
        return self.groups.get((bool(self.is_cpp[number]), int(self.events["group"][number])))

    def name_of(self, number: int) -> str:
        """The name of the event with this number; empty if it has none."""
        return self.names.get((bool(self.is_cpp[number]), int(self.events["name"][number])), "")


@dataclass(frozen=True)
class CallPart:
    """One rank's part in a call: its begin and end, and the numbers of the events within it."""

    begin: int
    end: int
    process: ProcessTrace
    event: int
    inner: NDArray[np.int64]

    @property
    def failed(self) -> bool:
        return bool(self.process.events["failed"][self.event])


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of a group, on all ranks that have recorded it. ``parts``: by rank of the group."""

    group: Group
    what: str
    algorithm: str  # empty: the slot exchange of one host
    sequence: int
    nbytes: int
    root: int
    parts: dict[int, CallPart]

    @property
    def begin(self) -> int:
        return min(part.begin for part in self.parts.values())

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts.values())


@dataclass(frozen=True)
class Trace:
    """The processes of a run, by rank; ``ignored``: the files of other runs, and those that are no trace."""

    ranks: dict[int, ProcessTrace]
    ignored: list[str]

    @property
    def dropped(self) -> int:
        return sum(process.dropped for process in self.ranks.values())

    def calls(self) -> list[CollectiveCall]:
        """The collectives, in the order of their begin."""
        found: dict[tuple[Any, int], CollectiveCall] = {}
        for process in self.ranks.values():
            for (key, sequence), (group, part) in _parts(process):
                event = process.events[part.event]
                call = found.get((key, sequence))
                if call is None:
                    what = collective_name(event)
                    name, nbytes, root = process.name_of(part.event), int(event["bytes"]), int(event["peer"])
                    call = found[key, sequence] = CollectiveCall(group, what, name, sequence, nbytes, root, {})
                call.parts[group.rank] = part
        return sorted(found.values(), key=lambda call: call.begin)


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
    last = max(runs, key=lambda run: max(each.facts["began"] for each in run))
    ignored += [f"{each.path.name}: an earlier trace" for run in runs if run is not last for each in run]
    return Trace(aligned(_by_rank(last, ignored)), ignored)


def read_file(path: Path) -> ProcessTrace:
    """Read the file of one process; ValueError if it is not one."""
    # 1. The header: is this a whole trace of this version?
    data = path.read_bytes()
    if len(data) < fmt.HEADER_BYTES or int.from_bytes(data[:8], "little") != fmt.MAGIC:
        raise ValueError("not a trace")
    _, version, capacity, offset, taken, dropped, python, ended = fmt.HEADER.unpack_from(data)
    if version != fmt.VERSION:
        raise ValueError(f"of format {version}; this version reads format {fmt.VERSION}")
    if offset + capacity * fmt.SLOT > len(data) or fmt.HEADER_BYTES + python * fmt.SLOT > len(data):
        raise ValueError("incomplete")
    # 2. The slots: Python's follow the header, C++'s begin at ``offset``.
    written = min(taken, capacity)
    sources = [
        np.frombuffer(data, EVENTS, python, fmt.HEADER_BYTES),
        np.frombuffer(data, EVENTS, written, offset),
    ]
    # 3. Texts are spread over slots; all other slots are events, which are sorted by their begin.
    texts = [_texts(source) for source in sources]
    process = [*texts[0].get(fmt.PROCESS, {}).values()]
    if not process:
        raise ValueError("without a description of its process")
    events = [source[np.isin(source["kind"], [*fmt.KINDS])] for source in sources]
    whole = np.concatenate(events)
    order = np.argsort(whole["begin"], kind="stable")
    # 4. Python and C++ number groups and names each for themselves.
    numbered = [(cpp, found) for cpp, found in zip((False, True), texts, strict=True)]
    return ProcessTrace(
        path=path,
        facts=_facts(process[0]),
        events=whole[order],
        is_cpp=np.repeat([False, True], [len(each) for each in events])[order],
        groups={
            (cpp, n): group
            for cpp, found in numbered
            for n, text in found.get(fmt.GROUP, {}).items()
            if (group := _group(text))
        },
        names={(cpp, n): text for cpp, found in numbered for n, text in found.get(fmt.NAME, {}).items()},
        clocks=[*filter(None, map(_clock, texts[0].get(fmt.CLOCK, {}).values()))],
        dropped=dropped + max(taken - capacity, 0),
        unfinished=int((sources[1]["kind"] == 0).sum()),
        ended=bool(ended),
    )


def _texts(slots: Events) -> dict[int, dict[int, str]]:
    """The texts among slots: by kind, by number."""
    pieces: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
    raw = slots.view(np.uint8).reshape(len(slots), fmt.SLOT)  # a copy of the fields would lack what is between them
    for slot in raw[slots["kind"] == fmt.TEXT_SLOT]:
        number, part, length, text, kind, _ = fmt.TEXT.unpack(slot.tobytes())
        pieces[kind, number][part] = text[:length]
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for (kind, number), parts in pieces.items():
        if sorted(parts) == list(range(len(parts))):
            found[kind][number] = b"".join(parts[at] for at in range(len(parts))).decode(errors="replace")
    return found


def _group(text: str) -> Group | None:
    """The group of a description; None for a damaged one, such as the last text of a killed process."""
    try:
        facts = json.loads(text)
        ranks, rank = tuple(map(int, facts["ranks"])), int(facts["rank"])
        key = (str(facts["name"]), str(facts["counter"]), str(facts.get("token", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return Group(key, rank, ranks, facts) if 0 <= rank < len(ranks) else None


def _clock(text: str) -> dict[str, Any] | None:
    """A measurement of the clock; None for a damaged one."""
    try:
        facts = json.loads(text)
        numbers = {name: int(facts[name]) for name in ("at", "offset", "error")}
        return {**numbers, "reference": str(facts["reference"])}
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _facts(text: str) -> dict[str, Any]:
    """The description of a process."""
    facts = json.loads(text)
    wanted = {"pid": int, "host": str, "clock": str, "number": int, "began": int}
    if not (isinstance(facts, dict) and all(isinstance(facts.get(name), kind) for name, kind in wanted.items())):
        raise ValueError("the description of its process is damaged")
    return facts


def _runs(processes: Sequence[ProcessTrace]) -> list[list[ProcessTrace]]:
    """The processes by run: those are together that share a token of a group, in the same trace of the program."""
    runs: list[tuple[set[tuple[str, int]], list[ProcessTrace]]] = []
    for process in processes:
        number = int(process.facts["number"])
        marks = {(token, number) for token in process.tokens} or {(str(process.path), 0)}
        same = [run for run in runs if run[0] & marks]
        rest = [run for run in runs if not run[0] & marks]
        runs = [*rest, (marks.union(*(run[0] for run in same)), [*(p for run in same for p in run[1]), process])]
    return [run for _, run in runs]


def _by_rank(processes: Iterable[ProcessTrace], ignored: list[str]) -> dict[int, ProcessTrace]:
    found: dict[int, ProcessTrace] = {}
    for process in sorted(processes, key=lambda each: int(each.facts["began"])):
        if process.rank in found:
            ignored.append(f"{found[process.rank].path.name}: an earlier process of rank {process.rank}")
        found[process.rank] = process
    return dict(sorted(found.items()))


def _parts(process: ProcessTrace) -> Iterator[tuple[tuple[Any, int], tuple[Group, CallPart]]]:
    """The calls of a process: (key of the group, number of the call), the group, and this rank's part."""
    events = process.events
    numbers = np.arange(len(events))
    is_call = events["kind"] == fmt.COLLECTIVE
    inner = defaultdict(list)
    for number in numbers[~is_call & (events["group"] > 0)].tolist():
        event = events[number]
        inner[bool(process.is_cpp[number]), int(event["group"]), int(event["sequence"])].append(number)
    for number in numbers[is_call].tolist():
        group = process.group_of(number)
        if group is None:
            continue
        event = events[number]
        key = (bool(process.is_cpp[number]), int(event["group"]), int(event["sequence"]))
        own = np.array(inner.get(key, []), np.int64)
        begin, end = int(event["begin"]), int(event["end"])
        own = own[(events["end"][own] >= begin) & (events["begin"][own] <= end)]
        part = CallPart(begin, end, process, number, own)
        yield ((group.key, int(event["sequence"])), (group, part))


def collective_name(event: Any) -> str:
    number = int(event["collective"])
    return fmt.COLLECTIVES[number] if number < len(fmt.COLLECTIVES) else f"collective {number}"


_DRIFT = 1e-4  # by which two clocks may differ in speed, beyond the first and the last measurement


def aligned(processes: dict[int, ProcessTrace]) -> dict[int, ProcessTrace]:
    """The processes on one clock: that to which the others have measured their offset."""
    points: dict[str, list[dict[str, Any]]] = defaultdict(list)
    references = Counter(point["reference"] for process in processes.values() for point in process.clocks)
    for process in processes.values():
        if references and process.facts["clock"] != (reference := references.most_common(1)[0][0]):
            points[process.facts["clock"]] += [each for each in process.clocks if each["reference"] == reference]
    return {rank: _shifted(process, points[process.facts["clock"]]) for rank, process in processes.items()}


def _shifted(process: ProcessTrace, points: list[dict[str, Any]]) -> ProcessTrace:
    """The process with the offset added to its times, interpolated between the measurements of its clock."""
    if not points or not len(process.events):
        return process
    points = sorted(points, key=lambda point: point["at"])
    at, offset, error = (np.array([point[name] for point in points], np.int64) for name in ("at", "offset", "error"))
    events = process.events.copy()
    begin, end = int(events["begin"].min()), int(events["end"].max())
    for side in ("begin", "end"):  # as differences, because a float holds no absolute time to the nanosecond
        apart = np.interp((events[side] - at[0]).astype(float), (at - at[0]).astype(float), offset - offset[0])
        events[side] += offset[0] + np.rint(apart).astype(np.int64)
    outside = max(int(at[0]) - begin, end - int(at[-1]), 0)
    shift = int(offset[len(offset) // 2])
    return replace(process, events=events, shift=shift, error=int(error.max()) + int(outside * _DRIFT))
