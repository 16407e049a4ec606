"""Topology: hosts joined by links, several ranks a host, and the load that a step of a schedule puts on each of them.

The price for equal ranks is the same for a ring of 2 hosts x 2 ranks and for a hierarchical all-reduce. In reality they
differ: the ranks of a host share its link, and a byte within a host is cheap. So the load of a step is counted for each
*resource*:

    resource                     is kept busy by                                                      kind
    rank, sending                messages it sends: inner.alpha or outer.alpha each                   latency
                                 bytes it sends within its host, inner.beta each; bytes it reduces    processor
    rank, receiving              the same for what it receives, and the same reductions               both
    link of a host, out and in   bytes that all ranks of the host send to (get from) others; where
                                 several hosts send to one at once: `congestion` more for each byte      link
    cores of a machine           the counts of its ranks, summed, divided by the cores, each way;     both
                                 messages between hosts cost a core processor.alpha each, and their
                                 bytes processor.beta each
    a message between hosts      outer.alpha, and the bytes of the busiest link: from start to end    latency, link

A step takes as long as its busiest resource, and the next step begins when it is over. The bytes of one message may be
on the link while the processor begins the next one, so the last resource is none that segments share: each message of
theirs takes its own time.

The load of a resource in a step is a row of counts, so that seconds are a product with :meth:`Topology.weights`:

    column    0               1               2             3        4            5 to 8      9           10
    counts    inner messages  outer messages  inner chunks  reduced  link chunks  0-3, cores  congestion  4, cores
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schedule import Step

__all__ = ["Level", "Topology"]

Ints = NDArray[np.int64]

COLUMNS = 11
_DENSE = 2  # a table with at most so many entries for each message is faster than sorting the messages
_LEVELS = ("inner", "outer")
LATENCY, PROCESSOR, LINK = [0, 1, 5, 6], [2, 3, 7, 8, 10], [4, 9]  # the columns of each kind of time


@dataclass(frozen=True)
class Level:
    """The cost of communication within a host or between hosts: seconds a message (``alpha``), a byte (``beta``).

    >>> shared_memory, network = Level(alpha=3e-6, beta=0.2e-9), Level(alpha=50e-6, beta=1e-9)
    >>> cluster = Topology((4, 4), inner=shared_memory, outer=network)  # 2 hosts of 4 ranks
    >>> cluster.size
    8
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ValueError(f"{self}: alpha and beta must be finite and at least 0 seconds")


