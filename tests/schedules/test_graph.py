"""Graphs: their makers, routes and files, and prices with contention, beside an independent simulation."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from dist_prims.schedules import Graph, algorithms, build
from dist_prims.schedules.graph import Link, Node
from dist_prims.schedules.graph_cost import link_loads
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology

MADE = {
    "ring": (Graph.ring(5), 5, 10),
    "a ring of two": (Graph.ring(2), 2, 2),
    "mesh": (Graph.mesh(3, 4), 12, 2 * (2 * 4 + 3 * 3)),
    "torus": (Graph.torus(3, 4), 12, 4 * 12),
    "fully connected": (Graph.fully_connected(5), 5, 20),
    "fat tree": (Graph.fat_tree(leaves=3, ranks=4, spines=2), 12, 2 * (12 + 6)),
    "dragonfly": (Graph.dragonfly(groups=4, switches=3, ranks=2), 24, 2 * (24 + 4 * 3 + 6)),
    "hosts": (Graph.hosts([1, 3], bandwidths=[1e9, 1e8]), 4, 2 * (4 + 2)),
    "dgx": (Graph.dgx(2), 16, 4 * 16),
    "dgx1": (Graph.dgx1(), 8, 32),
    "one rank": (Graph(1, []), 1, 0),
}


@pytest.mark.parametrize("name", MADE)
def test_makers_and_files(name: str, tmp_path: Path) -> None:
    graph, ranks, links = MADE[name]
    assert (graph.ranks, len(graph.links)) == (ranks, links)
    found = Graph.load(graph.save(tmp_path / "graph.json"))
    assert (found.ranks, {*found.links}) == (graph.ranks, {*graph.links})
    assert len((tmp_path / "graph.json").read_text().splitlines()) == 2 + max(links // 2, 1)


def test_every_gpu_of_a_dgx1_has_six_links_of_25_gigabytes() -> None:
    sums: Counter[Node] = Counter()
    for link in Graph.dgx1().links:
        sums[link.src] += int(link.bandwidth)
    assert set(sums.values()) == {int(6 * 25e9)}


def test_two_ranks_of_a_dragonfly_are_at_most_three_links_between_switches_apart() -> None:
    """As many links between groups as others: each switch of four groups of three has one, and two within its group."""
    graph = Graph.dragonfly(groups=4, switches=3, ranks=1)
    assert set(Counter(link.src for link in graph.links if isinstance(link.src, str)).values()) == {1 + 2 + 1}
    lengths = Counter(len(graph.route(src, dst)) - 2 for src, dst in itertools.permutations(range(12), 2))
    assert max(lengths) == 3
    assert lengths[1] == 12 * (2 + 1)


def random_graph(seed: int) -> Graph:
    """A ring of ranks and switches with further links; each way has a latency and a bandwidth of its own."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 5)
    nodes: list[Node] = [*range(ranks), *(f"switch {number}" for number in range(draw.randint(0, 3)))]
    draw.shuffle(nodes)
    ends = {*zip(nodes, nodes[1:] + nodes[:1], strict=True)}
    ends |= {(one, two) for one, two in itertools.permutations(nodes, 2) if draw.random() < 0.3}
    speeds = [1e8, 2.5e8, 4e8, 1e9]
    return Graph(ranks, [(*each, draw.choice([1e-6, 5e-6]), draw.choice(speeds)) for each in sorted(ends, key=str)])


def ways(graph: Graph, passed: list[Link], node: Node, dst: int) -> Any:
    """Every way from a node to a rank that passes no node twice."""
    if node == dst:
        yield passed
    for link in graph.links:
        if link.src == node and link.dst not in {node, *(each.src for each in passed)}:
            yield from ways(graph, [*passed, link], link.dst, dst)


