"""What the thread blocks of an MSCCL++ plan share: channels, semaphores, barriers, packets, starts and ends of ranks.

:mod:`.mscclpp` adds the operations; :meth:`PlanState.connect` adds the order between thread blocks and ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..schedule_error import ScheduleError
from .happens_before import Operation, OperationGraph, Place

__all__: list[str] = []

REMEDY = "a signal and a wait, a barrier, or a nop in one thread block must lie between them"
_KINDS = {int: "a number", str: "a text", list: "a list", dict: "an object", bool: "true or false"}


def field(fields: Any, name: str, kind: type) -> Any:
    """A field of a JSON object; ValueError if it is missing or of another kind."""
    if not isinstance(fields, dict) or name not in fields:
        raise ValueError(f"the field {name!r} is missing")
    value = fields[name]
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or str(value).startswith("-"))):
        raise ValueError(f"{name}={value!r:.50} is not {_KINDS[kind]}")
    return value


def field_list(fields: Any, name: str, kind: type) -> list[Any]:
    """A list of values of one kind."""
    return [field({name: each}, name, kind) for each in field(fields, name, list)]


def element(values: Sequence[Any], index: int, what: str) -> Any:
    if index >= len(values):
        raise ValueError(f"{what} {index} does not exist; there are {len(values)}")
    return values[index]


class PlanState:
    """What the thread blocks of all ranks have in common: channels, barriers, packets, starts and ends."""

    def __init__(self, graph: OperationGraph, gpus: dict[int, Any]) -> None:
        self.graph, self.gpus = graph, gpus
        ranks = range(len(gpus))
        self.start, self.end = (
            [graph.add(Operation(f"the {end} of rank {rank}", is_boundary=True)) for rank in ranks]
            for end in ("start", "end")
        )
        # By channel or semaphore, the signals and waits in the order of their thread block: (operation, is relaxed).
        self.signals: dict[Any, list[tuple[int, bool]]] = defaultdict(list)
        self.waits: dict[Any, list[tuple[int, bool]]] = defaultdict(list)
        self.proxies: dict[Any, int] = {}  # the last operation of the proxy of a port channel
        # By rank, number of the barrier and how often it was used before: its operation, and the num_threadblocks that
        # each thread block gives for it.
        self.barriers: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        for start, end in zip(self.start, self.end, strict=True):  # also of a rank without thread blocks
            graph.order(start, end)
        self.packet_writers: dict[Place, tuple[int, int]] = {}  # (operation, its rank)
        self.packet_readers: list[tuple[int, Place]] = []
        self.plain_scratch: set[Place] = set()  # scratch that is accessed without packets
        self.reductions: set[str] = set()  # the names of the operations of reductions, such as "sum"

    def channel(self, rank: int, kind: str, index: int) -> tuple[int, int, int]:
        """(rank, peer, number among its channels to this peer) of a channel of a GPU."""
        lists = [each for each in field(self.gpus[rank], "channels", list) if field(each, "channel_type", str) == kind]
        peers = [peer for each in lists for peer in field_list(each, "connected_to", int)]
        peer = element(peers, index, f"{kind} channel")
        if peer == rank or peer not in self.gpus:
            raise ValueError(f"{kind} channel {index} is connected to {peer}, which is not another rank")
        return rank, peer, peers[:index].count(peer)

    def connect(self, plan: dict[str, Any]) -> None:
        """Order waits after signals and packet readers after writers, and check starts and ends."""
        graph = self.graph
        # 1. Pairs: a signal and its wait, a packet and its reader.
        for key in sorted({*self.signals, *self.waits}, key=str):
            self._match(key)
        for number, place in self.packet_readers:
            if (writer := self.packet_writers.get(place)) is None:
                what = f"{graph.operations[number].name} waits for packets in {graph.buffers.name(*place)}"
                raise ScheduleError(f"deadlock: {what} of rank {place[0]}, which no operation writes")
            graph.order(writer[0], number)
        # 2. What the plan must have to be run at all.
        for number, counts in self.barriers.values():
            if set(counts) != {len(counts)}:
                blocks = f"{len(counts)} thread blocks reach {graph.operations[number].name}"
                raise ScheduleError(f"deadlock: {blocks}, but num_threadblocks is {counts}")
        if self.packet_writers and field(plan, "protocol", str) != "LL":
            raise ValueError(f"protocol={plan['protocol']!r}: a plan with packets must have the protocol LL")
        packets = {*self.packet_writers, *(place for _, place in self.packet_readers)}
        if mixed := {rank for rank, _ in packets} & {rank for rank, _ in self.plain_scratch}:
            raise ValueError(f"the scratch of rank {min(mixed)} is accessed with packets and without, which overlap")
        if len(self.reductions) > 1:
            raise ValueError(f"the plan reduces by {' and '.join(sorted(self.reductions))}; one of them is required")
        # 3. The memory of a rank belongs to the plan between its start and its end, which therefore write all of it.
        for rank in self.gpus:
            places = [(rank, chunk) for chunk in graph.buffers.inputs(rank)]
            places += sorted(place for place in self.plain_scratch if place[0] == rank)
            graph.operations[self.start[rank]].writes += places
            graph.operations[self.end[rank]].writes += places
        # 4. Races between signals of one channel, and with the next call.
        happened = graph.happens_before()
        if self.packet_writers and not field(plan, "use_double_scratch_buffer", bool):
            self._check_packets_of_next_call(happened)
        for ends in (*self.signals.values(), *self.waits.values()):
            for (first, _), (second, _) in pairwise(ends):
                if not happened[second] >> first & 1:
                    names = f"{graph.operations[first].name} and {graph.operations[second].name}"
                    raise ScheduleError(f"race: {names} use one channel, and either may come first: {REMEDY}")

    def _check_packets_of_next_call(self, happened: Sequence[int]) -> None:
        """Without a second scratch buffer, the next call of a rank overwrites the packets that it has written."""
        for number, place in self.packet_readers:
            rank = self.packet_writers[place][1]
            if not happened[self.end[rank]] >> number & 1:
                what = f"{self.graph.operations[number].name} reads {self.graph.buffers.name(*place)}"
                when = f"may do so after the end of rank {rank}, which then overwrites it in the next call"
                raise ScheduleError(f"race: {what}, and {when}: set use_double_scratch_buffer")

    def _match(self, key: Any) -> None:
        """Order each wait of a channel or semaphore after its signal. ScheduleError if the numbers of both differ."""
        signals, waits = self.signals[key], self.waits[key]
        free = 0  # waits that need no signal
        if key[0] == "semaphore":
            _, rank, index = key
            semaphore = element(field(self.gpus[rank], "semaphores", list), index, "semaphore")
            free = field(semaphore, "init_value", int)
        names = [[self.graph.operations[number].name for number, _ in each] for each in (signals, waits)]
        if len(waits) > len(signals) + free:
            raise ScheduleError(f"deadlock: {names[1][len(signals) + free]} waits for a signal that no operation sends")
        if len(waits) > len(signals):
            what = f"takes a part of init_value={free}, as {len(waits)} acquires have {len(signals)} releases"
            raise ScheduleError(f"{names[1][len(signals)]} {what}, so the next call would wait for one in vain")
        if len(waits) < len(signals):
            what = "has no wait, so the next call would take it for its own"
            raise ScheduleError(f"the signal of {names[0][len(waits)]} {what}")
        for (signal, is_relaxed), (wait, is_relaxed_too) in zip(signals, waits[free:], strict=False):
            if is_relaxed or is_relaxed_too:  # the wait says only that the other rank has begun
                self.graph.wait(signal, wait)
                self.graph.order(self.start[key[1]], wait)
            else:
                self.graph.order(signal, wait)
