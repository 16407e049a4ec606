"""Layout of a sequence over ranks: the tokens of each rank, and which keys of a rank the queries of another rank see.

Under a causal mask the query of token t sees the keys of tokens 0 to t, so if the sequence is cut into as many parts as
ranks, the last rank has most of the work. "zigzag" cuts the sequence into 2n chunks for n ranks, and gives rank r an
early one, chunk r, and a late one, chunk 2n - 1 - r. Then each rank has the same work with the keys of each other rank.
For example, 4 ranks with the keys of rank 1, which are in chunks 1 and 6:

    rank    its queries are in    they see these keys of rank 1               pairs of chunks
    0       chunks 0 and 7        0: none;  7: chunks 1 and 6                 2
    1       chunks 1 and 6        its own: half of the pairs, by the mask     2
    2       chunks 2 and 5        2: chunk 1;  5: chunk 1                     2
    3       chunks 3 and 4        3: chunk 1;  4: chunk 1                     2

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
    """One call of a kernel. Tokens have the positions that they have on the rank that holds them."""

    rows: slice  # of the batch
    queries: slice  # tokens of the rank that has the queries
    keys: slice  # tokens of the rank that has the keys
    causal: bool  # whether the kernel applies its causal mask


def chunks(tokens: int, size: int, order: str, rank: int) -> list[range]:
    """The tokens of a sequence that ``rank`` has, in its order, as ranges of positions in the sequence.

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
    """The calls of a kernel for the queries of rank ``queries`` and the keys of rank ``keys``.

    >>> pieces_of(SequenceLayout(2, "zigzag", 8, (8,)), queries=1, keys=0, causal=True)
    [Piece(rows=slice(0, 1, None), queries=slice(0, 4, None), keys=slice(0, 2, None), causal=False)]
    """
    # Consecutive rows of one length are computed together.
    pieces, first = [], 0
    for length, run in itertools.groupby(layout.lengths):
        rows = slice(first, first + len(list(run)))
        first = rows.stop
        query_chunks, key_chunks = layout.chunks_of(queries, length), layout.chunks_of(keys, length)
        has_own_keys = queries == keys
        if has_own_keys or not causal:  # the chunks of a rank are in the order of the sequence: the mask is right
            pairs = [(slice(0, sum(map(len, query_chunks))), slice(0, sum(map(len, key_chunks))))]
        else:
            pairs = _visible_keys(query_chunks, key_chunks)
        pieces += [
            Piece(rows, query_range, key_range, has_own_keys and causal)
            for query_range, key_range in pairs
            if query_range.stop and key_range.stop
        ]
    return pieces


def _visible_keys(query_chunks: list[range], key_chunks: list[range]) -> list[tuple[slice, slice]]:
    """The ranges of a rank's queries, each with the range of keys of another rank that it sees under a causal mask.

    Neighbouring chunks of queries that see the same keys are one range.
    """
    pairs: list[tuple[slice, slice]] = []
    start = 0
    for chunk in query_chunks:
        stop = start + len(chunk)
        keys = slice(0, sum(len(other) for other in key_chunks if other.stop <= chunk.start))
        if pairs and pairs[-1][1] == keys:
            pairs[-1] = (slice(pairs[-1][0].start, stop), keys)
        elif chunk:
            pairs.append((slice(start, stop), keys))
        start = stop
    return pairs
