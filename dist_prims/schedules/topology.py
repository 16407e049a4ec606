"""Topology: hosts joined by links, several ranks a host, and the costs of messages, bytes and reductions.

The price for equal ranks is the same for a ring of 2 hosts x 2 ranks and for a hierarchical all-reduce. In reality they
differ: the ranks of a host share its link, and a byte within a host is cheap. ``load.py`` counts what each rank, link
and machine has to do, and ``cost.py`` computes the seconds from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["Level", "Topology"]

_LEVELS = ("inner", "outer")


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
    >>> cluster.size
    4
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
        """Equal ranks with a link between every pair: the model of ``Schedule.cost(nbytes, alpha, beta)``."""
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

    @property
    def core(self) -> Level:
        """The time of a core for a message between hosts, and for each of its bytes."""
        return self.processor or Level(self.outer.alpha, 0.0)

    @property
    def lacks_cores(self) -> bool:
        """Whether the ranks outnumber the cores. Unknown cores are assumed too few for hosts that share one machine."""
        ranks = self.size if self.one_machine else max(self.hosts)
        return self.one_machine if self.cores is None else ranks > self.cores


def _level(found: Mapping[str, Any]) -> Level:
    return Level(float(found["alpha"]), float(found["beta"]))
