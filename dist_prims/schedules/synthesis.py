"""Schedules found by a machine: a collective on any graph, as trees or ways of which no link carries much.

    all_gather      a tree for each chunk of each rank; in step d the chunks go from ranks at distance d of their root
    broadcast       the same with all chunks at one root, and with trees of few levels (:mod:`.shallow_trees`)
    reduce_scatter  an all_gather whose messages go back, from the last step to the first, and are added
    all_reduce      a reduce_scatter, then an all_gather
    all_to_all      a way for each chunk from one rank to another (:mod:`.ways`)

Few chunks and short trees suit small data, many chunks large data; the price on the graph decides. If the best
registered algorithm has a lower price, the result is that one.

Two designs were considered. A matching in time (TACOS: at each step every free link takes a chunk that its end lacks)
needs no trees. But it sends a chunk over a slow link once for each rank behind it that is free to receive, and links of
unequal speed need steps of unequal length. Trees put each chunk on a shared link once, and segments fill the links.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..units import check_bytes
from .contract import BLOCKS, ROOTED, contract
from .cut_bound import bandwidth_unit, cut_bound
from .flow_bound import flow_bound
from .graph import Graph
from .graph_cost import Floats, link_loads
from .registry import Algorithm, algorithms, lookup
from .schedule import Schedule
from .schedule_builder import build
from .shallow_trees import ShallowTrees
from .steps import Step, Steps
from .timed_trees import LENGTHS, TimedTrees, steps_of_timed
from .trees import Packing, Pairs, Tree, pack, steps_of
from .ways import Ways, steps_of_ways

__all__: list[str] = []

COLLECTIVES_FOUND = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
NAME = "synthesized"
_MOST_TREES, _MOST_WAYS = 1024, 4096  # by default
_FEW_TREES = 256  # more trees are tried with the lowest cost of depth only
_LONG, _SHORT, _SHORTEST = 0.2, 3.0, 1000.0  # costs of depth: a high cost makes short trees
_MORE_LEVELS = (1, 2)  # that the trees of a broadcast may have beyond those that the farthest rank needs
_MOST_RANKS_CUT = 64  # the cut of a larger graph takes long


@dataclass(frozen=True)
class Priced:
    """A schedule, and the number of segments with which it takes the least seconds."""

    schedule: Schedule
    segments: int
    seconds: float

    @property
    def name(self) -> str:
        """The algorithm with its parameters and segments, as a pin names it."""
        given = ",".join(f"{key}={value}" for key, value in self.schedule.parameters if key not in ("root", "hosts"))
        cut = f" x{self.segments}" if self.segments > 1 else ""
        return f"{self.schedule.algorithm}{f'({given})' if given else ''}{cut}"


@dataclass(frozen=True)
class Synthesis:
    """The schedule with the lowest price, and what it was compared with.

    ``bound``: the seconds of the cut bound, or of the flow bound of an all_to_all; None without networkx or scipy, or
    if the time did not suffice. ``halves``: for an all_reduce, the sum of the bounds of a reduce_scatter and an
    all_gather. ``elapsed``: the seconds of the search. ``is_cut_short``: whether the time ended it early; if that was
    before the first schedule, ``found`` is ``registered``.
    """

    best: Priced
    found: Priced
    registered: Priced
    bound: float | None
    halves: float | None
    elapsed: float
    is_cut_short: bool = False

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule


def synthesize(
    graph: Graph,
    collective: str,
    nbytes: float,
    chunks: int | None = None,
    root: int = 0,
    seed: int = 0,
    seconds: float = 120.0,
    progress: Callable[[float, Priced], None] | None = None,
) -> Synthesis:
    """Find a schedule for a collective on a graph; prove it and price it beside the registered algorithms.

    - ``graph``: the ranks and links.
    - ``collective``: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all".
    - ``nbytes``: the size of the data.
    - ``chunks``: the most chunks of each rank, of the root of a broadcast, or of a block of an all_to_all; by default
      64 for a broadcast, else 16, or fewer for many ranks.
    - ``root``: of a broadcast.
    - ``seed``: the same seed finds the same schedule, if the time suffices.
    - ``seconds``: the search then ends with the best schedule so far; the registered algorithms are priced and the
      result is proved in any case; by default 120.
    - ``progress``: called with the seconds so far and each schedule that is found.

    >>> from dist_prims.schedules import Graph, synthesize
    >>> found = synthesize(Graph.torus(3, 3), "all_gather", 16e6)
    >>> found.best.schedule.algorithm, found.registered.seconds / found.best.seconds > 1.2
    ('synthesized', True)
    """
    if collective not in COLLECTIVES_FOUND:
        raise ValueError(f"synthesize({collective!r}): schedules are found for {', '.join(COLLECTIVES_FOUND)}")
    if not 0 <= root < graph.ranks or (root and collective not in ROOTED):
        raise ValueError(f"synthesize({collective!r}, root={root}): it must be a rank of a broadcast, else 0")
    if chunks is not None and chunks < 1:
        raise ValueError(f"synthesize(chunks={chunks}): use at least 1")
    check_bytes("synthesize", nbytes)
    begin = time.perf_counter()
    registered = min((_priced(each, graph, nbytes) for each in _registered(collective, graph, root)), key=_seconds)
    search = _Search(graph, collective, root, seed, begin + seconds)
    every: list[Priced] = []
    with contextlib.suppress(TimeoutError):
        # search.timed() reads ``every`` after search.schedules() has ended.
        for schedule in itertools.chain(search.schedules(chunks), search.timed(every, nbytes)):
            every.append(_priced(schedule, graph, nbytes))
            if progress is not None:
                progress(time.perf_counter() - begin, every[-1])
    is_cut_short = time.perf_counter() > search.until
    found = min(every, key=_seconds, default=registered)
    found.schedule.verify()
    seconds_left = begin + seconds - time.perf_counter()
    bound = _bound([collective], graph, root, nbytes, seconds_left)
    halves = _bound(["reduce_scatter", "all_gather"], graph, root, nbytes) if collective == "all_reduce" else None
    best = min(registered, found, key=_seconds)
    return Synthesis(best, found, registered, bound, halves, time.perf_counter() - begin, is_cut_short)


def _seconds(priced: Priced) -> float:
    return priced.seconds


def _priced(schedule: Schedule, graph: Graph, nbytes: float) -> Priced:
    seconds, segments = link_loads(schedule, graph).best_segments(nbytes)
    return Priced(schedule, segments, seconds)


def _bound(
    collectives: Sequence[str], graph: Graph, root: int, nbytes: float, seconds_left: float = 0.0
) -> float | None:
    try:
        if collectives[0] == "all_to_all":
            return nbytes * flow_bound(graph, seconds_left)
        return nbytes * float(sum(cut_bound(collective, graph, root) for collective in collectives))
    except (ImportError, TimeoutError):  # networkx and scipy are optional
        return None


def _registered(collective: str, graph: Graph, root: int) -> Iterator[Schedule]:
    """The algorithms of this package, with parameters that may make them faster."""
    rooted = {"root": root} if collective in ROOTED else {}
    every = [each for each in (lookup(collective, name) for name in algorithms(collective)) if each.built_in]
    for each in every:
        if each.replicas == "same":
            for parameters in ({}, *_parameters(each, graph), *_hierarchies(each, every, graph)):
                yield build(collective, each.name, graph.ranks, **rooted, **parameters)


def _parameters(registered: Algorithm, graph: Graph) -> Iterator[Mapping[str, Any]]:
    """One chunk, which segments cut, the variants, and every number of equal hosts."""
    yield from ([{"chunks": 1}] if "chunks" in registered.parameters else [])
    yield from registered.variants
    if "hosts" in registered.parameters:
        sizes = (ranks for ranks in range(2, graph.ranks) if graph.ranks % ranks == 0)
        yield from ({"hosts": (ranks,) * (graph.ranks // ranks)} for ranks in sizes)


def _hierarchies(registered: Algorithm, every: Sequence[Algorithm], graph: Graph) -> Iterator[Mapping[str, Any]]:
    """A hierarchical algorithm on the ranks of each switch as a host, with each algorithm between the hosts."""
    switch_of = {link.src: link.dst for link in reversed(graph.links)}  # the end of the first link of each node
    hosts = tuple(len([*group]) for _, group in itertools.groupby(range(graph.ranks), switch_of.get))
    fits = len({*hosts}) == 1 or registered.collective not in BLOCKS
    if fits and "outer" in registered.parameters and 1 < len(hosts) < graph.ranks:
        outers = (other.name for other in every if other.scratch is None and "hosts" not in other.parameters)
        yield from ({"hosts": hosts, "outer": outer} for outer in outers)


@dataclass(frozen=True)
class _Search:
    """The candidates of one collective: of several numbers of chunks, with long and short trees, as time allows."""

    graph: Graph
    collective: str
    root: int
    seed: int
    until: float

    def schedules(self, most: int | None) -> Iterator[Schedule]:
        """The schedules of all numbers of chunks; TimeoutError if the time does not suffice for one of them."""
        for chunks in self._chunks(most):
            roots = self._roots(chunks)
            for kind, parameter in self._kinds(len(roots)):
                steps = functools.partial(self._steps, kind, roots, parameter)
                yield self._of_ways(roots, parameter) if self._has_ways else self._both_halves(roots, steps)

    @property
    def _has_ways(self) -> bool:
        return self.collective == "all_to_all"

    def _kinds(self, trees: int) -> Iterator[tuple[type[Packing], Any]]:
        """The kinds of so many trees or ways, each with the cost of its depth or the number of its levels."""
        for depth_cost in (_SHORTEST, _SHORT, _LONG)[2 * (trees > _FEW_TREES) :]:
            yield (Ways if self._has_ways else Packing), depth_cost
        if self.collective in ROOTED and trees * self.graph.ranks <= _MOST_TREES:
            yield from ((ShallowTrees, self._levels + more) for more in _MORE_LEVELS)

    def _chunks(self, most: int | None) -> list[int]:
        """The numbers of chunks of a rank, or of a block, that are tried."""
        if most is None:
            trees_or_ways = len(self._roots(1)) or 1
            limit = (_MOST_WAYS if self._has_ways else _MOST_TREES) // trees_or_ways
            most = min(64 if self.collective in ROOTED else 16, limit)
        counts = {*(4**power for power in range(8) if 4**power < most), max(most, 1)}
        # With multiples of these numbers, the links of the narrowest cut, or between all but one root, fill equally.
        equal = {self._full_trees, self.graph.ranks - 1 if self.collective in ROOTED else 0} - {0}
        counts |= {each for number in equal if number <= most for each in (number, most // number * number)}
        return sorted(counts)

    @functools.cached_property
    def _full_trees(self) -> int:
        """The smallest number of trees of a root that can fill the narrowest cut equally; 0 if it is not known."""
        if self.graph.ranks > _MOST_RANKS_CUT or self._has_ways:
            return 0
        collective = "all_gather" if self.collective == "all_reduce" else self.collective
        try:
            bound = cut_bound(collective, self.graph, self.root)
        except ImportError:  # networkx is optional
            return 0
        # With t trees for each root, a link of bandwidth_unit() carries t * blocks * bound * unit chunks in the time of
        # the bound. The smallest t for which that is a whole number is the denominator.
        blocks = 1 if self.collective in ROOTED else self.graph.ranks
        return (blocks * bound * bandwidth_unit(self.graph)).denominator if bound else 0

    @functools.cached_property
    def _levels(self) -> int:
        """The pairs between the root of a broadcast and the rank that is the farthest from it."""
        ranks, depth = [self.root], {self.root: 0}
        for rank in ranks:  # the list grows while it is read
            near = [dst for dst in self._pairs.dst[self._pairs.out_of[rank]].tolist() if dst not in depth]
            depth |= dict.fromkeys(near, depth[rank] + 1)
            ranks += near
        return depth[ranks[-1]]

    def _roots(self, chunks: int) -> list[Any]:
        """The roots of the trees, or the ends of the ways."""
        ranks = range(self.graph.ranks)
        if self.collective in ROOTED:
            return [self.root] * chunks
        every = itertools.permutations(ranks, 2) if self._has_ways else ranks
        return [each for each in every for _ in range(chunks)]

    @functools.cached_property
    def _pairs(self) -> Pairs:
        return Pairs.of(self.graph)

    @functools.cached_property
    def _pairs_back(self) -> Pairs:
        return Pairs.of(self.graph, backwards=True)

    def _pack(self, kind: type[Packing], pairs: Pairs, roots: Sequence[Any], parameter: Any) -> list[Tree]:
        return pack(kind(self.graph, pairs, parameter, self.seed), roots, self.until)

    def timed(self, every: Sequence[Priced], nbytes: float) -> Iterator[Schedule]:
        """Few steps of given lengths (:mod:`.timed_trees`), where they can take less time than many segments."""
        # 1. Few long steps can gain what the segments of the best schedule lose to latency. They are tried if that is
        # more than 1 % of the time of the busiest link, but less than all of it.
        best, chunks = min(every, key=_seconds), every[-1].schedule.chunks
        busy = link_loads(best.schedule, self.graph).seconds_of_busiest_link(nbytes)
        has_every_pair = len(self._pairs.src) == self.graph.ranks * (self.graph.ranks - 1)
        if self._has_ways or not has_every_pair or chunks > _FEW_TREES or not 1.01 * busy < best.seconds < 2 * busy:
            return
        # 2. For each choice of lengths, the steps of each half together take the time of the busiest link.
        roots = [self.root] * chunks if self.collective in ROOTED else self._roots(chunks // self.graph.ranks)
        seconds = nbytes / chunks / self.graph.bandwidth
        for relative in LENGTHS:
            lengths = np.array(relative) / sum(relative) * busy / (2 if self.collective == "all_reduce" else 1)
            yield self._both_halves(roots, functools.partial(self._timed_steps, roots, seconds, lengths))

    def _timed_steps(self, roots: Sequence[int], seconds: Floats, lengths: Floats, pairs: Pairs) -> list[Step]:
        packing = TimedTrees(self.graph, pairs, self.seed, seconds, lengths)
        return steps_of_timed(pack(packing, roots, self.until), pairs)

    def _steps(self, kind: type[Packing], roots: Sequence[int], parameter: Any, pairs: Pairs) -> list[Step]:
        return steps_of(self._pack(kind, pairs, roots, parameter), pairs, roots)

    def _both_halves(self, roots: Sequence[int], make: Callable[[Pairs], list[Step]]) -> Schedule:
        steps: list[Step] = []
        if "reduce" in self.collective:
            steps += [step.backwards() for step in reversed(make(self._pairs_back))]
        if self.collective != "reduce_scatter":
            steps += make(self._pairs)
        return self._schedule(len(roots), steps)

    def _of_ways(self, ends: Sequence[tuple[int, int]], depth_cost: float) -> Schedule:
        ways = self._pack(Ways, self._pairs, ends, depth_cost)
        steps, scratch = steps_of_ways(ways, self._pairs, ends)
        return self._schedule(len(ends) // max(self.graph.ranks - 1, 1) or 1, steps, scratch)

    def _schedule(self, chunks: int, steps: Sequence[Step], scratch: int = 0) -> Schedule:
        root = self.root if self.collective in ROOTED else None
        demands = contract(self.collective, self.graph.ranks, chunks, root, scratch)
        return Schedule(self.collective, NAME, self.graph.ranks, chunks, demands, Steps(lambda: iter(steps)), root)
