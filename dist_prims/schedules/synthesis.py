"""Schedules found by a machine: a collective on any graph, as spanning trees of which no link carries much.

    all_gather      a tree for each chunk of each rank; in step d the chunks go from ranks at distance d of their root
    broadcast       the same with all chunks at one root
    reduce_scatter  an all_gather whose messages go back, from the last step to the first, and are added
    all_reduce      a reduce_scatter, then an all_gather

Few chunks and short trees suit small data, many chunks large data; the price on the graph decides. If the best
registered algorithm has a lower price, the result is that one.

Two designs were considered. A matching in time (TACOS: at each step every free link takes a chunk that its end lacks)
needs no trees. But it sends a chunk over a slow link once for each rank behind it that is free to receive, and links of
unequal speed need steps of unequal length. Trees put each chunk on a shared link once, and segments fill the links.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contract import BLOCKS, ROOTED, contract
from .cut_bound import cut_bound
from .graph import Graph
from .graph_cost import link_loads
from .registry import Algorithm, algorithms, lookup
from .schedule import Schedule
from .schedule_builder import build
from .steps import Step, Steps
from .trees import Pairs, pack, steps_of

__all__: list[str] = []

COLLECTIVES_FOUND = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
NAME = "synthesized"
_MOST_TREES = 1024  # by default
_FEW_TREES = 256  # up to so many, long and short trees are tried too
_LONG, _SHORT, _SHORTEST = 0.2, 3.0, 1000.0  # costs of depth


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

    ``bound``: the seconds of the cut bound, None without networkx. ``halves``: for an all_reduce, the sum of the bounds
    of a reduce_scatter and an all_gather. ``elapsed``: the seconds of the search.
    """

    best: Priced
    found: Priced
    registered: Priced
    bound: float | None
    halves: float | None
    elapsed: float

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule


