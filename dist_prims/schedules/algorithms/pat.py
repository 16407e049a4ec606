"""PAT, parallel aggregated trees: a binomial tree for every rank at once, the furthest hops first.

Like Bruck it gathers in log2 n steps for any size, but in the other order: a chunk goes half the group away while it is
alone, and only the last hops, between neighbours, carry many chunks. On networks whose far links are the scarce ones,
that is the right way round. ``aggregate`` limits the chunks of a message, as buffers of a fixed size do: steps with
more are done in turns. Reduce-scatter is the same backwards.

    size 8, chunk 0    step 0: 0->4    step 1: 0->2 4->6    step 2: 0->1 2->3 4->5 6->7    (Bruck: nearest first)
"""

from collections.abc import Iterator

import numpy as np

from ..cost_card import Card, ceil_log2
from ..registry import algorithm
from ..schedule import Step

__all__ = ["all_gather", "reduce_scatter"]

CARD = Card("L", "(n-1)/n", "small and middling data on tapered networks", "Jeaugey, PAT, 2025 (NCCL 2.23)")


def _hops(size: int, aggregate: int | None) -> list[Step]:
    """The hops of all chunks: the chunk of the rank ``offset`` places before a rank goes ``distance`` further."""
    if aggregate is not None and aggregate < 1:
        raise ValueError(f"pat: aggregate={aggregate}; a message holds 1 chunk or more")
    steps = []
    for distance in (1 << step for step in reversed(range(ceil_log2(size)))):
        offsets = np.arange(0, size - distance, 2 * distance)
        turn = aggregate or len(offsets)
        for some in (offsets[at : at + turn] for at in range(0, len(offsets), turn)):
            rank, offset = np.repeat(np.arange(size), len(some)), np.tile(some, size)
            steps.append(Step(src=rank, dst=(rank + distance) % size, chunk=(rank - offset) % size))
    return steps


@algorithm("all_gather", name="pat", card=CARD)
def all_gather(size: int, aggregate: int | None = None) -> Iterator[Step]:
    yield from _hops(size, aggregate)


@algorithm("reduce_scatter", name="pat", card=CARD)
def reduce_scatter(size: int, aggregate: int | None = None) -> Iterator[Step]:
    for hop in reversed(_hops(size, aggregate)):
        yield Step(src=hop.dst, dst=hop.src, chunk=hop.chunk, reduce=True)
