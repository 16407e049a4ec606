"""Hierarchical broadcast, reduce, gather and scatter: all ranks of the root's host share the link with the root.

Broadcast: the data crosses each link once, cut into one share for each rank of a host.

1. The root scatters the shares within its host.
2. The ranks that hold the same share on their hosts broadcast it; all shares run at once.
3. The ranks of each host all-gather the shares.

    2 hosts of 2 ranks    scatter in the root's host    0-1                  0 and 1 hold chunks 0 and 1
    root 0                broadcast between             0-2  1-3             so do 2 and 3
                          all_gather in hosts           0-1        2-3       the root receives nothing: it has all

Reduce is the same backwards: a reduce-scatter within each host, a reduce of every share to its rank on the root's host,
and a gather to the root. Hosts may have different numbers of ranks, as in :mod:`.hierarchical`.

Gather and scatter are for hosts with equally many ranks. In a gather the ranks with one place on their hosts gather
their blocks to the rank with that place on the root's host; then the ranks of that host gather to the root. Every block
crosses one link once. Scatter runs the same phases backwards.

    2 hosts of 2 ranks    gather between                0-2  1-3             0 holds blocks 0 and 2, 1 blocks 1 and 3
    root 0                gather in the root's host     0-1

Scatter and gather within the root's host use a binomial tree, which has the fewest messages.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import LoadItem
from ..cost_card import Card, ceil_log2, default_ranks_a_host
from ..load import Hosts
from ..registry import algorithm
from ..schedule_builder import build_shared
from ..steps import Phase, Phases, ScheduleData, Step
from . import _hierarchy as hierarchy
from . import binomial
from ._hierarchy import HostSizes

__all__: list[str] = []

# The names in the formulas of the cards: m ranks a host; M and H, the steps of a binomial tree within a host and
# between the hosts; w and b, the chunks that the busiest rank of such a tree sends in a gather.
WHERE = {
    "m": default_ranks_a_host,
    "M": lambda n: ceil_log2(default_ranks_a_host(n)),
    "H": lambda n: ceil_log2(n // default_ranks_a_host(n)),
    "w": lambda n: _most_sent(default_ranks_a_host(n)),
    "b": lambda n: _most_sent(n // default_ranks_a_host(n)),
}


def _most_sent(n: int) -> int:
    """The chunks that the busiest rank sends in a binomial gather of n ranks."""
    half = binomial.HALF["q"](n)
    return max(n - half, half // 2)


def _place(hosts: tuple[int, ...], rank: int) -> tuple[int, int]:
    """(the host of a rank, its place on that host)."""
    begins = np.cumsum((0, *hosts))
    host = int(np.searchsorted(begins, rank, side="right")) - 1
    return host, rank - int(begins[host])


def _on_one_host(kind: str, hosts: tuple[int, ...], root: int, chunks: int) -> Phase:
    """A collective by a binomial tree over all chunks, within the host of the root."""
    host, place = _place(hosts, root)
    schedule = build_shared(kind, "binomial", hosts[host], root=place)
    return Phase(_steps_on_one_host, (schedule, root - place), chunks // schedule.chunks)


def _steps_on_one_host(schedule: ScheduleData, first_rank: int) -> Iterator[Step]:
    ranks = first_rank + np.arange(schedule.size)
    yield from map(hierarchy.Groups(ranks[None, :], np.zeros(1, np.int64), 1).spread, schedule.steps)


def _broadcast_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    """The loads of the phases below, for prices on any number of ranks and hosts."""
    yield hierarchy.load_within_hosts("scatter", "binomial", hosts, every=False)
    yield hierarchy.load_between_hosts("broadcast", outer, hosts, rank=1 / min(hosts.ranks), link=1)
    yield hierarchy.load_within_hosts("all_gather", inner, hosts)


def _reduce_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_within_hosts("reduce_scatter", inner, hosts)
    yield hierarchy.load_between_hosts("reduce", outer, hosts, rank=1 / min(hosts.ranks), link=1)
    yield hierarchy.load_within_hosts("gather", "binomial", hosts, every=False)


def _gather_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_between_hosts("gather", outer, hosts, rank=1 / hosts.ranks[0], link=1)
    yield hierarchy.load_within_hosts("gather", inner, hosts, every=False)


def _scatter_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_within_hosts("scatter", inner, hosts, every=False)
    yield hierarchy.load_between_hosts("scatter", outer, hosts, rank=1 / hosts.ranks[0], link=1)


_broadcast_chunks = hierarchy.chunks_of_units(("all_gather",), "broadcast")
_reduce_chunks = hierarchy.chunks_of_units(("reduce_scatter",), "reduce")


@algorithm(
    "broadcast",
    name="hierarchical",
    chunks=_broadcast_chunks,
    card=Card(
        "M + H + m-1", "(2*(m-1) + H)/m", "several hosts, large data", hierarchy.MULTI_LANE, WHERE, _broadcast_load
    ),
)
def broadcast(
    size: int, root: int = 0, inner: str = "ring", outer: str = "binomial", hosts: HostSizes = None
) -> Phases:
    shape, chunks = hierarchy.host_sizes(size, hosts), _broadcast_chunks(size, inner, outer, hosts)
    host, _ = _place(shape, root)
    return (
        _on_one_host("scatter", shape, root, chunks),
        hierarchy.units_between_hosts(
            hierarchy.flat_schedule("outer", "broadcast", outer, len(shape), host), shape, chunks
        ),
        hierarchy.units_within_hosts("all_gather", inner, shape, chunks, without=root),
    )


@algorithm(
    "reduce",
    name="hierarchical",
    chunks=_reduce_chunks,
    card=Card(
        "M + H + m-1",
        "(m-1 + max(min(H, 1), w))/m",
        "several hosts, large data",
        hierarchy.MULTI_LANE,
        WHERE,
        _reduce_load,
    ),
)
def reduce(size: int, root: int = 0, inner: str = "ring", outer: str = "binomial", hosts: HostSizes = None) -> Phases:
    shape, chunks = hierarchy.host_sizes(size, hosts), _reduce_chunks(size, inner, outer, hosts)
    host, _ = _place(shape, root)
    return (
        hierarchy.units_within_hosts("reduce_scatter", inner, shape, chunks),
        hierarchy.units_between_hosts(
            hierarchy.flat_schedule("outer", "reduce", outer, len(shape), host), shape, chunks
        ),
        _on_one_host("gather", shape, root, chunks),
    )


@algorithm(
    "gather",
    name="hierarchical",
    chunks=hierarchy.chunks_of_blocks("gather"),
    card=Card("M + H", "max(b, w*n/m)/n", "several hosts, small data", hierarchy.MULTI_LANE, WHERE, _gather_load),
)
def gather(
    size: int, root: int = 0, inner: str = "binomial", outer: str = "binomial", hosts: HostSizes = None
) -> Phases:
    num_hosts, ranks = hierarchy.equal_hosts(size, hosts)
    host, place = divmod(root, ranks)
    return (
        hierarchy.blocks_between_hosts(hierarchy.flat_schedule("outer", "gather", outer, num_hosts, host), ranks),
        hierarchy.blocks_within_hosts(
            hierarchy.flat_schedule("inner", "gather", inner, ranks, place), range(host, host + 1), num_hosts
        ),
    )


@algorithm(
    "scatter",
    name="hierarchical",
    chunks=hierarchy.chunks_of_blocks("scatter"),
    card=Card("M + H", "(n-1)/n", "several hosts, small data", hierarchy.MULTI_LANE, WHERE, _scatter_load),
)
def scatter(
    size: int, root: int = 0, inner: str = "binomial", outer: str = "binomial", hosts: HostSizes = None
) -> Phases:
    num_hosts, ranks = hierarchy.equal_hosts(size, hosts)
    host, place = divmod(root, ranks)
    return (
        hierarchy.blocks_within_hosts(
            hierarchy.flat_schedule("inner", "scatter", inner, ranks, place), range(host, host + 1), num_hosts
        ),
        hierarchy.blocks_between_hosts(hierarchy.flat_schedule("outer", "scatter", outer, num_hosts, host), ranks),
    )
