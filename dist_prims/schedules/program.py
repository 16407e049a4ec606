"""The program of one rank: its part of each step of a schedule, as both executors run it (Python's and C++'s).

A schedule describes all ranks; a process executes only its own part. Four facts are computed here once, so that an
executor needs no search:

- which transfers form each message; a rank's messages are in the order of the distance to the peer, so that the ranks
  do not all send to the same rank first,
- in which order the operands of a step are added into a chunk,
- when a chunk that only passes through is read for the last time, so that its memory can be freed,
- how long each message is. Blocks of the data may differ in length, and the receiver must know the length before the
  message arrives. So the pieces that all ranks hold are followed through the steps. A program names the piece in a
  message by a chunk of this rank's own data that has the same length.

The *terms* of an operand, the number of ranks whose data is added up in it, are computed in the same way. They scale a
mean (``order.scales``).

The classes contain numbers, text and tuples of each other. C++ reads the same fields
(``csrc/torch/backend/bindings.cpp``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .steps import ScheduleData, Step, widened
from .trust import name_to_compare

__all__: list[str] = []

Ints = NDArray[np.int64]

# The collectives that the C++ executor runs by an algorithm that a call names.
FOLLOWED = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "all_to_all")
OWN = -1


class Message(NamedTuple):  # a dataclass takes several times as long to make, and a program has hundreds
    """Chunks that travel together between this rank and a peer.

    ``pieces``: for the piece in each chunk, a chunk of this rank's own data that has the same length.
    """

    peer: int
    chunks: tuple[int, ...]
    pieces: tuple[int, ...]


class Source(NamedTuple):
    """Where an operand is: number ``index`` in the message from ``peer``; if that is ``OWN``, the rank's own chunk."""

    peer: int
    index: int  # type: ignore[assignment]


class Write(NamedTuple):
    """The effect of a step on the chunk ``into``: the operands from ``sources`` are added to its content in order.

    ``copy``: the first operand replaces the content. ``terms``: of each operand; the first is the content unless
    ``copy``.
    """

    into: int
    piece: int
    copy: bool
    sources: tuple[Source, ...]
    terms: tuple[int, ...]


class _Row(NamedTuple):
    """A row of a step that writes a chunk of this rank."""

    source: Source
    reduce: bool
    piece: int
    terms: int


