"""PAT (parallel aggregated trees): collectives by one binomial tree for every rank at once.

In each step a rank sends the chunks that it holds to the rank ``distance`` further on, except the chunks that would
thereby have travelled once around all ranks. The distance halves from step to step:

    size 8, chunk 0    step 0: 0->4    step 1: 0->2 4->6    step 2: 0->1 2->3 4->5 6->7    (Bruck: nearest first)

Before the step with distance d a chunk of rank r is on the ranks r, r + 2d, r + 4d, ...; after it, on r, r + d, r + 2d,
...; so after distance 1 it is on all ranks. Like Bruck's algorithm PAT takes log2 n steps for any size. Bruck's sends
the nearest first; in PAT a chunk travels far while it is alone, and only the last hops, between neighbours, carry many
chunks. Networks with scarce long-distance links profit.

``aggregate`` limits the number of chunks in a message, as buffers of fixed size do: a step with more chunks becomes
several steps. Reduce-scatter runs the same steps backwards and adds.

All-reduce is the reduce-scatter and then the all-gather: 2 log2 n steps, and as few bytes as a ring, for any number of
ranks. Halving-doubling has both only for powers of two. Each chunk is added up along one tree, the same for all ranks.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, LoadItem, backwards, shifted
from ..cost_card import Card, ceil_log2
from ..load import Hosts
from ..registry import algorithm
from ..steps import CountedStep, Step

__all__: list[str] = []

TRAEFF = "Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms, 2024; Jeaugey, PAT, 2025"


def _gather_load(hosts: Hosts, aggregate: int | None = None) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size = hosts.size
    for distance in (1 << step for step in reversed(range(ceil_log2(size)))):
        chunks = len(range(0, size - distance, 2 * distance))
        most = aggregate or chunks
        yield EqualSteps(chunks // most, [shifted(size, distance, most)])
        yield EqualSteps(int(chunks % most > 0), [shifted(size, distance, chunks % most)])


def _reduce_scatter_load(hosts: Hosts, aggregate: int | None = None) -> Iterator[LoadItem]:
    yield from backwards(_gather_load(hosts, aggregate))


CARD = Card(
    "L",
    "(n-1)/n",
    "small and medium data on tapered networks",
    "Jeaugey, PAT, 2025 (NCCL 2.23)",
    load=_gather_load,
)


def _hops(size: int, aggregate: int | None) -> list[Step]:
    """The steps of the all-gather; a step is cut if it has more than ``aggregate`` chunks a message."""
    if aggregate is not None and not (isinstance(aggregate, int) and aggregate >= 1):
        raise ValueError(f"pat: aggregate={aggregate!r}; it must be a whole number, at least 1 chunk a message")
    steps = []
    for distance in (1 << step for step in reversed(range(ceil_log2(size)))):
        offsets = np.arange(0, size - distance, 2 * distance)
        most = aggregate or len(offsets)
        steps += [_hop(size, distance, offsets[first : first + most]) for first in range(0, len(offsets), most)]
    return steps


def _hop(size: int, distance: int, offsets: NDArray[np.int64]) -> Step:
    """Each rank sends the chunks of the ranks ``offsets`` places before it to the rank ``distance`` further."""

    def rows() -> Step:
        rank, offset = np.repeat(every, len(offsets)), np.tile(offsets, size)
        return Step(src=rank, dst=(rank + distance) % size, chunk=(rank - offset) % size)

    every = np.arange(size)
    return CountedStep(Step(every, (every + distance) % size, chunk=every), len(offsets), rows)


@algorithm("all_gather", name="pat", card=CARD)
def all_gather(size: int, aggregate: int | None = None) -> Iterator[Step]:
    yield from _hops(size, aggregate)


@algorithm("reduce_scatter", name="pat", card=replace(CARD, load=_reduce_scatter_load))
def reduce_scatter(size: int, aggregate: int | None = None) -> Iterator[Step]:
    for hop in reversed(_hops(size, aggregate)):
        yield hop.backwards()


@algorithm(
    "all_reduce",
    name="pat",
    card=Card(
        "2*L",
        "2*(n-1)/n",
        "medium and large data, any size",
        TRAEFF,
        load=lambda hosts, aggregate: [*_reduce_scatter_load(hosts, aggregate), *_gather_load(hosts, aggregate)],
    ),
)
def all_reduce(size: int, aggregate: int | None = None) -> Iterator[Step]:
    yield from reduce_scatter(size, aggregate)
    yield from all_gather(size, aggregate)
