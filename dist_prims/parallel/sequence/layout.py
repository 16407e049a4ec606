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


class Chunk(NamedTuple):
    """Tokens of the whole sequence, from ``start`` up to ``stop``."""

    start: int
    stop: int


class Piece(NamedTuple):
    """One call of a kernel: these sequences of the batch, queries against keys, both counted on their own rank."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def chunks(length: int, size: int, order: str, rank: int) -> tuple[Chunk, ...]:
    """The chunks of a sequence on ``rank``, in their order there.

    >>> chunks(8, 2, "contiguous", 1), chunks(8, 2, "zigzag", 1)
    ((Chunk(start=4, stop=8),), (Chunk(start=2, stop=4), Chunk(start=4, stop=6)))
    """
    count = ORDERS[order] * size
    numbers = [rank] if order == "contiguous" else [rank, count - 1 - rank]
    return tuple(Chunk(number * length // count, (number + 1) * length // count) for number in numbers)


@dataclass(frozen=True)
class SequenceLayout:
    """A batch of sequences over ``size`` ranks.

    ``lengths``: the tokens of each sequence. With ``padded`` all of them are cut where a sequence of that length is;
    without it each is cut by itself, so that every rank has its share of each.
    """

    size: int
    order: str
    lengths: tuple[int, ...]
    padded: int | None = None

    def chunks_of(self, rank: int) -> list[tuple[Chunk, ...]]:
        """The chunks of each sequence on a rank, in order; padding comes last."""
        return [self._chunks_of(length, rank) for length in self.lengths]

    @property
    def width(self) -> int:
        """The padded number of tokens of a sequence on a rank, the same on all ranks."""
        lengths = [self.padded] if self.padded is not None else set(self.lengths)
        on_rank = [chunks(length, self.size, self.order, rank) for length in lengths for rank in range(self.size)]
        return max((_tokens(each) for each in on_rank), default=0)

    def pieces(self, queries: int, keys: int, causal: bool) -> list[Piece]:
        """The calls of a kernel for the queries of one rank and the keys of another.

        >>> SequenceLayout(2, "zigzag", (8,)).pieces(queries=1, keys=0, causal=True)
        [Piece(rows=slice(0, 1, None), queries=slice(0, 4, None), keys=slice(0, 2, None), causal=False)]
        """
        return _pieces(self, queries, keys, causal)

    def _chunks_of(self, length: int, rank: int) -> tuple[Chunk, ...]:
        if self.padded is None:
            return chunks(length, self.size, self.order, rank)
        cut = chunks(self.padded, self.size, self.order, rank)
        return tuple(Chunk(start, min(stop, length)) for start, stop in cut if start < length)


@functools.lru_cache(maxsize=1024)
def _pieces(layout: SequenceLayout, queries: int, keys: int, causal: bool) -> list[Piece]:
    found = []
    tables = enumerate(zip(layout.chunks_of(queries), layout.chunks_of(keys), strict=True))
    same_cut = itertools.groupby(tables, key=lambda each: each[1])
    for (query_chunks, key_chunks), run in same_cut:
        first, *others = (row for row, _ in run)
        rows = slice(first, first + 1 + len(others))
        found += [Piece(rows, *each) for each in _squares(query_chunks, key_chunks, causal, queries == keys)]
    return found


def _squares(
    query_chunks: tuple[Chunk, ...], key_chunks: tuple[Chunk, ...], causal: bool, own: bool
) -> list[tuple[slice, slice, bool]]:
    if not causal or own:  # a rank holds its chunks in the order of the sequence: its own mask is a plain causal one
        whole = [(slice(0, _tokens(query_chunks)), slice(0, _tokens(key_chunks)), causal)]
        return [each for each in whole if _tokens(query_chunks) and _tokens(key_chunks)]
    squares: list[tuple[slice, slice, bool]] = []
    begin = 0
    for query in query_chunks:
        end = begin + query.stop - query.start
        seen = slice(0, _tokens(tuple(key for key in key_chunks if key.stop <= query.start)))
        if squares and squares[-1][:2] == (slice(squares[-1][0].start, begin), seen):
            squares[-1] = (slice(squares[-1][0].start, end), seen, False)
        elif seen.stop and end > begin:
            squares.append((slice(begin, end), seen, False))
        begin = end
    return squares


def _tokens(on_rank: tuple[Chunk, ...]) -> int:
    return sum(chunk.stop - chunk.start for chunk in on_rank)
