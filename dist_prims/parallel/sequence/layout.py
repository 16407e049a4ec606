"""Layout of a sequence over ranks: the tokens of each rank, and which of its keys another rank's queries see.

Under a causal mask token t sees t + 1 tokens, so with the sequence cut in as many parts as ranks the last rank has
nearly all the work. "zigzag" cuts it in twice as many chunks and gives rank r the chunks r and 2n - 1 - r, an early and
a late one: then each rank has the same work with each other rank's keys.

    4 ranks        chunks        sees of rank 1's keys, chunks 1 and 6
    rank 0         0 and 7       chunk 7 both of them
    rank 1         1 and 6       the causal half of the square
    rank 2         2 and 5       both of its chunks chunk 1
    rank 3         3 and 4       both of its chunks chunk 1

Chunks of different ranks do not overlap, so a chunk of queries sees a chunk of keys whole or not at all, and those that
it sees lie in front; only a rank's own keys need a mask. No mask is ever made.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

__all__: list[str] = []

ORDERS = {"contiguous": 1, "zigzag": 2}  # and the number of chunks of a rank


class Piece(NamedTuple):
    """One call of a kernel: these rows of the batch, queries against keys, both counted on their own rank."""

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
    """Rows of ``tokens`` tokens over ``size`` ranks. ``lengths``: how many tokens of each row are not padding."""

    size: int
    order: str
    tokens: int
    lengths: tuple[int, ...]

    def chunks_of(self, rank: int, length: int) -> list[range]:
        """The tokens of a row on a rank, without padding."""
        return [chunk[: max(length - chunk.start, 0)] for chunk in chunks(self.tokens, self.size, self.order, rank)]


@functools.lru_cache(maxsize=1024)
def pieces_of(layout: SequenceLayout, queries: int, keys: int, causal: bool) -> list[Piece]:
    """The calls of a kernel for the queries of one rank and the keys of another.

    >>> pieces_of(SequenceLayout(2, "zigzag", 8, (8,)), queries=1, keys=0, causal=True)
    [Piece(rows=slice(0, 1, None), queries=slice(0, 4, None), keys=slice(0, 2, None), causal=False)]
    """
    pieces, first = [], 0
    for length, run in itertools.groupby(layout.lengths):
        rows = slice(first, first + len(list(run)))
        first = rows.stop
        held, seen = layout.chunks_of(queries, length), layout.chunks_of(keys, length)
        own = queries == keys
        if own or not causal:  # a rank has its chunks in the order of the sequence: a plain causal mask
            squares = [(slice(0, sum(map(len, held))), slice(0, sum(map(len, seen))))]
        else:
            squares = _squares(held, seen)
        pieces += [
            Piece(rows, asking, seen_keys, own and causal)
            for asking, seen_keys in squares
            if asking.stop and seen_keys.stop
        ]
    return pieces


def _squares(held: list[range], seen: list[range]) -> list[tuple[slice, slice]]:
    """The queries of a rank, and the keys of another rank that they see. Neighbouring chunks of queries that see the
    same keys are one square."""
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
