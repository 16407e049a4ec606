"""The contract of each collective: what each rank holds before it, and what each rank must hold after it.

A proof needs more than the steps of a schedule. It needs to know which *piece* of the data each chunk number of each
rank holds at the start, and which piece, summed over which ranks, each chunk must hold at the end. With this
declaration one proof and one executor serve every collective: in place or not, rooted or not, with scratch or without.

    collective       start                          end                               pieces
    all_reduce       chunk c holds piece c          chunk c: piece c of all ranks     one a chunk
    reduce_scatter   chunk c holds piece c          rank r's own chunks, of all       a block of chunks a rank
    all_gather       rank r's own chunks            chunk c: piece c of its owner     a block of chunks a rank
    broadcast        root: chunk c holds piece c    chunk c: piece c of root          one a chunk
    reduce           chunk c holds piece c          root: piece c of all ranks        one a chunk
    gather           rank r's own chunks            root: chunk c of its owner        a block of chunks a rank
    scatter          root: chunk c holds piece c    rank r's own chunks, of root      a block of chunks a rank
    all_to_all       block d: data for rank d       block size+s: data from rank s    a block of chunks a pair of ranks
    barrier          chunk 0: own arrival           chunk 0: arrival of all ranks     one
    scan             chunk c holds piece c          chunk c: piece c of ranks 0..r    one a chunk
    exclusive_scan   chunk c holds piece c          chunk c: piece c of ranks 0..r-1  one a chunk
                                                    (rank 0: nothing)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__: list[str] = []

Ints = NDArray[np.int64]

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
BLOCKS = frozenset({"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"})  # one for each rank
_SAME_START = frozenset({"all_reduce", "reduce_scatter", "reduce", "barrier", "scan", "exclusive_scan"})


@dataclass(frozen=True, eq=False)
class Holding:
    """Chunks of one rank, the pieces that they hold, and the ranks first..last-1 whose data is summed in them."""

    chunk: Ints
    piece: Ints
    first: Ints
    last: Ints

    @staticmethod
    def of(chunk: range | Ints, piece: range | Ints, first: int | Ints, last: int | Ints) -> Holding:
        chunks, pieces = _column(chunk), _column(piece)
        firsts, lasts = (np.full(len(chunks), each) if isinstance(each, int) else each for each in (first, last))
        return Holding(chunks, pieces, firsts, lasts)


def one_length(*values: ArrayLike) -> list[NDArray[Any]]:
    """Broadcast scalars and columns to one length; ``np.broadcast_arrays`` takes several times as long."""
    columns = [np.asarray(value) for value in values]
    shapes = {column.shape for column in columns if column.ndim}
    if len(shapes) == 1 and len(shape := shapes.pop()) == 1:
        return [column if column.ndim else np.full(shape, column) for column in columns]
    return [column.ravel() for column in np.broadcast_arrays(*np.atleast_1d(*columns))]


def _column(values: range | int | Ints) -> Ints:
    """Convert to an array; for a range this is much faster than ``np.asarray``."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step)
    return np.asarray(values, np.int64)


@dataclass(frozen=True, eq=False)
class Contract:
    """The contract of one collective for one size: ``start(rank)`` and ``end(rank)``.

    ``total``: the number of chunk numbers of a rank, scratch included. ``counts_once``: each rank's contribution must
    be counted exactly once (a barrier may count an arrival twice). ``same_bits``: ranks that end with the same piece
    must have added it up in the same order. ``same_start``: all ranks start with the same pieces in the same chunks.
    """

    total: int
    start: Callable[[int], Holding]
    end: Callable[[int], Holding]
    counts_once: bool = True
    same_bits: bool = True
    same_start: bool = False


_NOTHING = Holding.of(range(0), range(0), 0, 0)


def _all(size: int, chunks: int) -> Callable[[int], Holding]:
    return lambda rank: Holding.of(range(chunks), range(chunks), 0, size)


