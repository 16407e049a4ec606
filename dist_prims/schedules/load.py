"""The load of a schedule on hosts: for each step the busiest rank, link and machine, from which its seconds follow.

The load of a step is a row of counts. Each is the largest of any rank, link or machine, sending or receiving:

    column     counts                                                               of the busiest
    MESSAGES   messages within the host and between hosts                           rank
    OUTER      messages between hosts                                               rank
    COPIED     data that it sends to ranks of its host, or receives from them       rank
    REDUCED    data that it reduces                                                 rank
    LINK       data that all ranks of a host send to other hosts, or receive        host
    CROWDED    data received over a link into which several hosts send at once      host
    MACHINE    the five sums of a machine's ranks: messages within hosts, messages  machine
               between hosts, data copied, data reduced, data between hosts

Data is counted as a fraction of the data of the collective. A schedule of 100,000 ranks may have 10^10 transfers, so
the load of the algorithms of this package also follows from their cost cards, without their steps (:mod:`.moves`). This
module counts the steps. The tests compare the two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .steps import ScheduleData, Step
from .topology import Topology

__all__: list[str] = []

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MESSAGES, OUTER, COPIED, REDUCED, LINK, CROWDED, MACHINE = 0, 1, 2, 3, 4, 5, slice(6, 11)
COLUMNS = 11
DATA = [2, 3, 4, 5, 8, 9, 10]  # the columns that count data


@dataclass(frozen=True, eq=False)
class Load:
    """The load of a schedule in steps of equal load.

    ``times[i]`` steps that follow each other have the load ``rows[i]``. ``busiest``: the load of all steps together on
    the busiest rank, link and machine. ``busy_steps``: the most steps in which one rank sends, or in which it receives.
    """

    times: Ints
    rows: Floats
    busiest: Floats
    busy_steps: int

    @property
    def steps(self) -> int:
        return int(self.times.sum())

    def scaled(self, rank: float = 1, link: float = 1, machine: float = 1, messages: float = 1) -> Load:
        """The load with a multiple of the data of ranks and of links, and of the messages of machines and of ranks.

        A machine has as many times the data as its link.
        """
        factors = np.ones(COLUMNS)
        factors[[MESSAGES, OUTER]], factors[[COPIED, REDUCED]], factors[[6, 7]] = messages, rank, machine
        factors[[LINK, CROWDED, 8, 9, 10]] = link
        return Load(self.times, self.rows * factors, self.busiest * factors, self.busy_steps)

    @staticmethod
    def joined(loads: Sequence[Load]) -> Load:
        """The load of phases that follow each other, each with the same busiest ranks."""
        return Load(
            np.concatenate([load.times for load in loads]),
            np.concatenate([load.rows for load in loads]),
            np.sum([load.busiest for load in loads], axis=0),
            sum(load.busy_steps for load in loads),
        )


@dataclass(frozen=True)
class Hosts:
    """Hosts, the first rank of each, and the machines that they are on; see :meth:`of`.

    ``has_cores``: whether the load of machines matters; without it cards leave these columns 0.
    """

    ranks: tuple[int, ...]
    one_machine: bool = False
    has_cores: bool = True

    @staticmethod
    def of(topology: Topology) -> Hosts:
        return _hosts(topology.hosts, topology.one_machine, topology.cores is not None)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Hashing 12,500 hosts takes longer than the cached look-up saves, so the hash is computed once.
        return hash((self.ranks, self.one_machine, self.has_cores))

    @functools.cached_property
    def size(self) -> int:
        return sum(self.ranks)

    @functools.cached_property
    def ends(self) -> NDArray[Any]:
        return np.cumsum(self.ranks, dtype=np.int32 if self.size < 1 << 30 else np.int64)  # half the memory

    @functools.cached_property
    def begins(self) -> NDArray[Any]:
        begins: NDArray[Any] = self.ends - np.asarray(self.ranks, self.ends.dtype)
        return begins

    @functools.cached_property
    def host_of(self) -> Ints:
        """The host of each rank."""
        return np.repeat(np.arange(len(self.ranks)), self.ranks)

    @property
    def one_rank_each(self) -> Hosts:
        return _hosts((1,) * len(self.ranks), self.one_machine, self.has_cores)


@functools.lru_cache(maxsize=256)
def _hosts(ranks: tuple[int, ...], one_machine: bool, has_cores: bool) -> Hosts:
    return Hosts(ranks, one_machine, has_cores)  # shared, because of what it computes once


class StepCount:
    """The counts of one step: ``ranks[side, column, rank]``, ``links[side, host]`` and ``crowded[host]``, in chunks."""

    def __init__(self, step: Step, hosts: Hosts) -> None:
        rows, span = step.narrow
        size, number, host_of = hosts.size, len(hosts.ranks), hosts.host_of
        if len(rows) and not 0 <= min(rows.src.min(), rows.dst.min()) <= max(rows.src.max(), rows.dst.max()) < size:
            raise ValueError(f"a step names a rank that does not exist, so it has no price; ranks are 0..{size - 1}")
        pairs, chunks = _messages(rows.src * size + rows.dst, span)
        src, dst = np.divmod(pairs, size)
        from_host, to_host = host_of[src], host_of[dst]
        outer, inner = from_host != to_host, (from_host == to_host) & (src != dst)
        self.hosts = hosts
        self.ranks = np.zeros((2, 4, size))  # of sender and receiver: messages within and between, chunks, reduced
        self.links = np.zeros((2, number))
        for side, ends in enumerate((src, dst)):
            self.ranks[side, 0] = np.bincount(ends[inner], minlength=size)
            self.ranks[side, 1] = np.bincount(ends[outer], minlength=size)
            self.ranks[side, 2] = np.bincount(ends[inner], chunks[inner], size)
            self.links[side] = np.bincount(host_of[ends[outer]], chunks[outer], number)
        if rows.reduce.any():
            spans = None if span is None else span[rows.reduce]
            self.ranks[:, 3] = np.bincount(rows.dst[rows.reduce], spans, size)
        routes = np.sort(to_host[outer] * number + from_host[outer])
        to, by = np.divmod(routes, number)
        self.crowded = np.zeros(number)
        met = to[1:][(to[1:] == to[:-1]) & (by[1:] != by[:-1])]
        self.crowded[met] = self.links[1, met]

    def row(self) -> Floats:
        """The load of the step, in chunks."""
        return _row(self.hosts, self.ranks, self.links, self.crowded)


def _row(hosts: Hosts, ranks: Floats, links: Floats, crowded: Floats) -> Floats:
    row = np.zeros(COLUMNS)
    row[MESSAGES] = ranks[:, :2].sum(axis=1).max()
    row[OUTER:LINK] = ranks[:, 1:].max(axis=(0, 2))
    row[LINK], row[CROWDED] = links.max(), crowded.max()
    of_hosts = np.concatenate([np.add.reduceat(ranks, hosts.begins, axis=2), links[:, None]], axis=1)
    of_machines = of_hosts.sum(axis=2, keepdims=True) if hosts.one_machine else of_hosts
    row[MACHINE] = of_machines.max(axis=(0, 2))
    return row


def _messages(pairs: Ints, span: Ints | None) -> tuple[Ints, Floats]:
    """The distinct pairs of ranks, and the chunks between each."""
    if (pairs[1:] <= pairs[:-1]).any():
        order = np.argsort(pairs, kind="stable")
        pairs, span = pairs[order], None if span is None else span[order]
    first = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])
    chunks = np.ones(len(pairs)) if span is None else span.astype(np.float64)
    return pairs[first], np.add.reduceat(chunks, first) if len(first) else chunks


def count(schedule: ScheduleData, hosts: Hosts) -> Load:
    """The load of a schedule, counted step by step."""
    if schedule.size != hosts.size:
        raise ValueError(
            f"{schedule.collective} {schedule.algorithm} has {schedule.size} ranks, the topology has {hosts.size}"
        )
    share = float(schedule.share)
    return count_chunks(schedule, hosts).scaled(share, share)


@functools.lru_cache(maxsize=256)
def count_chunks(schedule: ScheduleData, hosts: Hosts) -> Load:
    """The load with data counted in chunks."""
    rows: list[Floats] = []
    times: list[int] = []
    ranks, links, crowded = np.zeros((2, 4, hosts.size)), np.zeros((2, len(hosts.ranks))), np.zeros(len(hosts.ranks))
    busy = np.zeros((2, hosts.size), np.int64)
    before: tuple[bytes, ...] = ()
    for step in schedule.steps:
        if (content := _content(step)) != before:  # the steps of a ring differ in their chunks only
            counted, before = StepCount(step, hosts), content
            row, is_busy = counted.row(), counted.ranks[:, :2].any(axis=1)
            rows.append(row)
            times.append(0)
        times[-1] += 1
        ranks += counted.ranks
        links += counted.links
        crowded += counted.crowded
        busy += is_busy
    every = np.reshape(rows, (-1, COLUMNS))
    return Load(np.array(times, np.int64), every, _row(hosts, ranks, links, crowded), int(busy.max()))


def _content(step: Step) -> tuple[bytes, ...]:
    """What the load of a step depends on; a copy, because a generator may change its own arrays."""
    rows, span = step.narrow
    columns = (rows.src, rows.dst, rows.reduce, *(() if span is None else (span,)))
    return tuple(column.tobytes() for column in columns)
