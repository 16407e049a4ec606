"""Hierarchical all-to-all and barrier: every rank exchanges with few ranks of its host, then with few ranks elsewhere.

All-to-all, for hosts with equally many ranks, m each. Rank (h, i) is rank number i of host h: i is its *place*.

1. Within each host, rank (h, i) gives rank (h, j) its blocks for all ranks with place j, one of each host.
2. Between hosts, rank (h, j) gives rank (d, j) the blocks of all ranks of host h for it, as one message.

    2 hosts of 2 ranks    all_to_all in hosts    0-1        2-3       0 holds the blocks of 0 and 1 for ranks 0 and 2
                          all_to_all between     0-2  1-3             0 -> 2: two blocks, for rank 2

Every block crosses a link once, as in a flat all-to-all, but in messages of a whole host's blocks: a rank sends m-1
messages within its host and n/m - 1 to other hosts, instead of n-1. The price is a second copy of the data within the
host. Blocks between the phases lie in n scratch chunks, the chunk for host d from place i being d * m + i; n further
ones serve phases that need scratch themselves.

Barrier: a dissemination within each host, after which every rank knows of its whole host, then one between the ranks
with the same place on their hosts. Fewer messages cross a link than in a flat dissemination.
"""

import functools
from collections.abc import Iterator

import numpy as np

from ..closed_form_load import LoadItem
from ..cost_card import Card, ceil_log2, default_ranks_a_host
from ..load import Hosts
from ..registry import algorithm, lookup
from ..steps import CountedStep, Phase, Phases, ScheduleData, Step
from . import _hierarchy as hierarchy
from ._hierarchy import HostSizes, Ints

__all__: list[str] = []


def _scratch(size: int, inner: str, outer: str, hosts: HostSizes) -> int:
    phases_need_scratch = any(lookup("all_to_all", name).scratch is not None for name in (inner, outer))
    return 2 * size if phases_need_scratch else size


def _numbers(schedule: ScheduleData, first_scratch: int, sent: Ints, received: Ints) -> Ints:
    """numbers[i, c]: the chunk of this algorithm that is chunk c of the small schedule in its i-th run.

    Row i of ``sent`` and of ``received`` has the chunks that the i-th run sends, and the chunks for what it receives.
    """
    runs, scratch = len(sent), schedule.contract.total - 2 * schedule.size
    return np.concatenate([sent, received, first_scratch + np.arange(runs * scratch).reshape(runs, scratch)], axis=1)


def _spread(schedule: ScheduleData, ranks: Ints, numbers: Ints) -> Iterator[Step]:
    """The small schedule in every group of ranks[group, member], in one run for each row of chunk numbers.

    All runs of a group share their messages.
    """
    for step in schedule.steps:
        messages, span = step.narrow
        counted = len(numbers) if span is None else _repeated(span * len(numbers), len(ranks))
        src, dst = ranks[:, messages.src].ravel(), ranks[:, messages.dst].ravel()
        yield CountedStep(Step(src, dst, src), counted, functools.partial(_rows, step, ranks, numbers))


def _rows(step: Step, ranks: Ints, numbers: Ints) -> Step:
    src, dst = (ranks[:, ends].repeat(len(numbers), axis=0).ravel() for ends in (step.src, step.dst))
    chunk, into = (_repeated(numbers[:, column], len(ranks)) for column in (step.chunk, step.into))
    return Step(src, dst, chunk, into=into)


def _repeated(numbers: Ints, times: int) -> Ints:
    """All numbers, several times one after the other, in a quarter of the time of ``np.tile``."""
    return numbers[None].repeat(times, axis=0).ravel()


def _all_to_all_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    """The loads of the phases below, for prices on any number of ranks and hosts."""
    yield hierarchy.load_within_hosts("all_to_all", inner, hosts)
    yield hierarchy.load_between_hosts("all_to_all", outer, hosts, rank=1, link=hosts.ranks[0])


def _barrier_load(hosts: Hosts, inner: str, outer: str) -> Iterator[LoadItem]:
    yield hierarchy.load_within_hosts("barrier", inner, hosts)
    yield hierarchy.load_between_hosts("barrier", outer, hosts, rank=1, link=1)


@algorithm(
    "all_to_all",
    name="hierarchical",
    chunks=hierarchy.chunks_of_blocks("all_to_all"),
    scratch=_scratch,
    card=Card(
        "max(m-1, 1) + max(n/m - 1, 1)",
        "(n/m*(m-1) + m*(n/m - 1))/n",
        "several hosts, small blocks",
        hierarchy.MULTI_LANE,
        {"m": default_ranks_a_host},
        _all_to_all_load,
    ),
)
def all_to_all(size: int, inner: str = "pairwise", outer: str = "pairwise", hosts: HostSizes = None) -> Phases:
    num_hosts, m = hierarchy.equal_hosts(size, hosts)
    within = hierarchy.flat_schedule("inner", "all_to_all", inner, m)
    between = hierarchy.flat_schedule("outer", "all_to_all", outer, num_hosts)
    return Phase(_within_hosts, (within, num_hosts)), Phase(_between_hosts, (between, m))


def _within_hosts(schedule: ScheduleData, num_hosts: int) -> Iterator[Step]:
    ranks = block = np.arange(num_hosts * schedule.size).reshape(num_hosts, -1)  # [host, place]; the block for the rank
    yield from _spread(schedule, ranks, _numbers(schedule, 3 * block.size, block, 2 * block.size + block))


def _between_hosts(schedule: ScheduleData, m: int) -> Iterator[Step]:
    ranks = block = np.arange(schedule.size * m).reshape(-1, m).T  # [place, host]
    collected, output = 2 * block.size + block, block.size + block
    yield from _spread(schedule, ranks, _numbers(schedule, 3 * block.size, collected, output))


@algorithm(
    "barrier",
    name="hierarchical",
    chunks=lambda size, inner, outer, hosts: hierarchy.chunks_of_blocks("barrier")(size, inner, outer, hosts) // size,
    card=Card(
        "M + H",
        "0",
        "several hosts",
        hierarchy.MULTI_LANE,
        {"M": lambda n: ceil_log2(default_ranks_a_host(n)), "H": lambda n: ceil_log2(n // default_ranks_a_host(n))},
        _barrier_load,
    ),
)
def barrier(
    size: int, inner: str = "dissemination", outer: str = "dissemination", hosts: HostSizes = None
) -> Iterator[Step]:
    rank = np.arange(size).reshape(hierarchy.equal_hosts(size, hosts))  # [host, place]
    for groups, name in ((rank, inner), (rank.T, outer)):
        schedule = hierarchy.flat_schedule("inner" if groups is rank else "outer", "barrier", name, groups.shape[1])
        yield from map(hierarchy.Groups(groups, np.zeros(len(groups), np.int64), 1).spread, schedule.steps)
