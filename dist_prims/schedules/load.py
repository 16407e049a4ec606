"""The load of a schedule on hosts: for each step the busiest rank, link and machine, from which its seconds follow.

A *machine* is what shares cores: a host, or all hosts together if they are containers on one computer. The load of a
step is a row of counts. Each count is the largest of any rank, link or machine, sending or receiving:

    column     counts                                                                         of the busiest
    MESSAGES   messages within the host and between hosts                                     rank
    OUTER      messages between hosts                                                         rank
    COPIED     data that it sends to ranks of its host, or receives from them                 rank
    REDUCED    data that it reduces                                                           rank
    LINK       data that all ranks of a host send to other hosts, or receive from them        host
    CROWDED    data received over a link into which several hosts send in the same step       host
    MACHINE    five sums over the ranks of a machine: the messages within hosts, the          machine
               messages between hosts, the data copied, reduced, and sent between hosts

Data is counted as a fraction of the data of the collective, or in chunks where a name says so. This module counts the
steps, one by one. A schedule of 100,000 ranks may have 10^10 transfers, so the load of the algorithms of this package
also follows from their cost cards in closed form (:mod:`.closed_form_load`). The tests compare the two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .steps import ScheduleData, Step
from .topology import Topology

__all__: list[str] = []

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MESSAGES, OUTER, COPIED, REDUCED, LINK, CROWDED = range(6)
MACHINE = slice(6, 11)
_MACHINE_MESSAGES, _MACHINE_DATA = [6, 7], [8, 9, 10]
COLUMNS = 11
DATA = [COPIED, REDUCED, LINK, CROWDED, *_MACHINE_DATA]  # the columns that count data


@dataclass(frozen=True, eq=False)
class Load:
    """The load of a schedule, with consecutive steps of equal load in one row.

    ``times[i]`` steps that follow each other have the load ``rows[i]`` each. ``busiest``: one row, the counts of all
    steps together for the busiest rank, link and machine. ``busy_steps``: the most steps in which any one rank sends,
    or in which it receives.
    """

    times: Ints
    rows: Floats
    busiest: Floats
    busy_steps: int

    @property
    def steps(self) -> int:
        return int(self.times.sum())

    def over_steps(self, values: Floats) -> Floats:
        """The sum over all steps of values, of which the last axis has one for each row.

        A matrix product is no alternative: its last bits depend on the processor, so that of nearly equal prices the
        ranks of hosts with different processors would choose different ones.
        """
        sums: Floats = np.add.reduce(values * self.times, axis=-1)
        return sums

    def scaled(self, rank: float = 1, link: float = 1, machine: float = 1, messages: float = 1) -> Load:
        """The load with its counts multiplied.

        Args:
            rank: the factor of the data that a rank copies and reduces.
            link: the factor of the data of a link, and of the data of a machine.
            machine: the factor of the messages of a machine.
            messages: the factor of the messages of a rank.
        """
        factors = np.ones(COLUMNS)
        factors[[MESSAGES, OUTER]], factors[[COPIED, REDUCED]], factors[_MACHINE_MESSAGES] = messages, rank, machine
        factors[[LINK, CROWDED, *_MACHINE_DATA]] = link
        return Load(self.times, self.rows * factors, self.busiest * factors, self.busy_steps)

    def on_one_host(self, ranks: int) -> Load:
        """The load if the hosts, with ``ranks`` ranks each, were parts of one host: no message is between hosts then.

        It is right if all ranks of a host send equally much over its link, and no step has both messages within hosts
        and messages between hosts.
        """
        rows = np.vstack([self.rows, self.busiest])
        near, outer, copied, _, crossing = range(MACHINE.start, MACHINE.stop)
        rows[:, [COPIED, near, copied]] += rows[:, [LINK, outer, crossing]] / [ranks, 1, 1]
        rows[:, [OUTER, LINK, CROWDED, outer, crossing]] = 0
        return replace(self, rows=rows[:-1], busiest=rows[-1])

    @staticmethod
    def joined(loads: Sequence[Load]) -> Load:
        """The load of phases that follow each other, if the same ranks, links and machines are the busiest in each."""
        return Load(
            np.concatenate([load.times for load in loads]),
            np.concatenate([load.rows for load in loads]),
            np.sum([load.busiest for load in loads], axis=0),
            sum(load.busy_steps for load in loads),
        )


def side_by_side(loads: Sequence[Load], copies: Sequence[int] | None = None) -> Load:
    """The load of phases that run at once on different hosts.

    ``copies``: on how many hosts each phase runs, if all hosts are on one machine; None if each host is a machine.
    """
    numbers = np.ones(len(loads)) if copies is None else np.asarray(copies)
    scaled = [load.scaled(link=times, machine=times) for load, times in zip(loads, numbers.tolist(), strict=True)]
    if len(scaled) == 1:
        return scaled[0]
    length = max(load.steps for load in scaled)
    rows = np.zeros((len(scaled), length, COLUMNS))  # [phase, step, column]; a shorter phase ends in rows of zeros
    for load, of_load in zip(scaled, rows, strict=True):
        of_load[: load.steps] = np.repeat(load.rows, load.times, axis=0)
    every, busiest = rows.max(axis=0), np.array([load.busiest for load in scaled])
    most = busiest.max(axis=0)
    if copies is not None:
        every[:, MACHINE], most[MACHINE] = rows[:, :, MACHINE].sum(axis=0), busiest[:, MACHINE].sum(axis=0)
    return Load(np.ones(length, np.int64), every, most, max(load.busy_steps for load in scaled))


@dataclass(frozen=True)
class Hosts:
    """The number of ranks of each host, and whether the hosts share one machine. Ranks are numbered host by host.

    ``has_cores``: whether the number of cores is known, so that the load of machines matters; cards leave the columns
    of machines 0 otherwise. ``has_congestion``: the same for crowded links and their column. ``begins`` and ``ends``:
    the first rank of each host, and the rank after its last one.
    """

    ranks: tuple[int, ...]
    one_machine: bool = False
    has_cores: bool = True
    has_congestion: bool = True

    @staticmethod
    def of(topology: Topology) -> Hosts:
        return _hosts(topology.hosts, topology.one_machine, topology.cores is not None, topology.congestion > 0)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Hashing 12,500 hosts takes longer than a cached look-up by these hosts saves, so the hash is computed once.
        return hash((self.ranks, self.one_machine, self.has_cores, self.has_congestion))

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
        return _hosts((1,) * len(self.ranks), self.one_machine, self.has_cores, self.has_congestion)


_hosts = functools.lru_cache(maxsize=256)(Hosts)  # one object for equal hosts: its properties are computed once


class StepCount:
    """The counts of one step, in chunks. The index ``side`` is 0 for what is sent and 1 for what is received.

    ``ranks[side, count, rank]``: the counts of each rank. Count 0 is the messages within its host; the others have the
    numbers OUTER, COPIED and REDUCED. ``links[side, host]``: the chunks between a host and all others.
    ``crowded[host]``: the chunks that a host receives, if they come from several hosts, else 0.
    """

    def __init__(self, step: Step, hosts: Hosts) -> None:
        rows, span = step.narrow
        size, num_hosts, host_of = hosts.size, len(hosts.ranks), hosts.host_of
        if len(rows) and not 0 <= min(rows.src.min(), rows.dst.min()) <= max(rows.src.max(), rows.dst.max()) < size:
            raise ValueError(f"a step names a rank that does not exist, so it has no price; ranks are 0..{size - 1}")
        # 1. All rows from one rank to another form one message.
        pairs, chunks = _messages(rows.src * size + rows.dst, span)
        src, dst = np.divmod(pairs, size)
        from_host, to_host = host_of[src], host_of[dst]
        outer, inner = from_host != to_host, (from_host == to_host) & (src != dst)
        # 2. Each message counts for its sender (side 0) and for its receiver (side 1).
        self.hosts = hosts
        self.ranks = np.zeros((2, LINK, size))
        self.links = np.zeros((2, num_hosts))
        for side, ranks in enumerate((src, dst)):
            self.ranks[side, 0] = np.bincount(ranks[inner], minlength=size)
            self.ranks[side, OUTER] = np.bincount(ranks[outer], minlength=size)
            self.ranks[side, COPIED] = np.bincount(ranks[inner], chunks[inner], size)
            self.links[side] = np.bincount(host_of[ranks[outer]], chunks[outer], num_hosts)
        # 3. The receiver reduces; the count stands on both sides, so that the maximum over the sides has it.
        if rows.reduce.any():
            reduced_chunks = None if span is None else span[rows.reduce]
            self.ranks[:, REDUCED] = np.bincount(rows.dst[rows.reduce], reduced_chunks, size)
        # 4. Sorted by the receiving host, two neighbours with different senders show a crowded link.
        receiver, sender = np.divmod(np.sort(to_host[outer] * num_hosts + from_host[outer]), num_hosts)
        several = receiver[1:][(receiver[1:] == receiver[:-1]) & (sender[1:] != sender[:-1])]
        self.crowded = np.zeros(num_hosts)
        self.crowded[several] = self.links[1, several]

    def row(self) -> Floats:
        """The load of the step, in chunks."""
        return _row(self.hosts, self.ranks, self.links, self.crowded)


def _row(hosts: Hosts, ranks: Floats, links: Floats, crowded: Floats) -> Floats:
    """The largest counts, from the arrays of :class:`StepCount`, of one step or added over several."""
    row = np.zeros(COLUMNS)
    row[MESSAGES] = ranks[:, : OUTER + 1].sum(axis=1).max()
    row[OUTER:LINK] = ranks[:, OUTER:].max(axis=(0, 2))
    row[LINK], row[CROWDED] = links.max(), crowded.max()
    of_hosts = np.concatenate([np.add.reduceat(ranks, hosts.begins, axis=2), links[:, None]], axis=1)
    of_machines = of_hosts.sum(axis=2, keepdims=True) if hosts.one_machine else of_hosts
    row[MACHINE] = of_machines.max(axis=(0, 2))
    return row


def _messages(pairs: Ints, span: Ints | None) -> tuple[Ints, Floats]:
    """The distinct pairs of ranks in ascending order, and the number of chunks from the one rank to the other.

    ``pairs``: sender * size + receiver of each row. ``span``: the chunks that each row stands for, None for one each.
    """
    if (pairs[1:] <= pairs[:-1]).any():
        order = np.argsort(pairs, kind="stable")
        pairs, span = pairs[order], None if span is None else span[order]
    first = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])  # the first row of each message
    chunks = np.ones(len(pairs)) if span is None else span.astype(np.float64)
    return pairs[first], np.add.reduceat(chunks, first) if len(first) else chunks


def count(schedule: ScheduleData, hosts: Hosts) -> Load:
    """The load of a schedule, counted step by step."""
    if schedule.size != hosts.size:
        raise ValueError(
            f"{schedule.collective} {schedule.algorithm} has {schedule.size} ranks, the topology has {hosts.size}"
        )
    share = float(schedule.share)
    return count_chunks(schedule, hosts).scaled(rank=share, link=share)


@functools.lru_cache(maxsize=256)
def count_chunks(schedule: ScheduleData, hosts: Hosts) -> Load:
    """The load of a schedule, with data counted in chunks."""
    rows: list[Floats] = []
    times: list[int] = []
    ranks, links, crowded = np.zeros((2, 4, hosts.size)), np.zeros((2, len(hosts.ranks))), np.zeros(len(hosts.ranks))
    busy_steps = np.zeros((2, hosts.size), np.int64)  # of each rank, as a sender and as a receiver
    previous: tuple[bytes, ...] = ()
    for step in schedule.steps:
        if (content := _content(step)) != previous:  # the steps of a ring differ in their chunks only
            counted, previous = StepCount(step, hosts), content
            is_busy = counted.ranks[:, : OUTER + 1].any(axis=1)
            rows.append(counted.row())
            times.append(0)
        times[-1] += 1
        ranks += counted.ranks
        links += counted.links
        crowded += counted.crowded
        busy_steps += is_busy
    busiest = _row(hosts, ranks, links, crowded)
    return Load(np.array(times, np.int64), np.reshape(rows, (-1, COLUMNS)), busiest, int(busy_steps.max()))


def _content(step: Step) -> tuple[bytes, ...]:
    """What the load of a step depends on; a copy, because a generator may change its own arrays."""
    rows, span = step.narrow
    columns = (rows.src, rows.dst, rows.reduce, *(() if span is None else (span,)))
    return tuple(column.tobytes() for column in columns)
