"""The operations of an asynchronous algorithm, in the order that it guarantees: no deadlock, no race, then steps.

MSCCL and MSCCL++ run thread blocks that wait for each other where the file says so. Such an algorithm is a graph of
operations. An edge says that one operation *happens before* another: its reads and writes are complete. Three checks
make a schedule of it, and the last one is the proof of every schedule:

1. No deadlock: there is no cycle of operations that wait for each other.
2. No race: of two operations that access one chunk, one of them writing, one happens before the other. Then the result
   is the same in every order that the graph allows.
3. The operations are placed in steps, each as early as the graph allows, and the steps are proved.

The steps lose the asynchrony: a price adds up the slowest transfers of each step, but real thread blocks run ahead.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..proof import error_of
from ..schedule_error import Mark, ScheduleError
from ..steps import ScheduleData, Step, Steps, most_steps
from .buffers import NamedBuffers

__all__: list[str] = []

Place = tuple[int, int]  # a rank and a chunk number
MOST_OPERATIONS = 30_000  # each has a bit for each other one


class TransferRow(NamedTuple):
    """A transfer. ``sent_by``: the operation that sent the data before, or None if this operation reads the source."""

    src: int
    chunk: int
    dst: int
    into: int
    reduce: bool
    sent_by: int | None = None


@dataclass
class Operation:
    """An operation of a thread block: what it moves, and the chunks that it reads and writes.

    ``sends_result``: what it sends is what it has written, rather than what it has read. ``is_boundary``: it stands for
    the start or the end of a rank, outside of which others may use the memory. ``continues``: it does the next chunk of
    what the operation before it has begun, in the same step of the schedule.
    """

    name: str
    rows: list[TransferRow] = field(default_factory=list)
    reads: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    sends_result: bool = False
    is_boundary: bool = False
    continues: bool = False


class OperationGraph:
    """Operations and their order. ``remedy``: what makes an order in this format, for the message about a race."""

    def __init__(self, buffers: NamedBuffers, remedy: str) -> None:
        self.buffers, self.remedy = buffers, remedy
        self.operations: list[Operation] = []
        self._before: list[list[int]] = []  # of each operation, those that happen before it
        self._awaited: list[list[int]] = []  # those that it waits for, whose accesses may complete later

    def add(self, operation: Operation, after: Iterable[int] = (), awaits: Iterable[int] = ()) -> int:
        """Add an operation and return its number."""
        if len(self.operations) == MOST_OPERATIONS:
            raise ValueError(f"there are more than {MOST_OPERATIONS:,} operations; prove a smaller algorithm")
        self.operations.append(operation)
        self._before.append(list(after))
        self._awaited.append(list(awaits))
        return len(self.operations) - 1

    def order(self, first: int, second: int) -> None:
        """Operation ``first`` happens before ``second``."""
        self._before[second].append(first)

    def wait(self, first: int, second: int) -> None:
        """Operation ``second`` waits for ``first``, but may still see the memory as it was before ``first``."""
        self._awaited[second].append(first)

    def happens_before(self) -> list[int]:
        """For each operation, those that happen before it, as bits. ScheduleError for a deadlock."""
        before = [0] * len(self.operations)
        for number in self._sorted():
            for earlier in self._before[number]:
                before[number] |= before[earlier] | 1 << earlier
        return before

    def _sorted(self) -> list[int]:
        """The numbers of the operations in an order in which all of them can run."""
        waits = [set(before) | set(awaited) for before, awaited in zip(self._before, self._awaited, strict=True)]
        wakes: dict[int, list[int]] = defaultdict(list)
        for number, earlier in enumerate(waits):
            for each in earlier:
                wakes[each].append(number)
        unmet = [len(earlier) for earlier in waits]
        done = [number for number, count in enumerate(unmet) if not count]
        for number in done:  # the list grows while it is read
            for each in wakes[number]:
                unmet[each] -= 1
                if not unmet[each]:
                    done.append(each)
        if len(done) < len(waits):
            self._raise_deadlock(waits, set(done))
        return done

    def _raise_deadlock(self, waits: Sequence[set[int]], done: set[int]) -> None:
        number = next(number for number in range(len(waits)) if number not in done)
        path: list[int] = []
        while number not in path:
            path.append(number)
            number = min(waits[number] - done)
        cycle = [self.operations[each].name for each in [*path[path.index(number) :], number]]
        raise ScheduleError(f"deadlock: {cycle[0]} waits for {', which waits for '.join(cycle[1:])}")

    def check_races(self) -> None:
        """Raise ScheduleError for two accesses of one chunk in no order, of which one is a write."""
        before = self.happens_before()
        last_write: dict[Place, int] = {}
        readers: dict[Place, list[int]] = defaultdict(list)  # since the last write
        # Accesses before the last write of a chunk need no check: that write has been compared with them.
        for number in self._sorted():
            operation = self.operations[number]
            for place in operation.reads:
                self._check_order(before, last_write.get(place), number, place)
            for place in operation.writes:
                for earlier in (last_write.get(place), *readers.pop(place, ())):
                    self._check_order(before, earlier, number, place)
                last_write[place] = number
            for place in operation.reads:
                readers[place].append(number)

    def _check_order(self, before: Sequence[int], earlier: int | None, later: int, place: Place) -> None:
        if earlier is None or earlier == later or before[later] >> earlier & 1:
            return
        first, second = self.operations[earlier], self.operations[later]
        verbs = ["write" if place in each.writes else "read" for each in (first, second)]
        # In a race with the start or end of a rank, only the other operation is a part of the algorithm.
        for number, (one, boundary) in enumerate(((first, second), (second, first))):
            if boundary.is_boundary:
                when = f"{'before' if 'start' in boundary.name else 'after'} {boundary.name}"
                what = f"{one.name} {verbs[number]}s {self._name(*place)}"
                raise ScheduleError(f"race: {what}, and may do so {when}: {self.remedy}")
        raise ScheduleError(
            f"race: {first.name} {verbs[0]}s {self._name(*place)}; {second.name} {verbs[1]}s it; "
            f"either may come first: {self.remedy}"
        )

    def prove(self, name: str) -> ScheduleData:
        """The operations as a schedule that is proved; ScheduleError says what is wrong, and where."""
        self.check_races()
        levels = self._levels()
        steps = self._steps(levels)
        all_steps = Steps(lambda: iter(steps), most_steps(self.buffers.size))
        schedule = self.buffers.schedule(name, all_steps, same_bits=False)
        if error := error_of(schedule):
            text = re.sub(
                r"chunk (\d+) of rank (\d+)", lambda match: self._name(int(match[2]), int(match[1])), str(error)
            )
            details = [self._writer(levels, mark) for mark in error.marks[:1]]
            raise ScheduleError("; ".join([text, *details]), error.step, error.marks) from error
        replicas = self.buffers.schedule(name, all_steps, same_bits=True)
        return schedule if error_of(replicas) else replicas

    def _levels(self) -> list[int]:
        """The earliest step of each operation: after the steps of the operations before it that move data."""
        levels = [0] * len(self.operations)
        for number in self._sorted():
            before = self._before[number]
            levels[number] = max((self._end(levels, each) for each in before), default=0)
            if self.operations[number].continues:
                ends = [self._end(levels, each) for each in before if each != number - 1]
                levels[number] = max([levels[number - 1], *ends])
        return levels

    def _end(self, levels: Sequence[int], number: int) -> int:
        """The first step after an operation: the next one, or the same step if the operation moves no data."""
        return levels[number] + bool(self.operations[number].rows)

    def _steps(self, levels: Sequence[int]) -> list[Step]:
        """The rows of each step, and a last step that copies the results to where the contract demands them."""
        written: dict[Place, list[int]] = defaultdict(list)  # the steps that write a place
        for number, operation in enumerate(self.operations):
            for place in {(row.dst, row.into) for row in operation.rows}:
                written[place].append(levels[number])
        rows: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for number, operation in enumerate(self.operations):
            for row in operation.rows:
                chunk = row.chunk
                if row.sent_by is not None:
                    sender = self.operations[row.sent_by]
                    sent = self._end(levels, row.sent_by) if sender.sends_result else levels[row.sent_by]
                    if any(sent <= each < levels[number] for each in written[row.src, chunk]):
                        chunk = self.buffers.value(row.src)  # the sender overwrites what it has sent
                        rows[sent].append((row.src, row.src, row.chunk, chunk, False))
                rows[levels[number]].append((row.src, row.dst, chunk, row.into, row.reduce))
        last = max(rows, default=-1) + 1
        ranks = range(self.buffers.size)
        rows[last] = [(rank, rank, *each, False) for rank in ranks for each in self.buffers.results(rank)]
        columns = [list(zip(*rows[level], strict=True)) for level in range(last + 1) if rows[level]]
        return [Step(src, dst, chunk, reduce, into) for src, dst, chunk, into, reduce in columns]

    def _writer(self, levels: Sequence[int], mark: Mark) -> str:
        """The operation that wrote a wrong chunk last, for the message about it."""
        chunk = {end: output for output, end in self.buffers.results(mark.rank)}.get(mark.chunk, mark.chunk)
        writers = [
            (levels[number], number)
            for number, operation in enumerate(self.operations)
            if levels[number] <= mark.step and any((row.dst, row.into) == (mark.rank, chunk) for row in operation.rows)
        ]
        name = f"{self.operations[max(writers)[1]].name} wrote last" if writers else "no operation has written"
        return f"chunk {mark.chunk} of rank {mark.rank} is {self._name(mark.rank, chunk)}, which {name}"

    def _name(self, rank: int, chunk: int) -> str:
        return f"{self.buffers.name(rank, chunk)} of rank {rank}"