@dataclass(frozen=True)
class Topology:
    """Hosts with their ranks, links and, optionally, cores. Ranks are numbered host by host.

    ``hosts``: the number of ranks of each host. ``gamma``: seconds a byte reduced. ``congestion``: additional seconds a
    byte on a link into which several hosts send in one step, since concurrent streams slow each other down. ``cores``:
    cores of each host; if set, ranks that outnumber them share their time. ``one_machine``: all hosts are on one
    machine (containers, network namespaces) and share its cores. ``processor``: the time of a core for a message
    between hosts (``alpha``) and for each of its bytes (``beta``), sent and received; by default the whole
    ``outer.alpha``, and nothing for bytes.

    >>> cluster = Topology(hosts=(2, 2), inner=Level(1e-6, 1e-10), outer=Level(10e-6, 1e-9))
    >>> cluster.size, cluster.host_of.tolist()
    (4, [0, 0, 1, 1])
    """

    hosts: tuple[int, ...]
    inner: Level
    outer: Level
    gamma: float = 0.0
    cores: int | None = None
    one_machine: bool = False
    congestion: float = 0.0
    processor: Level | None = None

    def __post_init__(self) -> None:
        if not self.hosts or min(self.hosts) < 1:
            raise ValueError(f"Topology(hosts={self.hosts}): use at least one host, each with at least one rank")
        for name, value in (("gamma", self.gamma), ("congestion", self.congestion)):
            if not 0 <= value < math.inf:
                raise ValueError(f"Topology({name}={value}): seconds a byte must be finite and at least 0")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"Topology(cores={self.cores}): use at least one core, or None for no limit")

    @staticmethod
    def flat(size: int, alpha: float, beta: float, gamma: float = 0.0) -> Topology:
        """Equal ranks with a link between every pair: the model of ``Schedule.cost(nbytes, alpha, beta)``.

        The price differs only where one rank sends most and another one reduces most (in trees, with a gamma): the
        model of ``cost`` adds the two, this one takes the busier rank.
        """
        return Topology((size,), Level(alpha, beta), Level(0.0, 0.0), gamma)

    @staticmethod
    def measured(hosts: tuple[int, ...], found: Mapping[str, Any]) -> Topology:
        """A topology from the file of ``bench calibrate``; every field but inner and outer may be absent."""
        try:
            inner, outer = (_level(found[level]) for level in _LEVELS)
            processor = _level(found["processor"]) if found.get("processor") else None
            cores = None if found.get("cores") is None else int(found["cores"])
            one_machine = bool(found.get("one_machine", False))
            gamma, congestion = (float(found.get(name, 0)) for name in ("gamma", "congestion"))
            return Topology(hosts, inner, outer, gamma, cores, one_machine, congestion, processor)
        except (KeyError, TypeError, AttributeError) as error:
            wanted = '{"inner": {"alpha": s, "beta": s}, "outer": {...}, "gamma": s, "cores": n, "one_machine": bool}'
            raise ValueError(f"a calibration must be {wanted}, in seconds a message and a byte: {error!r}") from None

    @cached_property
    def size(self) -> int:
        return sum(self.hosts)

    @cached_property
    def one_rank_a_host(self) -> Topology:
        """The same hosts with one rank each."""
        return replace(self, hosts=(1,) * len(self.hosts))

    @cached_property
    def host_of(self) -> Ints:
        """The host of each rank."""
        return np.repeat(np.arange(len(self.hosts)), self.hosts)

    @property
    def core(self) -> Level:
        """The time of a core for a message between hosts, and for each of its bytes."""
        return self.processor or Level(self.outer.alpha, 0.0)

    @property
    def lacks_cores(self) -> bool:
        """Whether the ranks outnumber the cores. Unknown cores are assumed too few for hosts that share one machine."""
        ranks = self.size if self.one_machine else max(self.hosts)
        return self.one_machine if self.cores is None else ranks > self.cores

    def loads(self, step: Step) -> Ints:
        """The counts of a step: rows for each sending rank, receiving rank, link out, link in, the cores, a message.

        Example: two hosts of one rank each; one sends a chunk to the other, which reduces it (without core columns):

        >>> pair = Topology((1, 1), Level(0, 0), Level(0, 0))
        >>> pair.loads(Step(src=0, dst=1, chunk=0, reduce=True))[:, :5].tolist()[:4]
        [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]
        >>> pair.loads(Step(src=0, dst=1, chunk=0, reduce=True))[4:, 4].tolist()  # out of 0, 1; in of 0, 1; message
        [1, 0, 0, 1, 1]
        """
        step, span = step.narrow
        size, ends = self.size, 2 * self.size
        pairs, chunks = _runs(step.src * size + step.dst, span)
        is_dense = size**2 <= _DENSE * len(pairs) and not _in_order(pairs)
        found, has_fan_in = (self._count_table if is_dense else self._count_messages)(pairs, chunks)
        links = found[:, ends : ends + 2 * len(self.hosts)]
        links[9, len(self.hosts) :][has_fan_in] = links[4, len(self.hosts) :][has_fan_in]
        if step.reduce.any():
            spans = None if span is None else span[step.reduce]
            found[3, :size] = found[3, size:ends] = np.bincount(step.dst[step.reduce], spans, minlength=size)
        if self.cores is not None:
            of_machines = np.add.reduceat(found[:4, :ends].reshape(4, 2, size), self._machines, axis=2)
            of_links = links[4].reshape(2, len(self.hosts))
            cores = found[:, ends + 2 * len(self.hosts) : -1]
            cores[5:9] = of_machines.reshape(4, -1)
            cores[10] = (of_links.sum(axis=1) if self.one_machine else of_links).reshape(-1)
        found[[4, 9], -1] = links[[4, 9]].max(axis=1)
        found[1, -1] = found[4, -1] > 0
        return found.T

    def _count_messages(self, pairs: Ints, chunks: Ints | None) -> tuple[Ints, NDArray[np.bool_]]:
        """The counts of ranks and links, and for each host whether several others send to it, message by message."""
        if not _in_order(pairs):
            order = np.argsort(pairs, kind="stable")
            pairs, chunks = pairs[order], None if chunks is None else chunks[order]
        pairs, counted = _runs(pairs, chunks)
        chunks = np.ones(len(pairs), np.int64) if counted is None else counted
        size, hosts = self.size, len(self.hosts)
        src, dst = pairs // size, pairs % size
        from_host, to_host = self.host_of[src], self.host_of[dst]
        between = from_host != to_host
        within = ~between & (src != dst)
        found, has_fan_in = np.zeros((COLUMNS, self.resources), np.int64), np.zeros(hosts, np.bool_)
        ranks, links = found[:, : 2 * size], found[:, 2 * size : 2 * (size + hosts)]
        if within.any():
            ends = _both_ends(src[within], dst[within], size)
            ranks[0] = np.bincount(ends, minlength=2 * size)
            ranks[2] = np.bincount(ends, _both_ends(chunks[within], chunks[within]), 2 * size)
        if between.any():
            src, dst, from_host, to_host, chunks = (each[between] for each in (src, dst, from_host, to_host, chunks))
            ranks[1] = np.bincount(_both_ends(src, dst, size), minlength=2 * size)
            links[4] = np.bincount(_both_ends(from_host, to_host, hosts), _both_ends(chunks, chunks), 2 * hosts)
            to, by = np.divmod(np.sort(to_host * hosts + from_host), hosts)
            has_fan_in[to[1:][(to[1:] == to[:-1]) & (by[1:] != by[:-1])]] = True
        return found, has_fan_in

    def _count_table(self, pairs: Ints, chunks: Ints | None) -> tuple[Ints, NDArray[np.bool_]]:
        """The same as ``_count_messages`` from a table of all pairs of ranks, faster where most of them communicate."""
        size, hosts = self.size, len(self.hosts)
        first, own = np.cumsum((0, *self.hosts[:-1])), (np.arange(size), self.host_of)
        table = np.bincount(pairs, chunks, size**2).astype(np.int64, copy=False).reshape(size, size)
        np.fill_diagonal(table, 0)
        found = np.zeros((COLUMNS, self.resources), np.int64)
        for side, by_src in ((found[:, :size], table), (found[:, size : 2 * size], table.T)):
            moved, messages = (np.add.reduceat(each, first, axis=1) for each in (by_src, (by_src > 0).astype(np.int64)))
            side[0], side[2] = messages[own], moved[own]
            side[1] = messages.sum(axis=1) - side[0]
        routes = np.add.reduceat(moved, first, axis=0)  # chunks [to host, from host]
        np.fill_diagonal(routes, 0)
        found[4, 2 * size : 2 * (size + hosts)] = [*routes.sum(axis=0), *routes.sum(axis=1)]
        return found, (routes > 0).sum(axis=1) > 1

    @cached_property
    def resources(self) -> int:
        """The number of resources: both sides of ranks, links and cores, and the message."""
        return 2 * (self.size + len(self.hosts) + (0 if self.cores is None else len(self._machines))) + 1

    @cached_property
    def _machines(self) -> Ints:
        """The first rank of each machine."""
        return np.zeros(1, np.int64) if self.one_machine else np.cumsum((0, *self.hosts[:-1]))

    def weights(self, nbytes: float) -> NDArray[np.float64]:
        """The seconds for one unit of each column of the counts, for chunks of ``nbytes``."""
        rank = [self.inner.alpha, self.outer.alpha, nbytes * self.inner.beta, nbytes * self.gamma]
        work = [self.inner.alpha, self.core.alpha, *rank[2:], nbytes * self.core.beta]
        *cores, core_bytes = [each / (self.cores or 1) for each in work]
        return np.array([*rank, nbytes * self.outer.beta, *cores, nbytes * self.congestion, core_bytes])


def _level(found: Mapping[str, Any]) -> Level:
    return Level(float(found["alpha"]), float(found["beta"]))


def _both_ends(src: Ints, dst: Ints, offset: int = 0) -> Ints:
    """The senders, then the receivers, which are numbered from ``offset``."""
    return np.concatenate([src, dst + offset if offset else dst])


def _in_order(keys: Ints) -> bool:
    return bool((keys[1:] >= keys[:-1]).all())


def _runs(keys: Ints, counts: Ints | None) -> tuple[Ints, Ints | None]:
    """The keys without those that repeat the one before, and the sum of the counts of each (None: each counts 1)."""
    differs = keys[1:] != keys[:-1]
    if differs.all():
        return keys, counts
    first = np.flatnonzero(np.append(True, differs))
    return keys[first], np.diff(first, append=len(keys)) if counts is None else np.add.reduceat(counts, first)
