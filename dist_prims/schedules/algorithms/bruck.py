"""Bruck: all-gather and all-to-all in log2 n steps for any size, powers of two or not.

All-gather: rank r always holds a run of chunks r, r+1, ... and gets from the rank 1, 2, 4, ... further on the run that
continues its own; the last step brings only what is still missing. All-to-all: a block for the rank i places on goes
there by the powers of two in i, all blocks with one power in one message:

    size 6, a block for the rank 5 places on (5 = 1 + 4)    step 0: +1, rests there    step 2: +4, has arrived

The first hop is read from the input and the last one written to the output; between them a block rests in scratch.
Fewer messages, for which a block travels up to log2 n times: for small blocks.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_gather", "all_to_all"]

SOURCE = "Bruck, Ho, Kipnis, Upfal and Weathersby 1997"


@algorithm("all_gather", name="bruck", card=Card("L", "(n-1)/n", "small data, any size", SOURCE))
def all_gather(size: int) -> Iterator[Step]:
    for distance in (1 << step for step in range(ceil_log2(size))):
        length = min(distance, size - distance)
        rank = np.repeat(np.arange(size), length)
        place = np.tile(np.arange(length), size)
        yield Step(src=rank, dst=(rank - distance) % size, chunk=(rank + place) % size)


@algorithm(
    "all_to_all",
    name="bruck",
    scratch=lambda size: size,
    card=Card("max(L, 1)", "b/n", "small blocks", SOURCE, {"b": lambda n: sum(i.bit_count() for i in range(n))}),
)
def all_to_all(size: int) -> Iterator[Step]:
    output, scratch = size, 2 * size
    rank = np.arange(size)
    keep = Step(src=rank, dst=rank, chunk=rank, into=output + rank)
    if size == 1:
        yield keep
    for step in range(ceil_log2(size)):
        way = np.arange(1, size)
        way = way[(way >> step & 1) == 1]
        src, i = np.repeat(rank, len(way)), np.tile(way, size)
        dst = (src + (1 << step)) % size
        chunk = np.where(i & ((1 << step) - 1), scratch + i, (src + i) % size)
        into = np.where(i >> step > 1, scratch + i, output + (dst - i) % size)
        hop = Step(src, dst, chunk, into=into)
        yield hop if step else Step.concat([keep, hop])
