"""Direct exchange: every rank sends to every other rank at once. The fewest steps, and the most messages.

All-reduce has two forms:

- One shot (``direct``): each rank sends its whole buffer to all ranks and adds what it receives. 1 step, n-1 buffers.
- Two shots (``two_shot``): rank r receives chunk r of all ranks and adds it up, then sends the sum to all ranks. 2
  steps, as many bytes as a ring.

Every rank adds in rank order: a copy of rank 0's data, then the others one after the other. If each rank began with
its own data, the results would differ in the last bits.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import AllPairs, LoadItem, Star
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step

__all__: list[str] = []

SOURCE = "folklore; as one-shot and two-shot in TensorRT-LLM and vLLM"


def _pairs(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (src, dst), for each dst with src in rank order."""
    return np.tile(np.arange(size), size), np.repeat(np.arange(size), size)


def _all_pairs_load(hosts: Hosts) -> list[LoadItem]:
    """The step of an all_gather or all_to_all, for prices on any number of ranks and hosts."""
    return [AllPairs()] if hosts.size > 1 else []


def _reduce_load(hosts: Hosts) -> list[LoadItem]:
    return [AllPairs(reduce=True)]


@algorithm("all_reduce", name="direct", chunks=1, card=Card("1", "n-1", "tiny data", SOURCE, load=_reduce_load))
def all_reduce(size: int) -> Iterator[Step]:
    src, dst = _pairs(size)
    yield Step(src, dst, chunk=np.zeros_like(src), reduce=src > 0)


def _add_in_rank_order(size: int) -> Step:
    src, dst = _pairs(size)
    return Step(src, dst, chunk=dst, reduce=src > 0)


@algorithm(
    "all_reduce",
    name="two_shot",
    card=Card(
        "min(n, 2)",
        "2*(n-1)/n",
        "shared memory, one switch",
        SOURCE,
        load=lambda hosts: _reduce_load(hosts) + _all_pairs_load(hosts),
    ),
)
def two_shot(size: int) -> Iterator[Step]:
    yield _add_in_rank_order(size)
    yield from all_gather(size)


@algorithm(
    "reduce_scatter", name="direct", card=Card("1", "(n-1)/n", "one switch, small data", SOURCE, load=_reduce_load)
)
def reduce_scatter(size: int) -> Iterator[Step]:
    yield _add_in_rank_order(size)


@algorithm(
    "all_gather",
    name="direct",
    card=Card("min(n-1, 1)", "(n-1)/n", "one switch, small data", SOURCE, load=_all_pairs_load),
)
def all_gather(size: int) -> Iterator[Step]:
    if size > 1:
        dst, other = np.repeat(np.arange(size), size - 1), np.tile(np.arange(size - 1), size)
        src = other + (other >= dst)
        yield Step(src, dst, chunk=src)


GATHER_LOAD, SCATTER_LOAD = (lambda hosts: [Star(inward=True)]), (lambda hosts: [Star(inward=False)])


@algorithm("gather", name="direct", card=Card("min(n-1, 1)", "min(n-1, 1)/n", "large data", SOURCE, load=GATHER_LOAD))
def gather(size: int, root: int = 0) -> Iterator[Step]:
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Step(src=others, dst=root, chunk=others)


@algorithm("scatter", name="direct", card=Card("min(n-1, 1)", "(n-1)/n", "large data", SOURCE, load=SCATTER_LOAD))
def scatter(size: int, root: int = 0) -> Iterator[Step]:
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Step(src=root, dst=others, chunk=others)


def _rows_of_rank(size: int, rank: int) -> Iterator[Step]:
    """The rows of ``all_to_all`` in which a rank sends or receives, in their order: dst ascends, then src."""
    every = np.arange(size)
    before, after = every[:rank], every[rank + 1 :]
    src = np.concatenate([np.full(rank, rank), every, np.full(len(after), rank)])
    dst = np.concatenate([before, np.full(size, rank), after])
    yield Step(src, dst, chunk=dst, into=size + src)


@algorithm(
    "all_to_all",
    name="direct",
    card=Card("1", "(n-1)/n", "one switch", SOURCE, load=_all_pairs_load),
    part=_rows_of_rank,
)
def all_to_all(size: int) -> Iterator[Step]:
    src, dst = _pairs(size)
    yield Step(src, dst, chunk=dst, into=size + src)
