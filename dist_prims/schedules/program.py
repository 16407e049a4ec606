"""A rank's program: what one rank does in each step of a schedule, ready to be executed.

A schedule speaks of all ranks; a process executes only its own part. Three facts are worked out here once, so that an
executor needs no search: which transfers make up each message, in which order the writes of a step fold into a chunk,
and when a chunk that only passes through is read for the last time, so that its memory can go.

Each transfer also names the piece of the data that it carries, found by following the pieces of all ranks through
the steps: pieces may differ in length, and the receiver must know what comes before it comes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from .schedule import Schedule, Step

__all__ = ["Action", "Message", "Program", "Source", "Write", "compile_program"]


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
    """All that a step does to one chunk: the operands, folded in order, after what the chunk holds unless ``copy``."""

    into: int
    piece: int
    copy: bool
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Action:
    """What one rank does in step number ``step``; the chunks in ``dead`` are never read after it."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    writes: tuple[Write, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    rank: int
    actions: tuple[Action, ...]


def compile_program(schedule: Schedule, rank: int) -> Program:
    """The program of one rank. Steps in which it takes no part are left out.

    >>> from dist_prims.schedules import build
    >>> first = compile_program(build("all_reduce", "ring", size=3), rank=0).actions[0]
    >>> first.sends
    (Message(peer=1, chunks=(0,), pieces=(0,)),)
    >>> first.writes
    (Write(into=2, piece=2, copy=False, sources=(Source(peer=2, index=0),)),)
    """
    held = np.full((schedule.size, schedule.contract.total), -1)
    for each in range(schedule.size):
        start = schedule.contract.start(each)
        held[each, start.chunk] = start.piece
    actions = []
    for number, step in enumerate(schedule.steps):
        pieces = held[step.src, step.chunk]
        mine = (step.src == rank) | (step.dst == rank)
        if mine.any():
            actions.append(_action(number, step.take(mine), pieces[mine].tolist(), rank))
        held[step.dst, step.into] = pieces
    keep = set(schedule.contract.end(rank).chunk.tolist())
    return Program(rank, tuple(_with_last_reads(actions, keep)))


def _action(number: int, step: Step, pieces: list[int], rank: int) -> Action:
    sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    receives: dict[int, list[tuple[int, int]]] = defaultdict(list)
    writes: dict[int, list[tuple[Source, bool, int]]] = defaultdict(list)
    for (src, dst, chunk, into, reduce), piece in zip(step.rows(), pieces, strict=True):
        if dst != rank:
            sends[dst].append((chunk, piece))
            continue
        source = Source(None, chunk) if src == rank else Source(src, len(receives[src]))
        if src != rank:
            receives[src].append((into, piece))
        writes[into].append((source, reduce, piece))
    folded = (_write(into, rows) for into, rows in writes.items())
    return Action(number, _messages(sends), _messages(receives), tuple(write for write in folded if write.sources))


def _messages(by_peer: dict[int, list[tuple[int, int]]]) -> tuple[Message, ...]:
    return tuple(Message(peer, *zip(*rows, strict=True)) for peer, rows in by_peer.items() if rows)


def _write(into: int, rows: list[tuple[Source, bool, int]]) -> Write:
    first, first_reduces, piece = rows[0]
    sources = tuple(source for source, _, _ in rows)
    if not first_reduces and first == Source(None, into):  # a copy of the chunk to itself: it is what the chunk holds
        return Write(into, piece, False, sources[1:])
    return Write(into, piece, not first_reduces, sources)


def _with_last_reads(actions: list[Action], keep: set[int]) -> list[Action]:
    """From the last action back to the first: the first read met is the last one made."""
    done, seen = [], set(keep)
    for action in reversed(actions):
        reads = {chunk for message in action.sends for chunk in message.chunks}
        reads |= {source.index for write in action.writes for source in write.sources if source.peer is None}
        dead = tuple(sorted(reads - seen - {write.into for write in action.writes}))
        seen |= reads | {write.into for write in action.writes}
        done.append(replace(action, dead=dead))
    return done[::-1]
