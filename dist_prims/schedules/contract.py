"""What a collective promises: what each rank holds before it and must hold after it.

A proof needs more than steps. It needs to know which *piece* of the data lies under which chunk number of which rank
at the start, and which piece, summed over which ranks, must lie where at the end. With that declared, in place or
not, rooted or not, with scratch or without, one proof and one executor serve every collective.

    collective       start                          end                               pieces
    all_reduce       chunk c holds piece c          chunk c: piece c of all ranks     one a chunk
    reduce_scatter   chunk c holds piece c          rank r's own chunks, of all       a block of chunks a rank
    all_gather       rank r's own chunks            chunk c: piece c of its owner     a block of chunks a rank
    broadcast        root: chunk c holds piece c    chunk c: piece c of root          one a chunk
    reduce           chunk c holds piece c          root: piece c of all ranks        one a chunk
    gather           rank r's own chunks            root: chunk c of its owner        a block of chunks a rank
    scatter          root: chunk c holds piece c    rank r's own chunks, of root      a block of chunks a rank
    all_to_all       chunk d: what is for rank d    chunk size+s: what came from s    one a pair of ranks
    barrier          chunk 0: I have arrived        chunk 0: all have arrived         one
    scan             chunk 0 holds the data         chunk 0: ranks 0..r               one
    exclusive_scan   chunk 0 holds the data         chunk 0: ranks 0..r-1 (not r=0)   one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLLECTIVES", "ROOTED", "Contract", "Holding", "contract"]

Ints = NDArray[np.int64]

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


@dataclass(frozen=True, eq=False)
class Holding:
    """Chunks of one rank with the pieces that they hold, and the ranks (from, up to) whose data is summed in them."""

    chunk: Ints
    piece: Ints
    first: Ints
    last: Ints

    @staticmethod
    def of(chunk: range | Ints, piece: range | Ints, first: int | Ints, last: int | Ints) -> Holding:
        columns = (np.asarray(column, np.int64) for column in (chunk, piece, first, last))
        return Holding(*np.broadcast_arrays(*columns))


@dataclass(frozen=True, eq=False)
class Contract:
    """``start(rank)`` and ``end(rank)`` of a collective; ``total`` chunk numbers a rank, scratch included.

    ``counts_once``: each rank's contribution must be there exactly once (a barrier may count an arrival twice).
    ``same_bits``: ranks that end with the same piece must have added it up in the same way.
    """

    total: int
    start: Callable[[int], Holding]
    end: Callable[[int], Holding]
    counts_once: bool = True
    same_bits: bool = True


def _all(size: int, chunks: int) -> Callable[[int], Holding]:
    return lambda rank: Holding.of(range(chunks), range(chunks), 0, size)


def _local(size: int, chunks: int) -> Callable[[int], Holding]:
    return lambda rank: Holding.of(range(chunks), range(chunks), rank, rank + 1)


def _own(size: int, chunks: int, first: int | None, last: int | None) -> Callable[[int], Holding]:
    """The block of chunks that belongs to a rank; None stands for the rank itself."""

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
    nothing = Holding.of(range(0), range(0), 0, 0)
    return lambda rank: holding(rank) if rank == root else nothing


def _exclusive(rank: int) -> Holding:
    return Holding.of(range(min(rank, 1)), range(min(rank, 1)), 0, rank)


def _promise(collective: str, size: int, chunks: int, root: int) -> tuple[Callable[[int], Holding], ...]:
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
        "all_to_all": (
            lambda rank: Holding.of(range(size), rank * size + np.arange(size), rank, rank + 1),
            lambda rank: Holding.of(
                size + np.arange(size), np.arange(size) * size + rank, np.arange(size), np.arange(size) + 1
            ),
        ),
        "barrier": (mine, everything),
        "scan": (mine, lambda rank: Holding.of(range(1), range(1), 0, rank + 1)),
        "exclusive_scan": (mine, _exclusive),
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
    """The promise of a collective over ``size`` ranks whose data is split into ``chunks`` pieces.

    >>> contract("all_gather", size=3, chunks=3).start(2).chunk.tolist()
    [2]
    """
    if collective in ("reduce_scatter", "all_gather", "gather", "scatter") and chunks % size:
        raise ValueError(f"{collective}: {chunks} chunks cannot be shared by {size} ranks; use a multiple of {size}")
    start, end = _promise(collective, size, chunks, 0 if root is None else root)
    data = 2 * size if collective == "all_to_all" else chunks
    return Contract(data + scratch, start, end, collective != "barrier", same_bits)
