"""The buffers i, o and s of the formats of MSCCL and MSCCL++, as chunk numbers of a schedule.

Both formats name memory by a buffer (input, output or scratch) and an index in chunks. In place, input and output share
memory. The chunk numbers of the contract are the input. An output elsewhere has chunk numbers of its own, and the last
step of the schedule copies it to where the contract demands the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..contract import contract
from ..steps import ScheduleData, Steps

__all__: list[str] = []

# The collectives of both formats whose data is described by the buffers alone; the formats do not name a root.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
MOST_CHUNKS = 10_000_000  # of all ranks together: the arrays of a proof have one element a chunk


def collective_of(name: str) -> str:
    """The collective that a format calls ``name``.

    >>> collective_of("reduce_scatter"), collective_of("reducescatter")
    ('reduce_scatter', 'reduce_scatter')
    """
    if (plain := name.replace("_", "")) not in COLLECTIVES:
        raise ValueError(f"the collective {name!r} cannot be proved; those that can: {', '.join(COLLECTIVES)}")
    return COLLECTIVES[plain]


class NamedBuffers:
    """The chunk number of each index of the buffers of each rank.

    Args:
        collective: the name of a collective of this library.
        size: the number of ranks.
        chunks: the number of chunks of the data of the collective.
        in_place: whether input and output share memory.
        scratch: the chunks of the buffer s of each rank.
    """

    def __init__(self, collective: str, size: int, chunks: int, in_place: bool, scratch: Sequence[int]) -> None:
        self.collective, self.size, self.chunks, self.in_place = collective, size, chunks, in_place
        if size < 1 or chunks < 1 or (collective != "all_reduce" and chunks % size):
            raise ValueError(f"{chunks} chunks cannot be shared by {size} ranks")
        block = chunks // size
        self.lengths = {"i": chunks, "o": chunks}
        if collective in ("all_gather", "reduce_scatter"):
            self.lengths["i" if collective == "all_gather" else "o"] = block
        self.scratch = tuple(scratch)
        self._block = block
        # The first chunk numbers of an output that is not in the data, of the scratch, and of values in flight.
        self._first_output = 2 * chunks if collective == "all_to_all" else chunks
        self._first_scratch = self._first_output + (0 if in_place or collective == "all_to_all" else self.lengths["o"])
        self._first_value = self._first_scratch + max(self.scratch)
        self._number_of_values = [0] * size
        if min(self.scratch) < 0 or size * self._first_value > MOST_CHUNKS:
            raise ValueError(f"{size} ranks with {self._first_value} chunks each are more than {MOST_CHUNKS:,} chunks")

    def chunk(self, rank: int, buffer: str, index: int) -> int:
        """The chunk number of ``buffer[index]``; ValueError if the buffer ends before it."""
        length = self.scratch[rank] if buffer == "s" else self.lengths.get(buffer, 0)
        if not 0 <= index < length:
            raise ValueError(f"{buffer}[{index}] does not exist on rank {rank}: the buffer has {length} chunks")
        if buffer == "s":
            return self._first_scratch + index
        if buffer == "o" and not self.in_place:
            return index + (self.chunks if self.collective == "all_to_all" else self._first_output)
        own = {"all_gather": "i", "reduce_scatter": "o"}.get(self.collective)
        return rank * self._block + index if buffer == own else index

    def value(self, rank: int) -> int:
        """A new chunk number of a rank, for a value in flight that no buffer holds."""
        self._number_of_values[rank] += 1
        return self._first_value + self._number_of_values[rank] - 1

    def name(self, rank: int, chunk: int) -> str:
        """The buffer and index of a chunk number, as ``o[3]``."""
        if chunk >= self._first_value:
            return "a value in flight"
        if chunk >= self._first_scratch:
            return f"s[{chunk - self._first_scratch}]"
        if chunk >= self._first_output:
            return f"o[{chunk - self._first_output}]"
        if self.collective == "all_to_all" and chunk >= self.chunks:
            return f"o[{chunk - self.chunks}]"
        if self.collective != "all_gather":
            return f"i[{chunk}]"
        return f"o[{chunk}]" if self.in_place else f"i[{chunk - rank * self._block}]"

    def results(self, rank: int) -> Iterator[tuple[int, int]]:
        """(chunk number of the output, chunk number where the contract demands it), where these differ."""
        end = contract(self.collective, self.size, self.chunks).end(rank).chunk.tolist()
        for index, chunk in enumerate(end):
            if (output := self.chunk(rank, "o", index)) != chunk:
                yield output, chunk

    def inputs(self, rank: int) -> list[int]:
        """The chunk numbers of the buffers i and o of a rank."""
        return sorted({self.chunk(rank, name, at) for name, length in self.lengths.items() for at in range(length)})

    def schedule(self, name: str, steps: Steps, *, same_bits: bool) -> ScheduleData:
        """The schedule of steps on these chunk numbers."""
        data = 2 * self.chunks if self.collective == "all_to_all" else self.chunks
        scratch = self._first_value + max(self._number_of_values) - data
        own = contract(self.collective, self.size, self.chunks, None, scratch, same_bits=same_bits)
        return ScheduleData(self.collective, name, self.size, self.chunks, own, steps)


def named_lengths(schedule: ScheduleData) -> tuple[str, int, int]:
    """What both formats call the collective of a schedule, and the chunks of the buffers i and o of a rank."""
    name = next(name for name, collective in COLLECTIVES.items() if collective == schedule.collective)
    lengths = NamedBuffers(schedule.collective, schedule.size, schedule.chunks, in_place=True, scratch=[0]).lengths
    return name, lengths["i"], lengths["o"]


def places(schedule: ScheduleData) -> dict[int, tuple[str, int]]:
    """The buffer and index of each chunk number of a schedule: in place, except in an all_to_all."""
    if schedule.collective not in COLLECTIVES.values():
        raise ValueError(f"{schedule.collective}: only {', '.join(COLLECTIVES.values())} can be exported")
    whole = "o" if schedule.collective == "all_gather" else "i"
    data = {chunk: (whole, chunk) for chunk in range(schedule.chunks)}
    if schedule.collective == "all_to_all":
        data |= {schedule.chunks + chunk: ("o", chunk) for chunk in range(schedule.chunks)}
    return data | {chunk: ("s", chunk - len(data)) for chunk in range(len(data), schedule.contract.total)}
