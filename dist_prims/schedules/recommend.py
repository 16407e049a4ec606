"""Recommendation of an algorithm for a topology: the price and the bottleneck of every candidate, and the lower bound.

Candidates are the registered algorithms with default parameters, and with one chunk those that pipeline chunks, because
the segments of the executor are a pipeline too. Over several hosts ``hierarchical`` is added where it exists, with each
algorithm between the hosts. Within the hosts it uses its default first; the other inner algorithms are tried with the
best outer one only, because the phases run one after the other and the choices hardly interact.

An algorithm in which thousands of ranks all send to each other has too many transfers to count. The number of transfers
is extrapolated from small sizes, and a candidate with too many is not priced but reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .contract import COLLECTIVES
from .cost import best_segments, lower_bound, parts, seconds
from .cost_card import ceil_log2
from .registry import Algorithm, algorithms, build, build_shared, lookup, nearest
from .replay import replay
from .schedule import Schedule
from .step_bounds import StepBounds
from .topology import LATENCY, LINK, PROCESSOR, Topology
from .trust import MOST_RANKS, evaluated, may_be_chosen

__all__: list[str] = []

MOST_TRANSFERS = 150_000_000  # of a schedule: pricing takes some seconds
MOST_AT_ONCE = 3_000_000  # of a step: some hundred MB
_FEW_RANKS = 512  # on equal hosts: no algorithm comes near to these limits, the largest has 1 % and 9 % of them
_TOLERANCE = 0.05  # a smaller relative difference of two prices is not significant
_MOST_RANKS_FOR_TIES = 256

# In these collectives a rank can send each block straight to its receiver. The prediction adds the latencies of all
# messages of a rank, although those of a direct exchange are in flight at once. So the backend chooses an algorithm
# that forwards blocks only if it is much shorter: if its predicted time is less than this share of that of direct.
EXCHANGES = ("all_to_all", "gather", "scatter")
MUCH_SHORTER = 0.6

# Hierarchical collectives for hosts of any sizes, and the collectives within a host that the parameter inner names.
_WITHIN = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("all_gather",),
    "reduce": ("reduce_scatter",),
}


@dataclass(frozen=True)
class Candidate:
    """A schedule in segments, its seconds by kind of resource, and the bytes over the busiest link.

    ``uncut``: seconds with one segment.
    """

    name: str
    schedule: Schedule
    segments: int
    latency: float
    processor: float
    link: float
    link_bytes: float
    uncut: float

    @property
    def seconds(self) -> float:
        return self.latency + self.processor + self.link

    @property
    def bound_by(self) -> str:
        return max(("link", "latency", "processor"), key=lambda part: getattr(self, part))


@dataclass(frozen=True)
class Advice:
    """The candidates, fastest first, those not priced with their numbers of transfers, and the lower bound in seconds.

    Candidates of nearly equal price are ordered by what the price does not include or counts too little; see
    ``_preference``.
    """

    candidates: tuple[Candidate, ...]
    left_out: tuple[tuple[str, str], ...]
    bound: float


def recommend(
    collective: str, nbytes: float, topology: Topology, only_best: bool = False, only_built_in: bool = False
) -> Advice:
    """Price the candidates for a collective of ``nbytes`` on a topology.

    ``only_best``: without the candidates that the backend would not choose, as a simple lower bound shows.
    ``only_built_in``: without algorithms of users.

    >>> from dist_prims.schedules.topology import Level
    >>> cluster = Topology((4, 4), Level(1e-6, 1e-10), Level(20e-6, 1e-9))
    >>> best = recommend("all_reduce", 64e6, cluster).candidates[0]
    >>> best.name.split()[0], best.bound_by
    ('hierarchical', 'link')
    """
    if collective not in COLLECTIVES:
        raise ValueError(nearest("collective", collective, COLLECTIVES))
    search = _Search(collective, nbytes, topology, only_best, only_built_in)
    if collective in EXCHANGES:
        search.direct()
    if _has_hierarchies(collective, topology):
        search.hierarchies()
    search.flat()
    if not search.found:
        raise ValueError(f"{collective} over {topology.size} ranks: every algorithm has too many transfers to price")
    ranked = sorted(search.found, key=lambda candidate: candidate.seconds)
    near = [candidate for candidate in ranked if candidate.seconds <= ranked[0].seconds * (1 + _TOLERANCE)]
    if topology.size <= _MOST_RANKS_FOR_TIES:
        near.sort(key=lambda each: _preference(each, topology))
    ranked[: len(near)] = near
    left_out = sorted(search.left_out, key=lambda each: each[0].startswith("hierarchical"))
    return Advice(tuple(ranked), tuple(left_out), bound(collective, nbytes, topology))


def _has_hierarchies(collective: str, topology: Topology) -> bool:
    if len(topology.hosts) == 1 or max(topology.hosts) == 1:
        return False
    equal = len(set(topology.hosts)) == 1
    return collective in _WITHIN or (equal and "hierarchical" in algorithms(collective))


def _use_of_links(schedule: Schedule, topology: Topology) -> tuple[int, int]:
    """The largest number of hosts that send to one host in one step, and to which one host sends in all steps.

    Concurrent streams slow each other down on a link. A connection that has been idle begins slowly: TCP first finds
    out again how fast it may send.
    """
    fan_in, hosts = 0, len(topology.hosts)
    reached = np.zeros((hosts, hosts), np.bool_)
    for step in schedule.steps:
        messages, _ = step.narrow
        pairs = np.unique(topology.host_of[messages.dst] * hosts + topology.host_of[messages.src])
        to, by = np.divmod(pairs, hosts)
        fan_in = max(fan_in, int(np.bincount(to[to != by], minlength=1).max()))
        reached[by, to] |= to != by
    return fan_in, int(reached.sum(axis=1).max())


def _preference(candidate: Candidate, topology: Topology) -> tuple[Any, ...]:
    """The order among candidates of nearly equal price: the smallest comes first.

    The use of links; then those made for hosts, whose messages are contiguous where those of a flat algorithm are often
    gathered from several places; then the bytes that a rank reduces, the transfers of all segments, and the steps.
    """
    schedule = candidate.schedule
    is_flat = "hosts" not in dict(schedule.parameters)
    transfers = sum(map(len, schedule.steps)) * candidate.segments
    return *_use_of_links(schedule, topology), is_flat, schedule.price.reduced, transfers, len(schedule.steps)


@dataclass
class _Search:
    """The search through the candidates of one collective."""

    collective: str
    nbytes: float
    topology: Topology
    only_best: bool
    only_built_in: bool
    found: list[Candidate] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    most_seconds: float = math.inf  # a candidate that takes longer is not chosen

    def direct(self) -> None:
        """Price ``direct`` first: the backend chooses another schedule for an exchange only if it is much shorter."""
        self._try_flat(lookup(self.collective, "direct"), {})
        self.most_seconds = min((MUCH_SHORTER * each.seconds for each in self.found), default=math.inf)

    def flat(self) -> None:
        for each in self._equal_ranks():
            if each.name == "direct" and self.collective in EXCHANGES:
                continue  # tried first
            one_chunk = [{"chunks": 1}] if "chunks" in each.parameters else []
            for parameters in ({}, *one_chunk, *each.variants):
                self._try_flat(each, parameters)

    def _equal_ranks(self) -> Iterator[Algorithm]:
        """The algorithms without a parameter ``hosts`` that may be chosen automatically."""
        every = (lookup(self.collective, name) for name in algorithms(self.collective))
        usable = (each for each in every if may_be_chosen(each, self.topology.size) and "hosts" not in each.parameters)
        return (each for each in usable if each.built_in or not self.only_built_in)

    def _try_flat(self, algorithm: Algorithm, parameters: Mapping[str, Any]) -> None:
        self._try(algorithm.name, lambda: _growth(algorithm, self.topology.size), dict(parameters))

    def hierarchies(self) -> None:
        before = len(self.found)
        first = lookup(self.collective, "hierarchical").parameters["inner"]
        for each in self._equal_ranks():
            if each.scratch is None or self.collective == "all_to_all":
                self._hierarchy(first, each.name)
        if tried := self.found[before:]:
            best = dict(min(tried, key=lambda candidate: candidate.seconds).schedule.parameters)["outer"]
            inners = [{*self._inner(kind)} for kind in self._kinds_within()]
            for inner in sorted(set.intersection(*inners) - {first, "hierarchical"}):
                self._hierarchy(inner, best)

    def _kinds_within(self) -> tuple[str, ...]:
        """The collectives within a host that the parameter ``inner`` names."""
        return _WITHIN.get(self.collective, (self.collective,))

    def _inner(self, kind: str) -> Iterator[str]:
        """The algorithms of a collective within a host; only an all_to_all can have phases that need scratch."""
        every = (lookup(kind, name) for name in algorithms(kind))
        usable = (each for each in every if each.scratch is None or kind == "all_to_all")
        return (each.name for each in usable if each.built_in or not self.only_built_in)

    def _hierarchy(self, inner: str, outer: str) -> None:
        parameters = {"inner": inner, "outer": outer, "hosts": self.topology.hosts}
        self._try("hierarchical", lambda: self._transfers_of_hierarchy(inner, outer), parameters)

    def _transfers_of_hierarchy(self, inner: str, outer: str) -> tuple[float, float]:
        """The number of transfers in all and in the largest step."""
        hosts = self.topology.hosts
        # Groups that run at once: between hosts one for each share; within a host one, or one for each host's blocks.
        shares = math.lcm(*hosts)
        inside = len(hosts) ** (2 if self.collective in ("all_gather", "reduce_scatter", "all_to_all") else 1)
        between = _growth(lookup(self.collective, outer), len(hosts))
        within = [_growth(lookup(kind, inner), max(hosts)) for kind in self._kinds_within()]
        total = between[0] * shares + inside * sum(each for each, _ in within)
        return total, max(between[1] * shares, *(inside * each for _, each in within))

    def _try(self, name: str, transfers: Callable[[], tuple[float, float]], parameters: dict[str, Any]) -> None:
        """Price a candidate, unless it has too many transfers in all or in its largest step, or is wrong."""
        price = functools.partial(self._price, transfers)
        if candidate := evaluated(price, self.collective, name, self.topology.size, **parameters):
            self.found.append(candidate)

    def _price(self, transfers: Callable[[], tuple[float, float]], schedule: Schedule) -> Candidate | None:
        if self.topology.size > _FEW_RANKS or len(set(self.topology.hosts)) > 1:
            total, at_once = transfers()
            if total > MOST_TRANSFERS or at_once > MOST_AT_ONCE:
                many = f"{at_once:,.0f} at once" if at_once > MOST_AT_ONCE else f"{total:,.0f}"
                self.left_out.append((_name(schedule), many))
                return None
        if self.only_best and self._is_too_long(schedule):
            return None
        segments = int(best_segments(schedule, self.nbytes, self.topology))
        spent = parts(schedule, self.nbytes, self.topology, segments)
        latency, processor, link = (float(spent[columns].sum()) for columns in (LATENCY, PROCESSOR, LINK))
        loads = replay(schedule, self.topology)
        busiest = int(np.maximum(loads.sent, loads.received).max()) * float(schedule.share) * self.nbytes
        uncut = float(seconds(schedule, self.nbytes, self.topology))
        return Candidate(_name(schedule), schedule, segments, latency, processor, link, busiest, uncut)

    def _is_too_long(self, schedule: Schedule) -> bool:
        """Whether a lower bound shows that the candidate is neither the best one, nor nearly as good, nor chosen.

        The bound of a hierarchical schedule is that of its phase between hosts, as a schedule for one rank a host. All
        ranks of a host together send what this one rank sends over the link, each a part of it. The bound of the whole
        schedule takes longer and is rarely high enough to be worth its time, except for exchanges.
        """
        best = min((each.seconds for each in self.found), default=math.inf)
        limit = min(best, self.most_seconds) * (1 + _TOLERANCE)
        if limit == math.inf:
            return False
        topology = self.topology
        if schedule.algorithm == "hierarchical" and self.collective not in EXCHANGES:
            topology = topology.one_rank_a_host
            schedule = build_shared(self.collective, dict(schedule.parameters)["outer"], topology.size)
        return StepBounds.of(schedule, topology).is_longer(self.nbytes, limit)


def _name(schedule: Schedule) -> str:
    """The algorithm with its parameters, without ``hosts``, which the topology determines."""
    return " ".join([schedule.algorithm, *(f"{key}={value}" for key, value in schedule.parameters if key != "hosts")])


@functools.cache
def _growth(registered: Algorithm, size: int) -> tuple[float, float]:
    """The approximate number of transfers in all and in the largest step.

    Up to 64 ranks the transfers are counted. Above, the growth from a quarter to a half of the ranks is extrapolated,
    except for an algorithm that a user has registered: it may support some sizes only.
    """
    if size <= 64 or (not registered.built_in and size <= MOST_RANKS):
        rows = [len(step) for step in build(registered.collective, registered.name, size).steps]
        return sum(rows), max(rows, default=0)
    half, quarter = _growth(registered, size // 2), _growth(registered, size // 4)
    return half[0] ** 2 / quarter[0], half[1] ** 2 / quarter[1]


def bound(collective: str, nbytes: float, topology: Topology) -> float:
    """A lower bound in seconds for any algorithm.

    Between hosts: with each message every rank of a host that has the data can reach one more host, and the busiest
    link carries the bytes that must cross it. On one host: :func:`lower_bound`.
    """
    inner, hosts = topology.inner, len(topology.hosts)
    every = lower_bound(collective, topology.size)
    if hosts == 1:
        return every.seconds(nbytes, inner.alpha, inner.beta, topology.gamma)
    ranks = max(topology.hosts)
    reached, messages = 1, 0
    while reached < hosts:
        reached, messages = reached * (1 + ranks), messages + 1
    latency = max(messages * topology.outer.alpha, ceil_log2(ranks) * min(inner.alpha, topology.outer.alpha))
    return max(
        latency,
        _crossing(collective, topology) * nbytes * topology.outer.beta,
        float(every.reduced) * nbytes * topology.gamma,
    )


def _crossing(collective: str, topology: Topology) -> float:
    """The least that the busiest link must carry, as a fraction of the data: as if each host were one rank.

    In collectives with a block for each rank, a host counts with the number of its ranks.
    """
    shares = [ranks / topology.size for ranks in topology.hosts]
    if collective == "all_to_all":
        return max(share * topology.size * (1 - share) for share in shares)
    if collective in ("gather", "scatter"):
        return 1 - max(shares)  # the root may be on the largest host
    return float(lower_bound(collective, len(shares)).moved)