@dataclass(frozen=True)
class ProgramStep:
    """The part of one rank in a step, which may be nothing. No later step reads the chunks in ``dead``."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    writes: tuple[Write, ...] = ()
    dead: tuple[int, ...] = ()


NO_PART = ProgramStep()


@dataclass(frozen=True)
class Program:
    """The part of one rank of ``ranks`` in every step.

    ``chunks``: of the data; an all_to_all has its blocks twice: first the sent ones, then the received ones.
    ``scratch``: chunks after those.
    """

    rank: int
    ranks: int
    chunks: int
    scratch: int
    steps: tuple[ProgramStep, ...]


@dataclass(frozen=True)
class RankSchedule:
    """A program for data of ``low`` to ``high`` - 1 bytes in segments, and the name by which ranks compare it.

    ``is_slower_than_piggyback``: whether the messages of the agreement on a call would carry the data sooner.
    """

    program: Program
    name: str
    segments: int = 1
    low: int = 0
    high: int = 0
    is_slower_than_piggyback: bool = False

    @staticmethod
    def of(
        schedule: ScheduleData, rank: int, name: str, segments: int = 1, low: int = 0, high: int = 0
    ) -> RankSchedule:
        name = name_to_compare(schedule, name if segments == 1 else f"{name} x{segments}")
        return RankSchedule(_compiled(schedule, rank), name, segments, low, high)


def compile_program(schedule: ScheduleData, rank: int) -> Program:
    """The program of one rank.

    >>> from dist_prims.schedules import build
    >>> first = compile_program(build("all_reduce", "ring", size=3), rank=0).steps[0]
    >>> first.sends
    (Message(peer=1, chunks=(0,), pieces=(0,)),)
    >>> first.writes
    (Write(into=2, piece=2, copy=False, sources=(Source(peer=2, index=0),), terms=(1, 1)),)
    """
    rows = _rows(schedule, rank) if schedule.part is None else _rows_of_part(schedule, schedule.part(rank))
    own_chunks_of = _own_chunks(schedule, rank)
    steps = []
    for step, pieces, counts, held_terms in rows:
        carried = list(zip(own_chunks_of(pieces).tolist(), counts.tolist(), strict=True))
        steps.append(_step(step, carried, held_terms, rank, schedule.size) if len(step) else NO_PART)
    keep = set(schedule.contract.end(rank).chunk.tolist())
    scratch = schedule.contract.total - schedule.data_chunks
    return Program(rank, schedule.size, schedule.data_chunks, scratch, _with_last_reads(steps, keep))


_compiled = functools.lru_cache(maxsize=32)(compile_program)  # a program is the same for all sizes of the data
_NO_ROWS = Step.concat([])


class _RankRows(NamedTuple):
    """The rows of a step in which one rank sends or receives."""

    rows: Step
    pieces: Ints  # of each row
    terms: NDArray[np.int32]  # of each row
    held_terms: NDArray[np.int32]  # of each chunk of the rank before the step


def _rows(schedule: ScheduleData, rank: int) -> Iterator[_RankRows]:
    """The rows of a rank in each step. The pieces of all ranks are followed through the steps."""
    held = np.full((schedule.size, schedule.contract.total), -1)  # held[rank, chunk]: a piece
    terms = np.zeros(held.shape, np.int32)
    same_start = schedule.contract.same_start
    if schedule.collective == "all_to_all":  # as below, without a call for each rank
        held[:, : schedule.chunks] = np.arange(schedule.size * schedule.chunks).reshape(schedule.size, -1)
        terms[:, : schedule.chunks] = 1
    else:
        for each in range(1 if same_start else schedule.size):
            start, ranks = schedule.contract.start(each), slice(None) if same_start else each
            held[ranks, start.chunk], terms[ranks, start.chunk] = start.piece, 1
    for step, width in schedule.steps.with_width():
        wide_held, wide_terms = _blocks(held, width), _blocks(terms, width)
        pieces, counts = wide_held[step.src, step.chunk], wide_terms[step.src, step.chunk]
        mine = np.flatnonzero((step.src == rank) | (step.dst == rank))
        own = widened(step.take(mine), width) if len(mine) else _NO_ROWS
        yield _RankRows(own, pieces[mine].ravel(), counts[mine].ravel(), terms[rank])
        wide_held[step.dst, step.into] = pieces
        _update_terms(wide_terms, step, counts)


def _blocks(chunks: NDArray[Any], width: int) -> NDArray[Any]:
    """A view of the chunks of all ranks: ``[rank, block, chunk of the block]``, with blocks of ``width`` chunks."""
    whole = chunks.shape[1] // width
    return chunks[:, : whole * width].reshape(len(chunks), whole, width)


def _rows_of_part(schedule: ScheduleData, steps: Iterator[Step]) -> Iterator[_RankRows]:
    """The rows of a rank from ``schedule.part``: each carries the piece that its sender starts with."""
    own_terms = np.zeros(schedule.contract.total, np.int32)
    start_of = functools.cache(schedule.contract.start)  # most rows have the rank itself as their sender
    for step in steps:
        pieces = []
        for src, chunk in zip(step.src.tolist(), step.chunk.tolist(), strict=True):
            start = start_of(src)
            pieces.append(int(start.piece[start.chunk == chunk][0]))
        yield _RankRows(step, np.array(pieces, np.int64), np.ones(len(pieces), np.int32), own_terms)


def _own_chunks(schedule: ScheduleData, rank: int) -> Callable[[Ints], Ints]:
    """A function from pieces to chunks of this rank's own data that have the same length.

    In an all_to_all the chunk is the same part of a block that this rank sends or receives. A rank forwards blocks only
    if all blocks are equally long, so for a forwarded block any block serves.
    """
    if schedule.collective != "all_to_all":
        return lambda pieces: pieces
    length = schedule.chunks // schedule.size

    def chunks_of(pieces: Ints) -> Ints:
        pair, part = np.divmod(pieces, length)
        src, dst = np.divmod(pair, schedule.size)
        chunks: Ints = np.where(dst == rank, schedule.chunks + src * length, dst * length) + part
        return chunks

    return chunks_of


def _update_terms(terms: NDArray[np.int32], step: Step, counts: NDArray[np.int32]) -> None:
    """Update the terms after a step: a copy replaces the content of a chunk, and a reduction adds to it."""
    dst, into = step.dst, step.into
    if not step.reduce.any():
        terms[dst, into] = counts
        return
    if not step.reduce.all():
        copies = ~step.reduce
        terms[dst[copies], into[copies]] = counts[copies]
        dst, into, counts = dst[step.reduce], into[step.reduce], counts[step.reduce]
    np.add.at(terms, (dst, into), counts)


def _step(
    step: Step, carried: list[tuple[int, int]], held_terms: NDArray[np.int32], rank: int, size: int
) -> ProgramStep:
    """The step of one rank. ``carried``: the piece of each row, and its terms."""
    sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[int, list[tuple[int, int]]] = defaultdict(list)
    writes: dict[int, list[_Row]] = defaultdict(list)
    for (src, dst, chunk, into, reduce), (piece, terms) in zip(step.rows(), carried, strict=True):
        if dst != rank:
            sends[dst].append((chunk, piece))
            continue
        # The row writes a chunk of this rank. A message has its chunks in the order of the rows, at both ends.
        if src == rank:
            source = Source(OWN, chunk)
        else:
            received = receives[src]
            source = Source(src, len(received))
            received.append((into, piece))
        writes[into].append(_Row(source, reduce, piece, terms))
    folded = (_write(into, rows, int(held_terms[into])) for into, rows in writes.items())
    return ProgramStep(
        _messages(sends, lambda peer: (peer - rank) % size),
        _messages(receives, lambda peer: (rank - peer) % size),
        tuple(write for write in folded if write.sources),
    )


def _messages(by_peer: dict[int, list[tuple[int, int]]], distance: Callable[[int], int]) -> tuple[Message, ...]:
    return tuple(Message(peer, *zip(*by_peer[peer], strict=True)) for peer in sorted(by_peer, key=distance))


def _write(into: int, rows: list[_Row], held_terms: int) -> Write:
    first = rows[0]
    if len(rows) == 1 and not first.reduce and first.source != (OWN, into):  # most writes, sooner than below
        return Write(into, first.piece, True, (first.source,), (first.terms,))
    sources, terms = tuple(row.source for row in rows), tuple(row.terms for row in rows)
    if not first.reduce and (first.source.peer, first.source.index) == (OWN, into):  # a copy to itself changes nothing
        return Write(into, first.piece, copy=False, sources=sources[1:], terms=terms)
    return Write(into, first.piece, not first.reduce, sources, (held_terms, *terms) if first.reduce else terms)


def _with_last_reads(steps: list[ProgramStep], keep: set[int]) -> tuple[ProgramStep, ...]:
    """Set ``dead`` from the last step back to the first: the first read in this direction is the last one in time."""
    done, seen = [], set(keep)  # ``seen``: chunks that a later step reads or writes, or that are output
    for step in reversed(steps):
        reads = {chunk for message in step.sends for chunk in message.chunks}
        reads |= {source.index for write in step.writes for source in write.sources if source.peer == OWN}
        written = {write.into for write in step.writes}
        dead = tuple(sorted(reads - seen - written))
        seen |= reads | written
        done.append(replace(step, dead=dead) if dead else step)
    return tuple(done[::-1])
