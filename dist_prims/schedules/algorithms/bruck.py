"""Bruck's algorithms: all-gather and all-to-all in ceil(log2 n) steps for any number of ranks.

All-gather: before step k rank r holds the 2^k chunks r, r+1, ... (modulo n). In step k it receives from rank r + 2^k
the chunks that continue them. The last step brings only the chunks that are still missing, so each rank receives n-1
chunks, as few as possible.

All-to-all: a block for the rank i places further travels by the powers of two in i. In step k rank r sends to rank
r + 2^k, in one message, every block that it holds whose i has bit k set:

    size 6, a block for the rank 5 places further (5 = 1 + 4)    step 0: +1, into scratch    step 2: +4, arrives

The first hop reads the input, the last one writes the output, and the hops between go through scratch. A block travels
up to log2 n times, so the algorithm pays for small blocks only.
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__: list[str] = []

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
        distance = np.arange(1, size)
        distance = distance[(distance >> step & 1) == 1]
        src, i = np.repeat(rank, len(distance)), np.tile(distance, size)
        dst = (src + (1 << step)) % size
        chunk = np.where(i & ((1 << step) - 1), scratch + i, (src + i) % size)
        into = np.where(i >> step > 1, scratch + i, output + (dst - i) % size)
        hop = Step(src, dst, chunk, into=into)
        yield hop if step else Step.concat([keep, hop])
