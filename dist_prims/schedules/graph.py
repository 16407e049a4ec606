"""Graph: ranks and switches joined by links, each with a latency and a bandwidth; routes, makers, and a JSON form.

A :class:`~.topology.Topology` has hosts and two kinds of links. A graph describes rings, tori, fat trees, boxes of GPUs
and hosts whose links differ. Ranks are the numbers from 0 on, and a switch is named by a text. A link leads one way, so
two nodes that are joined both ways have two links.

A message passes as few other ranks as possible, because a rank that forwards is a rank that works. Among the ways that
remain it takes the one on which 1 MB takes the least time. Of several equal links the receiver's number selects one, so
that the messages to different ranks spread over the upper switches of a fat tree.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__: list[str] = []

_FORMAT = "dist_prims topology 1"
_FIELDS = {"from", "to", "latency", "bandwidth"}
_ROUTED_BYTES = 1 << 20
Node = int | str


class Link(NamedTuple):
    """A way from one node to another: seconds until the first byte arrives, and bytes a second."""

    src: Node
    dst: Node
    latency: float
    bandwidth: float


_Ends = Iterable[tuple[Node, Node]]


def _both_ways(ends: _Ends, latency: float, bandwidth: float) -> list[Link]:
    return [Link(*each, latency, bandwidth) for src, dst in ends for each in ((src, dst), (dst, src))]


# The NVLinks between the GPUs of a DGX-1 with V100, a hybrid cube mesh: one between some pairs, two between others.
_DGX1_ONE = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
_DGX1_TWO = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))


@dataclass(frozen=True, init=False)
class Graph:
    """Ranks and switches joined by links. Every rank must reach every other rank.

    ``Schedule.cost(nbytes, topology=graph)`` prices a schedule on it, with contention.

    Args:
        ranks: the number of ranks; they are the nodes 0, 1, 2, ...
        links: (src, dst, latency in seconds, bandwidth in bytes a second), each one way. A text names a switch.

    >>> graph = Graph.hosts([2, 2], bandwidths=[1e9, 0.25e9])
    >>> [link.dst for link in graph.route(0, 3)]
    ['host 0', 'network', 'host 1', 3]
    >>> Graph.ring(6).route(0, 2)[0]
    Link(src=0, dst=1, latency=1e-06, bandwidth=1000000000.0)
    """

    ranks: int
    links: tuple[Link, ...]

    def __init__(self, ranks: int, links: Iterable[Sequence[Any]]) -> None:
        self.__dict__.update(ranks=ranks, links=tuple(Link(*each) for each in links))
        if ranks < 1:
            raise ValueError(f"Graph(ranks={ranks}): use at least 1 rank")
        for number, link in enumerate(self.links):
            self._check(f"link {number}, from {link.src!r} to {link.dst!r}", link)
        for (src, dst), count in Counter(link[:2] for link in self.links).items():
            if count > 1:
                raise ValueError(f"{count} links lead from {src!r} to {dst!r}; add up their bandwidths in one")
        joined = {node for link in self.links for node in link[:2]}
        if ranks > 1 and (alone := next((rank for rank in range(ranks) if rank not in joined), None)) is not None:
            raise ValueError(f"rank {alone} has no link; add one, or reduce the number of ranks, {ranks}")
        if (unreached := np.argwhere(np.isinf(self._least_cost[:ranks]))).size:
            src, dst = unreached[0].tolist()
            raise ValueError(f"no way leads from rank {src} to rank {dst}; add a link")

    def _check(self, where: str, link: Link) -> None:
        for node in (link.src, link.dst):
            is_rank = type(node) is int and 0 <= node < self.ranks
            if not (is_rank or isinstance(node, str)):
                raise ValueError(f"{where}: {node!r} is neither a rank, 0..{self.ranks - 1}, nor the name of a switch")
        if link.src == link.dst:
            raise ValueError(f"{where}: the ends must differ")
        for name, value in (("latency", link.latency), ("bandwidth", link.bandwidth)):
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{where}: {name}={value!r}; it must be a finite number, at least 0")
        if link.bandwidth == 0:
            raise ValueError(f"{where}: bandwidth=0; use more than 0 bytes a second, or leave out the link")

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The ranks, then the switches in the order of the links."""
        named = (node for link in self.links for node in link[:2] if isinstance(node, str))
        return (*range(self.ranks), *dict.fromkeys(named))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The positions of the ends in ``nodes``: ``ends[0, i]`` of the source of link i, ``ends[1, i]`` of its end."""
        position = {node: at for at, node in enumerate(self.nodes)}
        ends = [(position[link.src], position[link.dst]) for link in self.links]
        return np.array(ends, np.int64).reshape(-1, 2).T

    @cached_property
    def bandwidth(self) -> NDArray[np.float64]:
        """The bytes a second of each link."""
        return np.array([link.bandwidth for link in self.links], np.float64)

    @cached_property
    def _cost(self) -> NDArray[np.float64]:
        """The cost of each link: the seconds of 1 MB; a link to a rank costs more than any way over switches only."""
        seconds = np.array([link.latency + _ROUTED_BYTES / link.bandwidth for link in self.links], np.float64)
        to_rank: NDArray[np.bool_] = self.ends[1] < self.ranks
        cost: NDArray[np.float64] = seconds + to_rank * (len(self.nodes) * seconds.max(initial=0))
        return cost

    @cached_property
    def _least_cost(self) -> NDArray[np.float64]:
        """The cost of the best way from each node to each rank, ``[node, rank]``, by Bellman and Ford's algorithm."""
        best = np.full((len(self.nodes), self.ranks), np.inf)
        best[range(self.ranks), range(self.ranks)] = 0
        # The links, ordered by their sources: the links of the node src[i] begin at begins[i].
        order = np.argsort(self.ends[0], kind="stable")
        src, begins = np.unique(self.ends[0][order], return_index=True)
        for _ in range(len(self.nodes) if len(src) else 0):
            ways = self._cost[order, None] + best[self.ends[1][order]]
            shorter = np.minimum(best[src], np.minimum.reduceat(ways, begins, axis=0))
            if (shorter == best[src]).all():
                break
            best[src] = shorter
        return best

    @cached_property
    def _routes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _from(self) -> list[list[int]]:
        """The numbers of the links that begin at each node."""
        leaving: list[list[int]] = [[] for _ in self.nodes]
        for number, src in enumerate(self.ends[0].tolist()):
            leaving[src].append(number)
        return leaving

    def route_numbers(self, src: int, dst: int) -> tuple[int, ...]:
        """The numbers of the links that a message between two ranks passes."""
        if (src, dst) not in self._routes:
            node, passed, cost_from = src, [], self._least_cost[:, dst]
            while node != dst:
                ways = [(self._cost[number] + cost_from[self.ends[1, number]], number) for number in self._from[node]]
                shortest = min(ways)[0] * (1 + 1e-9)
                equal = [number for way, number in ways if way <= shortest]
                passed.append(equal[dst % len(equal)])
                node = int(self.ends[1, passed[-1]])
            self._routes[src, dst] = tuple(passed)
        return self._routes[src, dst]

    def route(self, src: int, dst: int) -> tuple[Link, ...]:
        """The links that a message between two ranks passes."""
        if not (0 <= src < self.ranks and 0 <= dst < self.ranks):
            raise ValueError(f"route({src}, {dst}): ranks are 0..{self.ranks - 1}")
        return tuple(self.links[number] for number in self.route_numbers(src, dst))

    @staticmethod
    def ring(size: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """Each rank is joined to the next one."""
        return Graph.torus(1, size, latency, bandwidth)

    @staticmethod
    def mesh(rows: int, columns: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """Rows and columns of ranks, each joined to its neighbours."""
        return Graph(rows * columns, _both_ways(_grid(rows, columns, wraps=False), latency, bandwidth))

    @staticmethod
    def torus(rows: int, columns: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """A mesh whose rows and columns are rings."""
        return Graph(rows * columns, _both_ways(_grid(rows, columns, wraps=True), latency, bandwidth))

    @staticmethod
    def fully_connected(size: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """A link each way between every two ranks."""
        return Graph(size, _both_ways(itertools.combinations(range(size), 2), latency, bandwidth))

    @staticmethod
    def fat_tree(leaves: int, ranks: int, spines: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """Leaf switches with ``ranks`` ranks each, and a link from every leaf to every spine switch."""
        down: list[tuple[Node, Node]] = [(rank, f"leaf {rank // ranks}") for rank in range(leaves * ranks)]
        pairs = itertools.product(range(leaves), range(spines))
        up: list[tuple[Node, Node]] = [(f"leaf {leaf}", f"spine {spine}") for leaf, spine in pairs]
        return Graph(leaves * ranks, _both_ways([*down, *up], latency, bandwidth))

    @staticmethod
    def dragonfly(groups: int, switches: int, ranks: int, latency: float = 1e-6, bandwidth: float = 1e9) -> Graph:
        """Groups of switches with ``ranks`` ranks each; a link between every two switches of a group.

        There is also a link between every two groups. The switches of a group have these links in turn.
        """
        every = list(itertools.product(range(groups), range(switches)))
        ends: list[tuple[Node, Node]] = [
            (number * ranks + place, f"switch {group}.{switch}")
            for number, (group, switch) in enumerate(every)
            for place in range(ranks)
        ]
        for group, (one, two) in itertools.product(range(groups), itertools.combinations(range(switches), 2)):
            ends.append((f"switch {group}.{one}", f"switch {group}.{two}"))
        for one, two in itertools.combinations(range(groups), 2):
            # A group does not count itself: two is number two - 1 of the others for one, and one is number one for two.
            ends.append((f"switch {one}.{(two - 1) % switches}", f"switch {two}.{one % switches}"))
        return Graph(groups * switches * ranks, _both_ways(ends, latency, bandwidth))

    @staticmethod
    def hosts(
        ranks: Sequence[int],
        bandwidths: Sequence[float],
        latency: float = 10e-6,
        inner_latency: float = 1e-6,
        inner_bandwidth: float = 10e9,
    ) -> Graph:
        """Hosts on one network. Each has a link that its ranks share, of its own bandwidth.

        Args:
            ranks: the number of ranks of each host.
            bandwidths: the bytes a second of the link of each host.
            latency: seconds of a message between hosts.
            inner_latency: seconds of a message within a host.
            inner_bandwidth: bytes a second of a rank within its host.
        """
        if len(ranks) != len(bandwidths):
            raise ValueError(f"Graph.hosts: {len(ranks)} hosts and {len(bandwidths)} bandwidths; give each host one")
        host_of = [host for host, number in enumerate(ranks) for _ in range(number)]
        inside = ((rank, f"host {host}") for rank, host in enumerate(host_of))
        links = _both_ways(inside, inner_latency / 2, inner_bandwidth)
        for host, bandwidth in enumerate(bandwidths):
            links += _both_ways([(f"host {host}", "network")], latency / 2, bandwidth)
        return Graph(len(host_of), links)

    @staticmethod
    def dgx(boxes: int = 1, ranks: int = 8) -> Graph:
        """Boxes of ``ranks`` GPUs, like a DGX H100: each GPU has 450 GB/s to the NVSwitch of its box.

        Between several boxes each GPU also has 50 GB/s to the network.
        """
        every = range(boxes * ranks)
        links = _both_ways(((rank, f"box {rank // ranks}") for rank in every), 1e-6, 450e9)
        return Graph(len(every), links + _both_ways(((rank, "network") for rank in every if boxes > 1), 5e-6, 50e9))

    @staticmethod
    def dgx1() -> Graph:
        """A box like a DGX-1 with V100: 8 GPUs, each with 6 NVLinks of 25 GB/s to four others."""
        return Graph(8, _both_ways(_DGX1_ONE, 1e-6, 25e9) + _both_ways(_DGX1_TWO, 1e-6, 50e9))

    def save(self, path: str | Path) -> Path:
        """Write the graph to a JSON file, and return its path.

        A line is a link, and stands for both ways if they are equal; else the link has ``"one_way": true``.
        """
        lines, there = [], set(self.links)
        for link in self.links:
            back = Link(link.dst, link.src, link.latency, link.bandwidth)
            if link in there:
                fields = {"from": link.src, "to": link.dst, "latency": link.latency, "bandwidth": link.bandwidth}
                lines.append(json.dumps(fields if back in there else {**fields, "one_way": True}))
                there -= {link, back}
        head = f'{{"format": "{_FORMAT}", "ranks": {self.ranks}, "links": ['
        Path(path).write_text("\n".join([head, ",\n".join(lines), "]}\n"]), encoding="utf-8")
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Read the graph of a JSON file; ValueError, with the number of the link, if the file does not contain one."""
        try:
            return _graph(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _grid(rows: int, columns: int, wraps: bool) -> list[tuple[Node, Node]]:
    """The neighbours of a mesh or torus, each pair once; a ring of two has one pair."""
    pairs: list[tuple[Node, Node]] = []
    for row, column in itertools.product(range(rows), range(columns)):
        here = row * columns + column
        if column + 1 < columns or (wraps and columns > 2):
            pairs.append((here, row * columns + (column + 1) % columns))
        if row + 1 < rows or (wraps and rows > 2):
            pairs.append((here, (row + 1) % rows * columns + column))
    return pairs


def _graph(fields: Any) -> Graph:
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f'the file has no field "format" of the value "{_FORMAT}"')
    ranks, entries = fields.get("ranks"), fields.get("links")
    if type(ranks) is not int or not isinstance(entries, list):
        raise ValueError('it must have "ranks", a number, and "links", a list')
    links: list[Link] = []
    for number, entry in enumerate(entries):
        is_one_way = entry.get("one_way", False) if isinstance(entry, dict) else None
        if not isinstance(is_one_way, bool) or not _FIELDS <= entry.keys() <= {*_FIELDS, "one_way"}:
            raise ValueError(
                f"link {number} is {entry!s:.100}; it must have the fields from, to, latency (seconds), bandwidth "
                '(bytes a second) and, if it leads one way only, "one_way": true'
            )
        both = _both_ways([(entry["from"], entry["to"])], entry["latency"], entry["bandwidth"])
        links += both[:1] if is_one_way else both
    return Graph(ranks, links)
