"""The program of one rank: its part of each step of a schedule, ready for an executor.

A schedule describes all ranks; a process executes only its own part. Three facts are computed here once, so that an
executor needs no search:

- which transfers form each message,
- in which order the writes of a step are added into a chunk,
- when a chunk that only passes through is read for the last time, so that its memory can be freed.

Each transfer also names the piece of the data that it carries. Pieces may differ in length, and the receiver must know
the length before the message arrives; so the pieces of all ranks are followed through the steps. In the same way the
number of ranks whose data is in each operand of a sum is computed, which scales a mean (``order.scales``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .steps import ScheduleData, Step, widened

__all__: list[str] = []

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Message:
    """Chunks that travel together between this rank and a peer, with the pieces that they carry."""

    peer: int
    chunks: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where an operand comes from: place ``index`` in the message of a peer, or this rank's own chunk ``index``."""

    peer: int | None
    index: int


@dataclass(frozen=True)
class Write:
    """The effect of a step on one chunk: the operands are added in order to its content, which ``copy`` drops first.

    ``terms``: the number of ranks whose data is in each operand, beginning with the chunk's content unless ``copy``.
    """

    into: int
    piece: int
    copy: bool
    sources: tuple[Source, ...]
    terms: tuple[int, ...]


_Row = tuple[Source, bool, int, int]  # the source, whether the row reduces, its piece, its terms


@dataclass(frozen=True)
class ProgramAction:
    """The part of one rank in step number ``step``; the chunks in ``dead`` are never read after the step."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    writes: tuple[Write, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """The actions of one rank, and the number of steps of the schedule."""

    rank: int
    actions: tuple[ProgramAction, ...]
    steps: int


def compile_program(schedule: ScheduleData, rank: int) -> Program:
    """The program of one rank. Steps in which the rank takes no part are omitted.

    >>> from dist_prims.schedules import build
    >>> first = compile_program(build("all_reduce", "ring", size=3), rank=0).actions[0]
    >>> first.sends
    (Message(peer=1, chunks=(0,), pieces=(0,)),)
    >>> first.writes
    (Write(into=2, piece=2, copy=False, sources=(Source(peer=2, index=0),), terms=(1, 1)),)
    """
    if schedule.part is not None:
        return _compile_part(schedule, schedule.part(rank), rank)
    held = np.full((schedule.size, schedule.contract.total), -1)  # the piece in each chunk of each rank,
    terms = np.zeros(held.shape, np.int32)  # and the number of ranks whose data is in it
    same_start = schedule.contract.same_start
    for each in range(1 if same_start else schedule.size):
        start, ranks = schedule.contract.start(each), slice(None) if same_start else each
        held[ranks, start.chunk], terms[ranks, start.chunk] = start.piece, 1
    actions, number = [], -1
    for number, (step, width) in enumerate(schedule.steps.with_width()):
        wide_held, wide_terms = _blocks(held, width), _blocks(terms, width)
        pieces, counts = wide_held[step.src, step.chunk], wide_terms[step.src, step.chunk]
        mine = (step.src == rank) | (step.dst == rank)
        if mine.any():
            carried = zip(pieces[mine].ravel().tolist(), counts[mine].ravel().tolist(), strict=True)
            own = step.take(mine)
            actions.append(_action(number, widened(own, width), list(carried), terms[rank], rank))
        wide_held[step.dst, step.into] = pieces
        _count(wide_terms, step, counts)
    return _program(schedule, rank, actions, number + 1)


def _blocks(chunks: NDArray[Any], width: int) -> NDArray[Any]:
    """A view of the chunks of all ranks: ``[rank, block, chunk of the block]``, with blocks of ``width`` chunks."""
    whole = chunks.shape[1] // width
    return chunks[:, : whole * width].reshape(len(chunks), whole, width)


def _program(schedule: ScheduleData, rank: int, actions: list[ProgramAction], steps: int) -> Program:
    keep = set(schedule.contract.end(rank).chunk.tolist())
    return Program(rank, tuple(_with_last_reads(actions, keep)), steps)


def _compile_part(schedule: ScheduleData, steps: Iterator[Step], rank: int) -> Program:
    """The program of a rank from its own rows: each carries the piece that the sender has in the chunk at the start."""
    actions, number = [], -1
    own_terms = np.zeros(schedule.contract.total, np.int32)
    start_of = functools.cache(schedule.contract.start)  # most rows have the rank itself as their sender
    for number, step in enumerate(steps):
        carried = []
        for src, chunk in zip(step.src.tolist(), step.chunk.tolist(), strict=True):
            start = start_of(src)
            carried.append((int(start.piece[start.chunk == chunk][0]), 1))
        actions.append(_action(number, step, carried, own_terms, rank))
    return _program(schedule, rank, actions, number + 1)


def _count(terms: NDArray[np.int32], step: Step, counts: NDArray[np.int32]) -> None:
    """Update the terms after a step: a copy replaces the content of a chunk, and a reduction adds to it."""
    dst, into = step.dst, step.into
    if not step.reduce.all():
        copies = ~step.reduce
        terms[dst[copies], into[copies]] = counts[copies]
        dst, into, counts = dst[step.reduce], into[step.reduce], counts[step.reduce]
    np.add.at(terms, (dst, into), counts)


def _action(
    number: int, step: Step, carried: list[tuple[int, int]], held_terms: NDArray[np.int32], rank: int
) -> ProgramAction:
    """The action of one rank. ``carried``: the piece of each row, and the number of ranks whose data is in it."""
    sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[int, list[tuple[int, int]]] = defaultdict(list)
    writes: dict[int, list[_Row]] = defaultdict(list)
    for (src, dst, chunk, into, reduce), (piece, terms) in zip(step.rows(), carried, strict=True):
        if dst != rank:
            sends[dst].append((chunk, piece))
            continue
        source = Source(None, chunk) if src == rank else Source(src, len(receives[src]))
        if src != rank:
            receives[src].append((into, piece))
        writes[into].append((source, reduce, piece, terms))
    folded = (_write(into, rows, int(held_terms[into])) for into, rows in writes.items())
    return ProgramAction(
        number, _messages(sends), _messages(receives), tuple(write for write in folded if write.sources)
    )


def _messages(by_peer: dict[int, list[tuple[int, int]]]) -> tuple[Message, ...]:
    return tuple(Message(peer, *zip(*rows, strict=True)) for peer, rows in by_peer.items() if rows)


def _write(into: int, rows: list[_Row], held_terms: int) -> Write:
    first, first_reduces, piece, _ = rows[0]
    sources, terms = tuple(row[0] for row in rows), tuple(row[3] for row in rows)
    if not first_reduces and first == Source(None, into):  # a copy of the chunk to itself keeps its content
        return Write(into, piece, False, sources[1:], terms)
    return Write(into, piece, not first_reduces, sources, (held_terms, *terms) if first_reduces else terms)


def _with_last_reads(actions: list[ProgramAction], keep: set[int]) -> list[ProgramAction]:
    """Set ``dead`` from the last action back to the first: the first read in this direction is the last one in time."""
    done, seen = [], set(keep)
    for action in reversed(actions):
        reads = {chunk for message in action.sends for chunk in message.chunks}
        reads |= {source.index for write in action.writes for source in write.sources if source.peer is None}
        dead = tuple(sorted(reads - seen - {write.into for write in action.writes}))
        seen |= reads | {write.into for write in action.writes}
        done.append(replace(action, dead=dead))
    return done[::-1]
