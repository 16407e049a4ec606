"""Schedules as MSCCL algorithms: a thread block for each peer and direction, with dependencies between them.

In a step, a rank first sends, then copies what a local transfer reads and the step overwrites, then writes row by row.
A thread block depends on another one where both access a chunk and one of them writes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..steps import ScheduleData
from .buffers import named_lengths, places

__all__: list[str] = []

_SLOTS = 2  # the chunks of Simple that a connection holds
Block = tuple[int, int]  # a thread block: the peer that it sends to and the peer that it receives from, -1 for none
OperationId = tuple[Block, int]  # an operation: its thread block, and its place in it
Transfer = tuple[int, int, int, int, bool]  # a row of a step: src, dst, chunk, into, reduce


@dataclass
class _Operation:
    """A step of MSCCL. ``kind``: s(end), r(eceive), rrc (receive and reduce), cpy, re(duce) or nop. ``after``: the
    operation of another thread block for which it waits, if any."""

    kind: str
    src: int
    dst: int
    count: int
    after: list[OperationId]
    has_dependents: bool = False


@dataclass
class _Rank:
    """The thread blocks of a rank, and the last accesses of each of its chunks."""

    blocks: dict[Block, list[_Operation]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[int, OperationId] = field(default_factory=dict)  # by chunk, the last operation that writes it
    readers: dict[int, list[OperationId]] = field(default_factory=lambda: defaultdict(list))  # and the reads since then
    done: dict[tuple[Block, Block], int] = field(default_factory=dict)  # what a block knows to be done in another

    def add(self, block: Block, kind: str, src: int, dst: int, count: int = 1) -> None:
        """Append an operation to a thread block, after the operations of others that it must not overtake."""
        # 1. The operations of other thread blocks that access the same chunks, and that this one does not know as done.
        reads = range(src, src + count) if kind in ("s", "cpy", "re") else range(0)
        writes = range(dst, dst + count) if kind != "s" else range(0)
        earlier = [self.writer[chunk] for chunk in (*reads, *writes) if chunk in self.writer]
        earlier += [reader for chunk in writes for reader in self.readers[chunk]]
        latest: dict[Block, int] = {}
        for other, step in earlier:
            if other != block and step > self.done.get((block, other), -1):
                latest[other] = max(step, latest.get(other, -1))
        # 2. Append it.
        after = sorted(latest.items())
        for extra in after[:-1]:  # a step has one dependency, so the others need steps that do nothing else
            self.blocks[block].append(_Operation("nop", src, dst, 1, [extra]))
        self.blocks[block].append(_Operation(kind, src, dst, count, after[-1:]))
        # 3. What is known and accessed now.
        here = block, len(self.blocks[block]) - 1
        for other, step in after:
            self.blocks[other][step].has_dependents = True
            self.done[block, other] = step
        for chunk in writes:
            self.writer[chunk], self.readers[chunk] = here, []
        for chunk in reads:
            self.readers[chunk].append(here)


class _Writer:
    """Collects the thread blocks of all ranks, step by step. ``scratch``: the number of the first chunk after the
    chunks of the schedule; local copies of a step go there."""

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule, self.places = schedule, places(schedule)
        self.ranks = [_Rank() for _ in range(schedule.size)]
        self.scratch = schedule.contract.total
        self.most_copies = 0  # of a step, for its local transfers

    def add_step(self, rows: Sequence[Transfer]) -> None:
        """Add the transfers of a step: on each rank first its sends, then what it receives and moves locally."""
        arrivals: dict[int, list[Transfer]] = defaultdict(list)
        for row in rows:
            arrivals[row[1]].append(row)
        merged = {dst: merged_transfers(into, self.places, _SLOTS) for dst, into in arrivals.items()}
        for transfers in merged.values():
            for (src, dst, chunk, into, _), count in transfers:
                if src != dst:
                    self.ranks[src].add((dst, -1), "s", chunk, into, count)
        for rank, transfers in merged.items():
            self._write(rank, transfers)

    def _write(self, rank: int, transfers: Sequence[tuple[Transfer, int]]) -> None:
        """Add what a rank receives and moves locally in a step; each transfer with its number of chunks."""
        # 1. Copy chunks that a local transfer reads and the step overwrites.
        written = {into + each for (_, _, _, into, _), count in transfers for each in range(count)}
        copy_of: dict[int, int] = {}
        for (src, dst, chunk, into, reduce), count in transfers:
            if src == dst and (reduce or chunk != into):
                for each in range(chunk, chunk + count):
                    if each in written and each not in copy_of:
                        copy_of[each] = self.scratch + len(copy_of)
                        self.ranks[rank].add((-1, -1), "cpy", each, copy_of[each])
        self.most_copies = max(self.most_copies, len(copy_of))
        # 2. Write, row by row.
        for (src, dst, chunk, into, reduce), count in transfers:
            if src != dst:
                self.ranks[rank].add((-1, src), "rrc" if reduce else "r", into, into, count)
            elif reduce or chunk != into:
                for each in range(count):
                    source = copy_of.get(chunk + each, chunk + each)
                    self.ranks[rank].add((-1, -1), "re" if reduce else "cpy", source, into + each)

    def text(self) -> str:
        schedule = self.schedule
        name, inputs, outputs = named_lengths(schedule)
        root = ElementTree.Element("algo", name=schedule.algorithm, proto="Simple", nchannels="1")
        root.set("nchunksperloop", str(schedule.chunks))
        root.set("ngpus", str(schedule.size))
        root.set("coll", "reduce_scatter" if name == "reducescatter" else name)
        root.set("inplace", str(int(schedule.collective != "all_to_all")))
        for rank, blocks in enumerate(each.blocks for each in self.ranks):
            gpu = ElementTree.SubElement(root, "gpu", id=str(rank))
            gpu.set("i_chunks", str(inputs))
            gpu.set("o_chunks", str(outputs))
            gpu.set("s_chunks", str(self.scratch + self.most_copies - schedule.data_chunks))
            numbers = {key: number for number, key in enumerate(sorted(blocks))}
            for (send, receive), number in numbers.items():
                tb = ElementTree.SubElement(gpu, "tb", id=str(number), send=str(send), recv=str(receive), chan="0")
                for step, operation in enumerate(blocks[send, receive]):
                    other, needed = operation.after[0] if operation.after else (None, -1)
                    self._element(tb, step, operation, -1 if other is None else numbers[other], needed)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _element(self, tb: ElementTree.Element, step: int, operation: _Operation, depid: int, deps: int) -> None:
        element = ElementTree.SubElement(tb, "step", s=str(step), type=operation.kind)
        for end, chunk in (("src", operation.src), ("dst", operation.dst)):
            buffer, index = self.places.get(chunk) or ("s", chunk - self.schedule.data_chunks)
            element.set(f"{end}buf", buffer)
            element.set(f"{end}off", str(index))
        for key, value in (("cnt", operation.count), ("depid", depid), ("deps", deps)):
            element.set(key, str(value))
        element.set("hasdep", str(int(operation.has_dependents)))


def merged_transfers(
    rows: Sequence[Transfer], places: Mapping[int, tuple[str, int]], most: int
) -> list[tuple[Transfer, int]]:
    """The transfers to one rank, with neighbours in the buffers as one of ``most`` chunks at most, and their chunks."""
    merged: list[tuple[Transfer, int]] = []
    for row in rows:
        if merged:
            (src, dst, chunk, into, reduce), count = merged[-1]
            following = [(name, index + count) for name, index in (places[chunk], places[into])]
            is_next = (src, dst, reduce) == (*row[:2], row[4]) and following == [places[each] for each in row[2:4]]
            if is_next and count < most:
                merged[-1] = merged[-1][0], count + 1
                continue
        merged.append((row, 1))
    return merged


def write_msccl(schedule: ScheduleData) -> str:
    """The XML of a schedule; ValueError for a collective that the format does not describe."""
    writer = _Writer(schedule)
    for step in schedule.steps:
        writer.add_step(step.rows())
    return writer.text()
