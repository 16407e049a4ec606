"""Hierarchical collectives: a phase within each host and a phase between hosts, in which all ranks of a host take part.

All-reduce: reduce-scatter within each host, all-reduce between hosts, all-gather within each host.

In a flat ring of n ranks, the link of a host carries 2(n-1)/n of the data, and each of the 2(n-1) steps waits for it.
Here, with h hosts, the link carries 2(h-1)/h of the data, in 2(h-1) steps. The work has three phases:

1. The ranks of each host reduce-scatter, so that each holds one share of the host's sum.
2. The ranks that hold the same share on their hosts all-reduce it; all shares run at once and use all links.
3. The ranks of each host all-gather the shares.

    2 hosts of 2 ranks    reduce_scatter in hosts    0-1        2-3       0 and 2 hold chunks 0-1, 1 and 3 chunks 2-3
                          all_reduce between         0-2  1-3             of their hosts, then of all
                          all_gather in hosts        0-1        2-3

Correctness: after phase 1 each share has exactly one owner on each host, which holds the sum over that host; phase 2
adds these sums, each once.

Hosts may have different numbers of ranks. The data is then cut into so many units that every host can share them
evenly, and a rank of a small host owns more units: hosts of 2 and 3 ranks share 6 units, 3 or 2 for each rank.

All-gather: the ranks with the same place on their hosts all-gather their blocks; then each has one block of every host,
and the ranks of each host all-gather those. Reduce-scatter is the same backwards, with additions. Both are for hosts
with equally many ranks: every block crosses each link once, and all ranks of a host share the link.

    2 hosts of 2 ranks    all_gather between         0-2  1-3         0 and 2 hold blocks 0, 2; 1 and 3 blocks 1, 3
                          all_gather in hosts        0-1        2-3
"""

from collections.abc import Iterator
from dataclasses import replace

from ..closed_form_load import LoadItem
from ..cost_card import Card, default_ranks_a_host
from ..load import Hosts
from ..registry import algorithm
from ..steps import Phases
from . import _hierarchy as hierarchy
from ._hierarchy import HostSizes

__all__: list[str] = []


def _all_reduce_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    """The loads of the phases below, for prices on any number of ranks and hosts."""
    yield hierarchy.load_within_hosts("reduce_scatter", inner, hosts)
    yield hierarchy.load_between_hosts("all_reduce", outer, hosts, rank=1 / min(hosts.ranks), link=1)
    yield hierarchy.load_within_hosts("all_gather", inner, hosts)


def _all_gather_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_between_hosts("all_gather", outer, hosts, rank=1 / hosts.ranks[0], link=1)
    yield hierarchy.load_within_hosts("all_gather", inner, hosts)


def _reduce_scatter_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_within_hosts("reduce_scatter", inner, hosts)
    yield hierarchy.load_between_hosts("reduce_scatter", outer, hosts, rank=1 / hosts.ranks[0], link=1)


M = {"m": default_ranks_a_host}
BLOCKS = Card("m-1 + n/m - 1", "(n-1)/n", "several hosts, all sizes", hierarchy.MULTI_LANE, M, _reduce_scatter_load)

_chunks = hierarchy.chunks_of_units(("reduce_scatter", "all_gather"), "all_reduce")


@algorithm(
    "all_reduce",
    name="hierarchical",
    chunks=_chunks,
    card=Card("2*(m-1) + 2*(n/m - 1)", "2*(n-1)/n", "several hosts, large data", "NCCL; Horovod", M, _all_reduce_load),
)
def all_reduce(size: int, inner: str = "ring", outer: str = "ring", hosts: HostSizes = None) -> Phases:
    shape, chunks = hierarchy.host_sizes(size, hosts), _chunks(size, inner, outer, hosts)
    return (
        hierarchy.units_within_hosts("reduce_scatter", inner, shape, chunks),
        hierarchy.units_between_hosts(hierarchy.flat_schedule("outer", "all_reduce", outer, len(shape)), shape, chunks),
        hierarchy.units_within_hosts("all_gather", inner, shape, chunks),
    )


@algorithm(
    "all_gather",
    name="hierarchical",
    chunks=hierarchy.chunks_of_blocks("all_gather"),
    card=replace(BLOCKS, load=_all_gather_load),
)
def all_gather(size: int, inner: str = "ring", outer: str = "ring", hosts: HostSizes = None) -> Phases:
    num_hosts, ranks = hierarchy.equal_hosts(size, hosts)
    return (
        hierarchy.blocks_between_hosts(hierarchy.flat_schedule("outer", "all_gather", outer, num_hosts), ranks),
        hierarchy.blocks_within_hosts(
            hierarchy.flat_schedule("inner", "all_gather", inner, ranks), range(num_hosts), num_hosts
        ),
    )


@algorithm("reduce_scatter", name="hierarchical", chunks=hierarchy.chunks_of_blocks("reduce_scatter"), card=BLOCKS)
def reduce_scatter(size: int, inner: str = "ring", outer: str = "ring", hosts: HostSizes = None) -> Phases:
    num_hosts, ranks = hierarchy.equal_hosts(size, hosts)
    return (
        hierarchy.blocks_within_hosts(
            hierarchy.flat_schedule("inner", "reduce_scatter", inner, ranks), range(num_hosts), num_hosts
        ),
        hierarchy.blocks_between_hosts(hierarchy.flat_schedule("outer", "reduce_scatter", outer, num_hosts), ranks),
    )