def synthesize(
    graph: Graph, collective: str, nbytes: float, chunks: int | None = None, root: int = 0, seed: int = 0
) -> Synthesis:
    """Find a schedule for a collective on a graph; prove it and price it beside the registered algorithms.

    - ``graph``: the ranks and links.
    - ``collective``: "all_gather", "reduce_scatter", "all_reduce" or "broadcast".
    - ``nbytes``: the size of the data.
    - ``chunks``: the most chunks of each rank, or of the root of a broadcast; by default 64 for a broadcast, else 16,
      or fewer for more than 64 ranks.
    - ``root``: of a broadcast.
    - ``seed``: the same seed finds the same schedule.

    >>> from dist_prims.schedules import Graph, synthesize
    >>> found = synthesize(Graph.torus(3, 3), "all_gather", 16e6)
    >>> found.best.schedule.algorithm, found.registered.seconds / found.best.seconds > 1.2
    ('synthesized', True)
    """
    if collective not in COLLECTIVES_FOUND:
        raise ValueError(f"synthesize({collective!r}): schedules are found for {', '.join(COLLECTIVES_FOUND)}")
    if not 0 <= root < graph.ranks or (root and collective not in ROOTED):
        raise ValueError(f"synthesize({collective!r}, root={root}): it must be a rank of a broadcast, else 0")
    roots = 1 if collective in ROOTED else graph.ranks
    most = min(16 if roots > 1 else 64, max(1, _MOST_TREES // roots)) if chunks is None else chunks
    if most < 1:
        raise ValueError(f"synthesize(chunks={chunks}): use at least 1")
    begin = time.perf_counter()
    registered = min((_priced(each, graph, nbytes) for each in _registered(collective, graph, root)), key=_seconds)
    search = _Search(graph, collective, root, seed)
    found = min((_priced(each, graph, nbytes) for each in search.schedules(most)), key=_seconds)
    found.schedule.verify()
    best = min(registered, found, key=_seconds)
    bound = _bound([collective], graph, root, nbytes)
    halves = _bound(["reduce_scatter", "all_gather"], graph, root, nbytes) if collective == "all_reduce" else None
    return Synthesis(best, found, registered, bound, halves, time.perf_counter() - begin)


def _seconds(priced: Priced) -> float:
    return priced.seconds


def _priced(schedule: Schedule, graph: Graph, nbytes: float) -> Priced:
    seconds, segments = link_loads(schedule, graph).best_segments(nbytes)
    return Priced(schedule, segments, seconds)


def _bound(collectives: Sequence[str], graph: Graph, root: int, nbytes: float) -> float | None:
    try:
        return nbytes * float(sum(cut_bound(collective, graph, root) for collective in collectives))
    except ImportError:  # networkx is optional
        return None


def _registered(collective: str, graph: Graph, root: int) -> Iterator[Schedule]:
    """The algorithms of this package, with parameters that may make them faster."""
    rooted = {"root": root} if collective in ROOTED else {}
    every = [each for each in (lookup(collective, name) for name in algorithms(collective)) if each.built_in]
    for each in every:
        if each.replicas == "same":
            for parameters in ({}, *_parameters(each, graph), *_hierarchies(each, every, graph)):
                yield build(collective, each.name, graph.ranks, **rooted, **parameters)


def _parameters(each: Algorithm, graph: Graph) -> Iterator[Mapping[str, Any]]:
    """One chunk, which segments cut, the variants, and every number of equal hosts."""
    yield from ([{"chunks": 1}] if "chunks" in each.parameters else [])
    yield from each.variants
    if "hosts" in each.parameters:
        sizes = (ranks for ranks in range(2, graph.ranks) if graph.ranks % ranks == 0)
        yield from ({"hosts": (ranks,) * (graph.ranks // ranks)} for ranks in sizes)


def _hierarchies(each: Algorithm, every: Sequence[Algorithm], graph: Graph) -> Iterator[Mapping[str, Any]]:
    """A hierarchical algorithm on the ranks of each switch as a host, with each algorithm between the hosts."""
    first = {link.src: link.dst for link in reversed(graph.links)}
    hosts = tuple(len([*group]) for _, group in itertools.groupby(range(graph.ranks), first.get))
    fits = len({*hosts}) == 1 or each.collective not in BLOCKS
    if fits and "outer" in each.parameters and 1 < len(hosts) < graph.ranks:
        outers = (other.name for other in every if other.scratch is None and "hosts" not in other.parameters)
        yield from ({"hosts": hosts, "outer": outer} for outer in outers)


@dataclass(frozen=True)
class _Search:
    """The candidates of one collective: of several numbers of chunks, with long and short trees."""

    graph: Graph
    collective: str
    root: int
    seed: int

    def schedules(self, most: int) -> Iterator[Schedule]:
        ways = [(True, Pairs.of(self.graph, backwards=True))] if "reduce" in self.collective else []
        ways += [(False, Pairs.of(self.graph))] if self.collective != "reduce_scatter" else []
        for chunks in sorted({*(4**power for power in range(8) if 4**power < most), most}):
            roots = [self.root] * chunks if self.collective in ROOTED else [*range(self.graph.ranks)] * chunks
            roots.sort()
            for depth_cost in (_SHORTEST, _SHORT, _LONG)[2 * (len(roots) > _FEW_TREES) :]:
                steps: list[Step] = []
                for backwards, pairs in ways:
                    made = steps_of(pack(self.graph, pairs, roots, depth_cost, self.seed), pairs, roots)
                    steps += [step.backwards() for step in reversed(made)] if backwards else made
                yield self._schedule(len(roots), steps)

    def _schedule(self, chunks: int, steps: Sequence[Step]) -> Schedule:
        root = self.root if self.collective in ROOTED else None
        demands = contract(self.collective, self.graph.ranks, chunks, root)
        return Schedule(self.collective, NAME, self.graph.ranks, chunks, demands, Steps(lambda: iter(steps)), root)
