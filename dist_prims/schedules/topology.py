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
    cores of a machine           the counts of its ranks, summed, divided by the cores, each way      both

A step takes as long as its busiest resource, and the next step begins when it is over. The bytes of one message may be
on the link while the processor begins the next one. Segments exploit that, and a single step of one message between
hosts costs ``max(alpha, bytes * beta)``, not the sum.

The load of a resource in a step is a row of counts, so that seconds are a product with :meth:`Topology.weights`:

    column    0               1               2              3               4            5 6 7 8          9
    counts    inner messages  outer messages  inner chunks   chunks reduced  link chunks  0-3 of the cores  congestion
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schedule import Step

__all__ = ["Level", "Topology"]

Ints = NDArray[np.int64]

COLUMNS = 10
_LEVELS = ("inner", "outer")
LATENCY, PROCESSOR, LINK = [0, 1, 5, 6], [2, 3, 7, 8], [4, 9]  # the columns of each kind of time


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
    machine (containers, network namespaces) and share its cores.

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
        """A topology from the file of ``bench calibrate``: inner, outer, gamma, cores, one_machine, congestion."""
        try:
            inner, outer = (Level(float(found[level]["alpha"]), float(found[level]["beta"])) for level in _LEVELS)
            cores = None if found.get("cores") is None else int(found["cores"])
            one_machine = bool(found.get("one_machine", False))
            gamma, congestion = (float(found.get(name, 0)) for name in ("gamma", "congestion"))
            return Topology(hosts, inner, outer, gamma, cores, one_machine, congestion)
        except (KeyError, TypeError, AttributeError) as error:
            wanted = '{"inner": {"alpha": s, "beta": s}, "outer": {...}, "gamma": s, "cores": n, "one_machine": bool}'
            raise ValueError(f"a calibration must be {wanted}, in seconds a message and a byte: {error!r}") from None

    @cached_property
    def size(self) -> int:
        return sum(self.hosts)

    @cached_property
    def host_of(self) -> Ints:
        """The host of each rank."""
        return np.repeat(np.arange(len(self.hosts)), self.hosts)

    def loads(self, step: Step) -> Ints:
        """The counts of a step: one row for each sending rank, receiving rank, link out, link in, and the cores.

        Example: two hosts of one rank each; one sends a chunk to the other, which reduces it (without core columns):

        >>> pair = Topology((1, 1), Level(0, 0), Level(0, 0))
        >>> pair.loads(Step(src=0, dst=1, chunk=0, reduce=True))[:, :5].tolist()[:4]
        [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]
        >>> pair.loads(Step(src=0, dst=1, chunk=0, reduce=True))[4:, 4].tolist()  # link out of 0, 1; in of 0, 1
        [1, 0, 0, 1]
        """
        step, span = step.narrow
        far = step.src != step.dst
        src, dst = step.src[far], step.dst[far]
        spans = None if span is None else span[far]
        pairs = _distinct(src * self.size + dst)
        sends, receives = pairs // self.size, pairs % self.size
        between, leaves = self.host_of[sends] != self.host_of[receives], self.host_of[src] != self.host_of[dst]
        reduced = _count(step.dst, self.size, span, step.reduce)
        ranks = [
            np.stack(
                [
                    _count(messages, self.size, None, ~between),
                    _count(messages, self.size, None, between),
                    _count(chunks, self.size, spans, ~leaves),
                    reduced,
                ],
                axis=1,
            )
            for messages, chunks in ((sends, src), (receives, dst))
        ]
        links = [_count(self.host_of[chunks], len(self.hosts), spans, leaves) for chunks in (src, dst)]
        return self._rows(ranks, links, self._has_fan_in(src[leaves], dst[leaves]))

    def _has_fan_in(self, src: Ints, dst: Ints) -> NDArray[np.bool_]:
        """For each host, whether more than one other host sends to it."""
        count = len(self.hosts)
        pairs = _distinct(self.host_of[src] * count + self.host_of[dst])
        return np.bincount(pairs % count, minlength=count) > 1

    def _rows(self, ranks: list[Ints], links: list[Ints], has_fan_in: NDArray[np.bool_]) -> Ints:
        cores = [] if self.cores is None else [np.add.reduceat(each, self._machines, axis=0) for each in ranks]
        blocks = [(0, np.concatenate(ranks)), (4, np.concatenate(links)[:, None])]
        blocks += [(5, np.concatenate(cores))] if cores else []
        rows = np.zeros((sum(len(block) for _, block in blocks), COLUMNS), np.int64)
        at = 0
        for column, block in blocks:
            rows[at : at + len(block), column : column + block.shape[1]] = block
            at += len(block)
        links_in = rows[2 * self.size + len(self.hosts) :][: len(self.hosts)]
        links_in[has_fan_in, 9] = links_in[has_fan_in, 4]
        return rows

    @cached_property
    def _machines(self) -> Ints:
        """The first rank of each machine."""
        return np.zeros(1, np.int64) if self.one_machine else np.cumsum((0, *self.hosts[:-1]))

    def weights(self, nbytes: float) -> NDArray[np.float64]:
        """The seconds for one unit of each column of the counts, for chunks of ``nbytes``."""
        rank = [self.inner.alpha, self.outer.alpha, nbytes * self.inner.beta, nbytes * self.gamma]
        cores = [each / (self.cores or 1) for each in rank]
        return np.array([*rank, nbytes * self.outer.beta, *cores, nbytes * self.congestion])


def _count(places: Ints, size: int, span: Ints | None, which: NDArray[np.bool_]) -> Ints:
    """The number of occurrences of each place among those that ``which`` marks, each counted ``span`` times."""
    weights = None if span is None else span[which]
    return np.bincount(places[which], weights, minlength=size).astype(np.int64)


def _distinct(pairs: Ints) -> Ints:
    """The pairs without duplicates; pairs that are already in order are not sorted."""
    return pairs if bool((pairs[1:] > pairs[:-1]).all()) else np.unique(pairs)
