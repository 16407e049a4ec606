"""Recommendation of an algorithm for a topology: the price and the bottleneck of every candidate, and the lower bound.

Candidates are the registered algorithms with default parameters, with their ``variants``, and, if they pipeline chunks,
with one chunk, because the segments of the executor are a pipeline too. Over several hosts ``hierarchical`` is added
where it exists, with each algorithm between the hosts. Within the hosts it uses its default first; the other inner
algorithms are tried with the best outer one only, because the phases run one after the other and the choices hardly
interact.

The price follows from the cost card of an algorithm (:mod:`.closed_form_load`), so the time to compute it hardly
depends on the number of ranks. Up to 512 ranks the steps of an algorithm that a user has registered are counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..units import check_bytes
from .closed_form_load import TooManyMessages
from .contract import COLLECTIVES
from .cost import NEVER_CUT, Seconds, best_segments, least_seconds, load_seconds, lower_bound, seconds_by_kind
from .cost_card import ceil_log2
from .load import LINK, REDUCED, Hosts, Load
from .registry import Algorithm, algorithms, load_by_card, lookup, nearest
from .schedule import Schedule
from .steps import Phase, Steps
from .topology import Topology
from .trust import may_be_chosen, priced

__all__: list[str] = []

_TOLERANCE = 0.05  # a smaller relative difference of two prices is not significant
_MOST_RANKS_FOR_TIES = 256

# In these collectives each block has one receiver, to which the algorithm "direct" sends it. The prediction adds the
# latencies of all messages of a rank, although the messages of "direct" are in flight at once. So the backend chooses
# an algorithm that forwards blocks only if its predicted time is less than this share of the time of "direct".
PERSONALIZED = ("all_to_all", "gather", "scatter")
MUCH_SHORTER = 0.6

# Hierarchical collectives for hosts of any sizes, and the collectives within a host that the parameter inner names.
_WITHIN = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("all_gather",),
    "reduce": ("reduce_scatter",),
}


@dataclass(frozen=True)
class Candidate:
    """A schedule in segments for data of ``nbytes`` on a topology, its load, and the seconds that it spends."""

    algorithm: str
    parameters: tuple[tuple[str, Any], ...]
    build: Callable[[], Schedule]
    load: Load
    nbytes: float
    segments: int
    spent: Seconds
    topology: Topology

    @property
    def schedule(self) -> Schedule:
        """The schedule; a price does not need it."""
        return self.build()

    @property
    def name(self) -> str:
        """The algorithm with its parameters, without ``hosts``, which the topology determines."""
        given = (f"{key}={value}" for key, value in self.parameters if key != "hosts")
        return " ".join([self.algorithm, *given])

    @property
    def seconds(self) -> float:
        return self.spent.total

    @property
    def uncut(self) -> float:
        """The seconds with one segment."""
        return load_seconds(self.load, self.nbytes, self.topology)

    @property
    def link_bytes(self) -> float:
        """The bytes over the busiest link."""
        return float(self.load.busiest[LINK]) * self.nbytes


@dataclass(frozen=True)
class Advice:
    """The candidates, fastest first, and the lower bound in seconds.

    Candidates of nearly equal price are ordered by what the price does not include or counts too little; see
    ``_preference``.
    """

    candidates: tuple[Candidate, ...]
    bound: float


def recommend(
    collective: str, nbytes: float, topology: Topology, only_best: bool = False, only_built_in: bool = False
) -> Advice:
    """Price the candidates for a collective of ``nbytes`` on a topology.

    ``only_best``: without candidates of which a lower bound shows that the backend would not choose them, and with 0 as
    the lower bound of the advice.
    ``only_built_in``: without algorithms of users.

    >>> from dist_prims.schedules.topology import Level
    >>> cluster = Topology((4, 4), Level(1e-6, 1e-10), Level(20e-6, 1e-9))
    >>> best = recommend("all_reduce", 64e6, cluster).candidates[0]
    >>> best.name.split()[0], best.spent.most
    ('hierarchical', 'link')
    """
    if collective not in COLLECTIVES:
        raise ValueError(nearest("collective", collective, COLLECTIVES))
    check_bytes("recommend", nbytes)
    search = _Search(collective, nbytes, topology, only_best, only_built_in)
    ranked = sorted(search.candidates(), key=lambda candidate: candidate.seconds)
    if not ranked:
        raise ValueError(f"recommend({collective!r}, {nbytes!r}): no algorithm has a price; the warnings say why")
    near = [candidate for candidate in ranked if candidate.seconds <= ranked[0].seconds * (1 + _TOLERANCE)]
    if len(near) > 1 and topology.size <= _MOST_RANKS_FOR_TIES:
        near.sort(key=lambda each: _preference(each, topology))
    ranked[: len(near)] = near
    return Advice(tuple(ranked), 0.0 if only_best else bound(collective, nbytes, topology))


def _counts_of_steps(schedule: Schedule, topology: Topology) -> tuple[int, int, int]:
    """Three counts: of hosts that send to one host in one step, of hosts to which one host sends, and of transfers.

    The first two are the largest of any host, the last two are of all steps together. Concurrent streams slow each
    other down on a link. A connection that has been idle begins slowly: TCP first finds out again how fast it may send.
    """
    hosts = Hosts.of(topology)
    counts = [_counts_of_phase(phase, hosts) for phase in schedule.steps.phases or (schedule.steps,)]
    fan_ins, reached, transfers = zip(*counts, strict=True)
    return max(fan_ins), int(np.logical_or.reduce(reached).sum(axis=1).max()), sum(transfers)


@functools.lru_cache(maxsize=64)  # hierarchies that differ in one phase share the others
def _counts_of_phase(steps: Steps | Phase, hosts: Hosts) -> tuple[int, NDArray[np.bool_], int]:
    """Count as :func:`_counts_of_steps` does, in some steps; the matrix reached[host, host] is the second count."""
    fan_in, transfers, number, host_of = 0, 0, len(hosts.ranks), hosts.host_of
    reached = np.zeros((number, number), np.bool_)
    for step in steps:
        transfers += len(step)
        messages, _ = step.narrow
        src, dst = host_of[messages.src], host_of[messages.dst]
        if (outer := src != dst).any():
            sends = np.zeros_like(reached)  # from the host of the row to the host of the column
            sends[src[outer], dst[outer]] = True
            fan_in = max(fan_in, int(sends.sum(axis=0).max()))
            reached |= sends
    return fan_in, reached, transfers


def _preference(candidate: Candidate, topology: Topology) -> tuple[Any, ...]:
    """The order among candidates of nearly equal price: the smallest comes first.

    The use of links; then those made for hosts, whose messages are contiguous where those of a flat algorithm are often
    gathered from several places; then the bytes that a rank reduces, the transfers of all segments, and the steps.
    """
    is_flat = "hosts" not in dict(candidate.parameters)
    fan_in, reached, transfers = _counts_of_steps(candidate.schedule, topology)
    reduced = round(float(candidate.load.over_steps(candidate.load.rows[:, REDUCED])), 9)
    return fan_in, reached, is_flat, reduced, transfers * candidate.segments, candidate.load.steps


@dataclass
class _Search:
    """The search through the candidates of one collective."""

    collective: str
    nbytes: float
    topology: Topology
    only_best: bool
    only_built_in: bool
    shortest: float = math.inf  # the seconds of the best candidate so far

    def candidates(self) -> list[Candidate]:
        topology = self.topology
        found: list[Candidate] = []
        if self.collective in PERSONALIZED:
            found += self._priced([("direct", {})])
            if self.only_best and found:  # the backend chooses another schedule only if it is much shorter
                self.shortest = MUCH_SHORTER * found[0].seconds
        hosts_are_equal = len(set(topology.hosts)) == 1
        has_two_levels = len(topology.hosts) > 1 and max(topology.hosts) > 1
        flat = []
        for each in self._flat_algorithms():
            if each.name != "direct" or self.collective not in PERSONALIZED:
                one_chunk = [{"chunks": 1}] if "chunks" in each.parameters else []
                flat += [(each.name, parameters) for parameters in ({}, *one_chunk, *each.variants)]
        has_hierarchy = "hierarchical" in algorithms(self.collective)
        if has_two_levels and (self.collective in _WITHIN or (hosts_are_equal and has_hierarchy)):
            found += self._hierarchies()
        return found + self._priced(flat)

    def _flat_algorithms(self) -> Iterator[Algorithm]:
        """The algorithms without a parameter ``hosts`` that may be chosen automatically."""
        every = (lookup(self.collective, name) for name in algorithms(self.collective))
        usable = (each for each in every if may_be_chosen(each, self.topology.size) and "hosts" not in each.parameters)
        return (each for each in usable if each.built_in or not self.only_built_in)

    def _hierarchies(self) -> list[Candidate]:
        first = lookup(self.collective, "hierarchical").parameters["inner"]
        outers = [each for each in self._flat_algorithms() if each.scratch is None or self.collective == "all_to_all"]
        found = self._priced([self._hierarchy(first, each.name) for each in outers])
        if found:
            best = dict(min(found, key=lambda candidate: candidate.seconds).parameters)["outer"]
            inners = [{*self._inner_algorithms(kind)} for kind in _WITHIN.get(self.collective, (self.collective,))]
            others = sorted(set.intersection(*inners) - {first, "hierarchical"})
            found += self._priced([self._hierarchy(inner, best) for inner in others])
        return found

    def _inner_algorithms(self, kind: str) -> Iterator[str]:
        """The algorithms of a collective within a host; only an all_to_all can have phases that need scratch."""
        every = (lookup(kind, name) for name in algorithms(kind))
        usable = (each for each in every if each.scratch is None or kind == "all_to_all")
        return (each.name for each in usable if each.built_in or not self.only_built_in)

    def _hierarchy(self, inner: str, outer: str) -> tuple[str, dict[str, Any]]:
        return "hierarchical", {"inner": inner, "outer": outer, "hosts": self.topology.hosts}

    def _priced(self, algorithms: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Candidate]:
        """The candidates of these algorithms and parameters, without those that are wrong.

        Algorithms of few steps are priced first: for small data they are fast, and exclude the others soon.
        """
        found = {}
        for place, (name, parameters) in sorted(enumerate(algorithms), key=lambda item: self._growth(*item[1])):
            price = functools.partial(self._price, name, tuple(sorted(parameters.items())))
            if candidate := priced(price, self.collective, name, self.topology.size, **parameters):
                found[place] = candidate
                self.shortest = min(self.shortest, candidate.seconds)
        return [found[place] for place in sorted(found)]

    def _growth(self, name: str, parameters: Mapping[str, Any]) -> int:
        """Order algorithms by the formula of their steps, for a hierarchy of those between hosts.

        0: the logarithm of the ranks, 1: twice as many, 2: more. To evaluate the formula would take longer.
        """
        registered = lookup(self.collective, parameters.get("outer", name))
        steps = registered.card.steps if registered.built_in and registered.card else ""
        is_logarithm = "L" in steps.upper() and "k" not in steps  # k: the chunks of a pipeline
        return int(steps.startswith("2*")) if is_logarithm else 2

    def _price(
        self, name: str, parameters: tuple[tuple[str, Any], ...], build: Callable[[], Schedule]
    ) -> Candidate | None:
        nbytes, topology, hosts = self.nbytes, self.topology, Hosts.of(self.topology)
        # With more messages between hosts the price is not among the best. Twice the tolerance, because of rounding.
        alpha = topology.outer.alpha
        most = self.shortest * (1 + 2 * _TOLERANCE) / alpha if self.only_best and alpha else math.inf
        try:
            if outer := dict(parameters).get("outer"):  # its own load shows sooner that there are too many
                load_by_card(lookup(self.collective, outer), hosts.one_rank_each, most_messages=most)
            load = load_by_card(lookup(self.collective, name), hosts, parameters, most)
        except TooManyMessages:
            return None
        segments, spent = 1, seconds_by_kind(load, nbytes, topology)
        if spent.total > NEVER_CUT:
            if self.only_best and least_seconds(load, nbytes, topology) > self.shortest * (1 + _TOLERANCE):
                return None
            if (segments := best_segments(load, nbytes, topology)) > 1:
                spent = seconds_by_kind(load, nbytes, topology, segments)
        return Candidate(name, parameters, build, load, nbytes, segments, spent, topology)


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

    In an all_to_all, gather and scatter, a host counts with the number of its ranks.
    """
    shares = [ranks / topology.size for ranks in topology.hosts]
    if collective == "all_to_all":
        return max(share * topology.size * (1 - share) for share in shares)
    if collective in ("gather", "scatter"):
        return 1 - max(shares)  # the root may be on the largest host
    return float(lower_bound(collective, len(shares)).moved)