def length(way: list[Link]) -> tuple[int, float]:
    """The ranks that a way passes, and the seconds of 1 MB on it."""
    return sum(isinstance(link.dst, int) for link in way), sum(
        link.latency + (1 << 20) / link.bandwidth for link in way
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_route_passes_few_ranks_and_is_fast(seed: int) -> None:
    graph = random_graph(seed)
    for src, dst in itertools.permutations(range(graph.ranks), 2):
        route = list(graph.route(src, dst))
        every = list(ways(graph, [], src, dst))
        assert route in every
        assert length(route) == pytest.approx(min(map(length, every)))


def test_messages_to_different_ranks_spread_over_equal_switches() -> None:
    graph = Graph.fat_tree(leaves=2, ranks=4, spines=2)
    spines = [graph.route(0, dst)[1].dst for dst in range(4, 8)]
    assert spines == ["spine 0", "spine 1"] * 2


def simulated_step(rows: list[Any], graph: Graph, chunk: float) -> float:
    """The seconds in which all messages of a step arrive, without latency: a simulation of fluids.

    Each link shares its bandwidth among its messages by what is left of them; a message is as fast as its slowest link.
    """
    left: dict[Any, float] = defaultdict(float)
    for src, dst, *_ in rows:
        left[src, dst] += chunk * (src != dst)
    left = {pair: number for pair, number in left.items() if number}
    now = 0.0
    while left:
        load: dict[Link, float] = defaultdict(float)
        for pair, number in left.items():
            for link in graph.route(*pair):
                load[link] += number
        rates = {
            pair: min(link.bandwidth * number / load[link] for link in graph.route(*pair))
            for pair, number in left.items()
        }
        passed = min(left[pair] / rates[pair] for pair in left)
        now += passed
        left = {pair: number - rates[pair] * passed for pair, number in left.items()}
        left = {pair: number for pair, number in left.items() if number > 1e-9 * chunk}
    return now


def without_latency(graph: Graph) -> Graph:
    return Graph(graph.ranks, [link._replace(latency=0.0) for link in graph.links])


@pytest.mark.parametrize("seed", range(8))
def test_the_price_is_the_time_of_a_simulation(seed: int) -> None:
    graph = without_latency(random_graph(seed))
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        for name in algorithms(collective):
            schedule = build(collective, name, graph.ranks)
            chunk = 1e6 * float(schedule.share)
            simulated = sum(simulated_step(step.rows(), graph, chunk) for step in schedule.steps)
            assert schedule.cost(1e6, topology=graph) == pytest.approx(simulated), (collective, name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("segments", [1, 2, 5])
def test_a_tick_takes_as_long_as_its_longest_message(seed: int, segments: int) -> None:
    """Counted with dictionaries from the rows of the steps whose segments are in one tick."""
    graph = random_graph(seed)
    for name in ("bruck", "ring", "direct"):
        schedule = build("all_gather", name, graph.ranks)
        steps, total = list(schedule.steps), 0.0
        for tick in range(len(steps) + segments - 1):
            within = steps[max(tick - segments + 1, 0) : tick + 1]
            messages = Counter((src, dst) for step in within for src, dst, *_ in step.rows() if src != dst)
            load: Counter[Link] = Counter()
            for pair, chunks in messages.items():
                load.update(dict.fromkeys(graph.route(*pair), chunks))
            chunk = 1e6 * float(schedule.share) / segments
            times = [
                sum(link.latency for link in graph.route(*pair))
                + max(load[link] * chunk / link.bandwidth for link in graph.route(*pair))
                for pair in messages
            ]
            total += max(times, default=0)
        assert link_loads(schedule, graph).seconds(1e6, segments) == pytest.approx(total), name


def test_ranks_of_a_schedule_and_a_graph_must_agree() -> None:
    with pytest.raises(ValueError, match="all_gather ring has 4 ranks, the graph has 5"):
        build("all_gather", "ring", 4).cost(1e6, topology=Graph.ring(5))
    with pytest.raises(ValueError, match=r"Graph.hosts: 2 hosts and 1 bandwidths"):
        Graph.hosts([2, 2], bandwidths=[1e9])
    with pytest.raises(ValueError, match=r"route\(0, 5\): ranks are 0..4"):
        Graph.ring(5).route(0, 5)


@pytest.mark.parametrize("nbytes", [math.nan, math.inf, -1.0])
def test_a_size_that_no_data_has_is_refused(nbytes: float) -> None:
    """Its price was nan, infinite or negative."""
    ring = build("all_gather", "ring", 4)
    for price in (lambda: ring.cost(nbytes, topology=Graph.ring(4)), lambda: ring.cost(nbytes, alpha=1e-6, beta=1e-9)):
        with pytest.raises(ValueError, match=rf"cost\(nbytes={nbytes}\): it must be a finite number of bytes"):
            price()
    with pytest.raises(ValueError, match=rf"recommend\(nbytes={nbytes}\)"):
        recommend("all_gather", nbytes, Topology((4,), Level(1e-6, 1e-9), Level(1e-6, 1e-9)))


GOOD = (0, 1, 1e-6, 1e9)
BACK = (1, 0, 1e-6, 1e9)
WRONG: dict[str, tuple[int, list[Any], str]] = {
    "no ranks": (0, [], "ranks=0.*at least 1"),
    "a rank too many": (2, [GOOD, BACK, (0, 2, 1e-6, 1e9)], "link 2, from 0 to 2: 2 is neither a rank, 0..1, nor"),
    "a loop": (2, [(1, 1, 1e-6, 1e9)], "link 0, from 1 to 1: the ends must differ"),
    "a latency": (2, [(0, 1, -1, 1e9)], "link 0.*latency=-1; it must be a finite number"),
    "no number": (2, [(0, 1, "1us", 1e9)], "link 0.*latency='1us'"),
    "no bandwidth": (2, [(0, 1, 1e-6, 0)], "bandwidth=0; use more than 0"),
    "twice": (2, [GOOD, BACK, GOOD], "2 links lead from 0 to 1; add up their bandwidths"),
    "a rank alone": (10**9, [GOOD, BACK], "rank 2 has no link; add one, or reduce the number of ranks, 1000000000"),
    "one way": (2, [GOOD], "no way leads from rank 1 to rank 0; add a link"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_graph_that_is_wrong_is_refused(case: str) -> None:
    ranks, links, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Graph(ranks, links)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "2"}, 'no field "format" of the value "dist_prims topology 1"'),
        ({"ranks": True}, '"ranks", a number, and "links", a list'),
        ({"links": [{"from": 0, "to": 1, "latency": 0, "bandwidth": 1, "one_way": "no"}]}, "link 0 is .*fields from"),
        ({"ranks": "two"}, '"ranks", a number, and "links", a list'),
        ({"links": [{"from": 0, "to": 1}]}, "link 0 is .*it must have the fields from, to, latency"),
        ({"links": [{"from": 0, "to": 1, "latency": 0, "bandwidth": 1, "speed": 1}]}, "link 0 is .*fields from"),
        ({"links": [{"from": 0, "to": 1, "latency": 0, "bandwidth": 1, "one_way": True}]}, "no way leads from rank 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = Graph.ring(2).save(tmp_path / "graph.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"graph.json: .*{message}"):
        Graph.load(path)