def _local(size: int, chunks: int) -> Callable[[int], Holding]:
    return lambda rank: Holding.of(range(chunks), range(chunks), rank, rank + 1)


def _own(size: int, chunks: int, first: int | None, last: int | None) -> Callable[[int], Holding]:
    """The block of chunks that belongs to a rank, of the ranks first..last-1; None means the rank itself."""

    def holding(rank: int) -> Holding:
        block = range(rank * chunks // size, (rank + 1) * chunks // size)
        low = rank if first is None else first
        return Holding.of(block, block, low, low + 1 if last is None else last)

    return holding


def _by_owner(size: int, chunks: int) -> Callable[[int], Holding]:
    def holding(rank: int) -> Holding:
        owner = np.arange(chunks) * size // chunks
        return Holding.of(range(chunks), range(chunks), owner, owner + 1)

    return holding


def _at(root: int, holding: Callable[[int], Holding]) -> Callable[[int], Holding]:
    return lambda rank: holding(rank) if rank == root else _NOTHING


def _of_ranks_below(chunks: int, own: int) -> Callable[[int], Holding]:
    """All pieces, each summed over the ranks below this rank and, with ``own=1``, over this rank as well."""

    def holding(rank: int) -> Holding:
        held = range(chunks if rank + own else 0)
        return Holding.of(held, held, 0, rank + own)

    return holding


def _sent_blocks(chunks: int) -> Callable[[int], Holding]:
    """The start of an all_to_all. With k chunks a block, piece ``(src * size + dst) * k + j`` is part j of a block."""
    return lambda rank: Holding.of(range(chunks), rank * chunks + np.arange(chunks), rank, rank + 1)


def _received_blocks(size: int, chunks: int) -> Callable[[int], Holding]:
    def holding(rank: int) -> Holding:
        src, part = np.divmod(np.arange(chunks), chunks // size)
        piece = src * chunks + rank * (chunks // size) + part
        return Holding.of(range(chunks, 2 * chunks), piece, src, src + 1)

    return holding


def _start_and_end(collective: str, size: int, chunks: int, root: int) -> tuple[Callable[[int], Holding], ...]:
    everything, mine = _all(size, chunks), _local(size, chunks)
    of_root = lambda rank: Holding.of(range(chunks), range(chunks), root, root + 1)  # noqa: E731
    own = _own(size, chunks, None, None)
    return {
        "all_reduce": (mine, everything),
        "reduce_scatter": (mine, _own(size, chunks, 0, size)),
        "all_gather": (own, _by_owner(size, chunks)),
        "broadcast": (_at(root, mine), of_root),
        "reduce": (mine, _at(root, everything)),
        "gather": (own, _at(root, _by_owner(size, chunks))),
        "scatter": (_at(root, mine), _own(size, chunks, root, None)),
        "all_to_all": (_sent_blocks(chunks), _received_blocks(size, chunks)),
        "barrier": (mine, everything),
        "scan": (mine, _of_ranks_below(chunks, own=1)),
        "exclusive_scan": (mine, _of_ranks_below(chunks, own=0)),
    }[collective]


COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "scan",
    "exclusive_scan",
)


def contract(
    collective: str, size: int, chunks: int, root: int | None = None, scratch: int = 0, *, same_bits: bool = True
) -> Contract:
    """The contract of a collective over ``size`` ranks whose data is split into ``chunks`` pieces.

    >>> contract("all_gather", size=3, chunks=3).start(2).chunk.tolist()
    [2]
    """
    if chunks < 1:
        raise ValueError(f"{collective}: the data cannot be split into {chunks} chunks; use 1 or more")
    if collective in BLOCKS and chunks % size:
        raise ValueError(f"{collective}: {chunks} chunks cannot be shared by {size} ranks; use a multiple of {size}")
    start, end = _start_and_end(collective, size, chunks, 0 if root is None else root)
    data = 2 * chunks if collective == "all_to_all" else chunks
    return Contract(data + scratch, start, end, collective != "barrier", same_bits, collective in _SAME_START)
