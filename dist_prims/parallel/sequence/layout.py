"""Layout of a sequence over ranks: the tokens of each rank, and which keys of a rank the queries of another rank see.

Under a causal mask token t sees t + 1 tokens, so if the sequence is cut into as many parts as ranks, the last rank has
nearly all the work. "zigzag" cuts the sequence into 2n chunks for n ranks, and gives rank r an early one, chunk r, and
a late one, chunk 2n - 1 - r. Then each rank has the same work with the keys of each other rank.

    4 ranks        chunks        sees of rank 1's keys, chunks 1 and 6
    rank 0         0 and 7       chunk 7 both of them
    rank 1         1 and 6       the causal half of the square
    rank 2         2 and 5       both of its chunks chunk 1
    rank 3         3 and 4       both of its chunks chunk 1

Chunks do not overlap, so a chunk of queries sees a chunk of keys of another rank whole or not at all, and the chunks
that it sees are the first ones of that rank. Only a rank's own keys need a mask, the causal mask of the kernel.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

__all__: list[str] = []

ORDERS = {"contiguous": 1, "zigzag": 2}  # the number of chunks of a rank in each order


class Piece(NamedTuple):
    """One call of a kernel: rows of the batch; queries and keys, as tokens of the rank that has them; the mask."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def chunks(tokens: int, size: int, order: str, rank: int) -> list[range]:
    """The tokens of a sequence on ``rank``, in their order there.

    >>> chunks(8, 2, "contiguous", 1), chunks(8, 2, "zigzag", 1)
    ([range(4, 8)], [range(2, 4), range(4, 6)])
    """
    count = ORDERS[order] * size
    numbers = [rank] if order == "contiguous" else [rank, count - 1 - rank]
    return [range(number * tokens // count, (number + 1) * tokens // count) for number in numbers]


@dataclass(frozen=True)
class SequenceLayout:
    """A batch of rows, which are sequences of one length, over the ranks."""

    size: int  # the number of ranks
    order: str
    tokens: int  # of a row, with padding
    lengths: tuple[int, ...]  # the tokens of each row that are not padding

    def chunks_of(self, rank: int, length: int) -> list[range]:
        """The tokens of a row on a rank, without padding."""
        return [chunk[: max(length - chunk.start, 0)] for chunk in chunks(self.tokens, self.size, self.order, rank)]


@functools.lru_cache(maxsize=1024)
def pieces_of(layout: SequenceLayout, queries: int, keys: int, causal: bool) -> list[Piece]:
    """The calls of a kernel for the queries of one rank and the keys of another.

    >>> pieces_of(SequenceLayout(2, "zigzag", 8, (8,)), queries=1, keys=0, causal=True)
    [Piece(rows=slice(0, 1, None), queries=slice(0, 4, None), keys=slice(0, 2, None), causal=False)]
    """
    # Consecutive rows of one length are computed together.
    pieces, first = [], 0
    for length, run in itertools.groupby(layout.lengths):
        rows = slice(first, first + len(list(run)))
        first = rows.stop
        held, seen = layout.chunks_of(queries, length), layout.chunks_of(keys, length)
        own = queries == keys
        if own or not causal:  # a rank has its chunks in the order of the sequence, so its own keys need a causal mask
            squares = [(slice(0, sum(map(len, held))), slice(0, sum(map(len, seen))))]
        else:
            squares = _squares(held, seen)
        pieces += [
            Piece(rows, query_range, key_range, own and causal)
            for query_range, key_range in squares
            if query_range.stop and key_range.stop
        ]
    return pieces


def _squares(held: list[range], seen: list[range]) -> list[tuple[slice, slice]]:
    """The ranges of queries in the chunks ``held``, each with the range of keys in the chunks ``seen`` that it sees.

    Neighbouring chunks of queries that see the same keys are one range.
    """
    squares: list[tuple[slice, slice]] = []
    start = 0
    for chunk in held:
        stop = start + len(chunk)
        keys = slice(0, sum(len(other) for other in seen if other.stop <= chunk.start))
        if squares and squares[-1][1] == keys:
            squares[-1] = (slice(squares[-1][0].start, stop), keys)
        elif chunk:
            squares.append((slice(start, stop), keys))
        start = stop
    return squares
