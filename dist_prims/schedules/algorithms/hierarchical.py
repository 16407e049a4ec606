"""Hierarchical collectives: a phase within each host and a phase between hosts, in which all ranks of a host take part.

All-reduce: reduce-scatter within each host, all-reduce between hosts, all-gather within each host.

A flat ring sends most of the data over the slow links between hosts once for each rank. Here the work has three phases:

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

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_card import Card
from ..registry import algorithm, build, lookup
from ..schedule import Schedule, Step, WideStep

__all__: list[str] = []

Ints = NDArray[np.int64]


def _fair_share(size: int) -> int:
    """The default number of ranks a host: the largest divisor of ``size`` up to its square root."""
    return max(m for m in range(1, math.isqrt(size) + 1) if size % m == 0)


def _hosts(size: int, hosts: Sequence[int] | None) -> tuple[int, ...]:
    if hosts is None:
        each = _fair_share(size)
        return (each,) * (size // each)
    given = tuple(hosts) if isinstance(hosts, Sequence) else (hosts,)
    if not all(isinstance(ranks, int) and ranks > 0 for ranks in given) or sum(given) != size:
        raise ValueError(f"hierarchical: hosts={given} must be the number of ranks of each host (>= 1), {size} in all")
    return given


def _outer(outer: str, hosts: tuple[int, ...]) -> Schedule:
    if lookup("all_reduce", outer).scratch is not None or outer == "hierarchical":
        raise ValueError(f"hierarchical: outer={outer!r} cannot be nested; use e.g. 'ring' or 'halving_doubling'")
    return build("all_reduce", outer, len(hosts))


def _units(hosts: tuple[int, ...]) -> int:
    """The smallest number of units that the ranks of every host can share evenly."""
    return math.lcm(*hosts)


def _chunks(size: int, inner: str, outer: str, hosts: Sequence[int] | None) -> int:
    shape = _hosts(size, hosts)
    inside = [build(kind, inner, m).chunks for kind in ("reduce_scatter", "all_gather") for m in set(shape)]
    return math.lcm(_units(shape) * _outer(outer, shape).chunks, *inside)


class _Groups:
    """Many groups of ranks that run the steps of one small schedule at the same time.

    ``ranks[g]``: the ranks of group g; ``first[g]``: its first chunk; ``width``: the number of chunks of the whole
    schedule that make up one chunk of the small schedule.
    """

    def __init__(self, ranks: Ints, first: Ints, width: int) -> None:
        self.ranks, self.first, self.width = ranks, first, width
        self._small: list[NDArray[Any]] = []  # src, dst and reduce of the last step that was spread,
        self._wide: list[NDArray[Any]] = []  # and the same columns for all groups

    def spread(self, step: Step) -> Step:
        """The rows of all groups, each standing for ``width`` chunks.

        Consecutive steps of a ring differ in their chunks only. The other columns are then reused: for 100,000 ranks
        their computation would be most of the work.
        """
        small = [step.src, step.dst, step.reduce]
        if not self._small or not all(map(np.array_equal, small, self._small)):
            self._small = [column.copy() for column in small]
            src, dst = self.ranks[:, step.src].ravel(), self.ranks[:, step.dst].ravel()
            self._wide = [src, dst, np.tile(step.reduce, len(self.ranks))]
        src, dst, reduce = self._wide
        return Step(src, dst, self._chunks(step.chunk), reduce, self._chunks(step.into))

    def _chunks(self, column: Ints) -> Ints:
        return (self.first[:, None] + column * self.width).ravel()


def _inside(kind: str, inner: str, hosts: tuple[int, ...], chunks: int) -> Iterator[Step]:
    """One collective within every host, all hosts at once; hosts of equal size are groups of one schedule."""
    begins, sizes = np.cumsum((0, *hosts[:-1])), np.array(hosts)
    schedules = [build(kind, inner, m) for m in sorted(set(hosts))]
    groups = []
    for schedule in schedules:
        first_ranks = begins[sizes == schedule.size]
        ranks, first = first_ranks[:, None] + np.arange(schedule.size), np.zeros_like(first_ranks)
        groups.append(_Groups(ranks, first, chunks // schedule.chunks))
    for steps in itertools.zip_longest(*(schedule.steps for schedule in schedules)):
        wide = [
            (group.spread(step), group.width) for group, step in zip(groups, steps, strict=True) if step is not None
        ]
        spans = np.repeat([width for _, width in wide], [len(step) for step, _ in wide])
        yield WideStep(Step.concat([step for step, _ in wide]), spans)


@algorithm(
    "all_reduce",
    name="hierarchical",
    chunks=_chunks,
    card=Card("2*(m-1) + 2*(n/m - 1)", "2*(n-1)/n", "several hosts, large data", "NCCL; Horovod", {"m": _fair_share}),
)
def all_reduce(
    size: int, inner: str = "ring", outer: str = "ring", hosts: Sequence[int] | None = None
) -> Iterator[Step]:
    shape = _hosts(size, hosts)
    chunks, units = _chunks(size, inner, outer, hosts), _units(shape)
    between = _outer(outer, shape)
    unit = np.arange(units)
    begins = np.cumsum((0, *shape[:-1]))
    owners = begins[None, :] + unit[:, None] * np.array(shape)[None, :] // units  # owners[unit, host]: a rank
    yield from _inside("reduce_scatter", inner, shape, chunks)
    groups = _Groups(owners, unit * (chunks // units), chunks // units // between.chunks)
    for step in between.steps:
        yield WideStep(groups.spread(step), groups.width)
    yield from _inside("all_gather", inner, shape, chunks)


def _equal_hosts(size: int, hosts: Sequence[int] | None) -> tuple[int, int]:
    """The number of hosts, and the ranks of each."""
    shape = _hosts(size, hosts)
    if len(set(shape)) > 1:
        raise ValueError(f"hierarchical: hosts={shape} must have equally many ranks each for this collective")
    return len(shape), shape[0]


def _between(schedule: Schedule, each: int) -> Iterator[Step]:
    """One collective over hosts for every place on a host, all at once, on the blocks of the ranks at that place."""
    place, host = np.arange(each), np.arange(schedule.size)
    groups = _Groups(host[None, :] * each + place[:, None], place, each)
    yield from map(groups.spread, schedule.steps)


def _within(schedule: Schedule, number: int) -> Iterator[Step]:
    """One collective within every host, on the blocks of every host, all at once."""
    each = schedule.size
    host, of = (axis.ravel() for axis in np.meshgrid(np.arange(number), np.arange(number), indexing="ij"))
    groups = _Groups(host[:, None] * each + np.arange(each), of * each, 1)
    yield from map(groups.spread, schedule.steps)


def _parts(
    collective: str, size: int, inner: str, outer: str, hosts: Sequence[int] | None
) -> tuple[Schedule, Schedule]:
    """The schedules within a host and between hosts."""
    number, each = _equal_hosts(size, hosts)
    for parameter, name in (("inner", inner), ("outer", outer)):
        if lookup(collective, name).scratch is not None or name == "hierarchical":
            raise ValueError(f"hierarchical: {parameter}={name!r} cannot be nested; use e.g. 'ring'")
    return build(collective, inner, each), build(collective, outer, number)


def _chunks_of(collective: str) -> Callable[..., int]:
    """The number of chunks, which also checks the parameters when the schedule is built."""

    def chunks(size: int, inner: str, outer: str, hosts: Sequence[int] | None) -> int:
        _parts(collective, size, inner, outer, hosts)
        return size

    return chunks


MULTI_LANE = "Traeff and Hunold, Decomposing MPI Collectives for Exploiting Multi-lane Communication, 2020"
BLOCKS = Card("m-1 + n/m - 1", "(n-1)/n", "several hosts, all sizes", MULTI_LANE, {"m": _fair_share})


@algorithm("all_gather", name="hierarchical", chunks=_chunks_of("all_gather"), card=BLOCKS)
def all_gather(
    size: int, inner: str = "ring", outer: str = "ring", hosts: Sequence[int] | None = None
) -> Iterator[Step]:
    within, between = _parts("all_gather", size, inner, outer, hosts)
    yield from _between(between, within.size)
    yield from _within(within, between.size)


@algorithm("reduce_scatter", name="hierarchical", chunks=_chunks_of("reduce_scatter"), card=BLOCKS)
def reduce_scatter(
    size: int, inner: str = "ring", outer: str = "ring", hosts: Sequence[int] | None = None
) -> Iterator[Step]:
    within, between = _parts("reduce_scatter", size, inner, outer, hosts)
    yield from _within(within, between.size)
    yield from _between(between, within.size)
