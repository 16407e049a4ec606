"""Schedules found for graphs: proved, near the cut bound, never slower than what is registered, and run on ranks."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import optimize, sparse

import dist_prims
from dist_prims.cli import main
from dist_prims.schedules import Graph, Schedule, algorithm, synthesize
from dist_prims.schedules.cut_bound import cut_bound
from dist_prims.schedules.flow_bound import flow_bound
from dist_prims.schedules.graph_cost import link_loads
from dist_prims.schedules.timed_trees import TimedTrees
from dist_prims.schedules.trees import Pairs

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
ALL_COLLECTIVES = (*COLLECTIVES, "all_to_all")
SLOW_HOST = Graph.hosts([2, 2, 2], bandwidths=[1e9, 1e9, 0.25e9])
# A ring of one-way links of unequal bandwidth, and a shorter way back: no message returns as it came.
ONE_WAY = Graph(4, [(0, 1, 0, 1e9), (1, 2, 0, 2e9), (2, 3, 0, 1e9), (3, 0, 0, 1e9), (2, 0, 0, 1e9), (1, 0, 0, 3e8)])
GRAPHS = {
    "ring": Graph.ring(6),
    "mesh": Graph.mesh(2, 3),
    "torus": Graph.torus(3, 3),
    "fat tree": Graph.fat_tree(leaves=2, ranks=3, spines=2),
    "slow host": SLOW_HOST,
    "dgx1": Graph.dgx1(),
    "one way": ONE_WAY,
    "two ranks": Graph.ring(2),
    "one rank": Graph(1, []),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_found_is_near_the_bound(collective: str, name: str) -> None:
    graph, root = GRAPHS[name], GRAPHS[name].ranks - 1 if collective == "broadcast" else 0
    result = synthesize(graph, collective, 256e6, root=root)
    result.found.schedule.verify()
    assert result.found.schedule.root == (root if collective == "broadcast" else None)
    assert result.best.seconds <= min(result.found.seconds, result.registered.seconds)
    assert result.bound <= result.found.seconds <= 1.15 * (result.halves or result.bound)
    assert link_loads(result.schedule, graph).seconds(256e6, result.best.segments) == result.best.seconds


@pytest.mark.sampled(1)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_few_long_steps_fill_the_links_of_two_boxes(collective: str) -> None:
    """In segments an all_gather of 256 MB took 1.11 times the bound: each tick cost a latency of the network."""
    result = synthesize(Graph.dgx(2), collective, 256e6)
    assert result.found.seconds <= 1.05 * (result.halves or result.bound)
    result.found.schedule.verify()


def test_a_tree_that_is_removed_leaves_no_load() -> None:
    graph = Graph.dgx(2)
    packing = TimedTrees(graph, Pairs.of(graph), 0, 1e6 / graph.bandwidth, np.full(3, 2e-4))
    trees = [packing.grow(root, 2) for root in range(16)]
    assert packing.load.sum() == 16 * 15 * 2  # two links a pair
    for tree in trees:
        packing.remove(tree)
    assert not packing.load.any()


def least_seconds_of_steps(graph: Graph, steps: int, nbytes: float) -> float:
    """The least price of any broadcast from rank 0 in so many steps, if each link has one latency: a linear program.

    sent[step, pair] is the data from one rank to another, and to[rank, step, pair] the part of it that is for a rank; a
    rank sends what it has received in earlier steps. A step lasts for the latency and the data of each link.
    """
    size, links = graph.ranks, len(graph.links)
    src, dst = np.nonzero(~np.eye(size, dtype=bool))
    routes = [graph.route_numbers(*pair) for pair in zip(src.tolist(), dst.tolist(), strict=True)]
    passes = sparse.csr_array(np.array([[link in route for route in routes] for link in range(links)], float))
    latency = min(sum(graph.links[link].latency for link in route) for route in routes)
    enters, leaves = (sparse.csr_array(np.arange(size)[:, None] == side) * 1.0 for side in (dst, src))
    every, ends = sparse.eye_array(steps), sparse.eye_array(size - 1)
    parts, pairs = (size - 1) * steps * len(src), steps * len(src)
    sends = sparse.kron(np.tril(np.ones((steps, steps))), leaves)  # up to each step, less what was received before it
    sends -= sparse.kron(np.tril(np.ones((steps, steps)), -1), enters)
    speed, unit = graph.bandwidth / graph.bandwidth.max(), nbytes / graph.bandwidth.max()
    limits = sparse.block_array(
        [
            [sparse.kron(ends, sends), None, sparse.csr_array(((size - 1) * steps * size, steps))],
            [sparse.eye_array(parts), -sparse.kron(np.ones((size - 1, 1)), sparse.eye_array(pairs)), None],
            [None, sparse.kron(every, passes), -sparse.kron(every, speed[:, None])],
        ]
    )
    has = np.tile(np.arange(size) == 0, (size - 1) * steps)
    most = np.concatenate([has, np.zeros(parts), np.tile(-speed * latency / unit, steps)])
    arrive = sparse.hstack(
        [
            sparse.kron(ends, sparse.kron(np.ones((1, steps)), enters - leaves)),
            np.zeros(((size - 1) * size, pairs + steps)),
        ]
    )
    wanted = np.eye(size)[1:] - np.eye(size)[0]
    cost = np.append(np.zeros(parts + pairs), np.ones(steps))
    solved = optimize.linprog(cost, limits.tocsr(), most, arrive.tocsr(), wanted.ravel(), method="highs-ipm")
    assert solved.status == 0, solved.message
    return float(solved.fun) * unit


def test_a_broadcast_in_a_box_is_the_best_of_all() -> None:
    """It takes more than 1.1 times the cut bound, which has no latency. No schedule of as many steps takes less."""
    box = Graph.dgx()
    result = synthesize(box, "broadcast", 256e6)
    steps = len(result.found.schedule.steps) + result.found.segments - 1
    least = min(least_seconds_of_steps(box, each, 256e6) for each in (steps - 1, steps, steps + 1))
    assert 1.11 * result.bound < least < result.found.seconds < 1.001 * least


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "graph", [Graph.dgx1(), Graph.fully_connected(8), Graph.torus(4, 4), Graph.mesh(4, 4), Graph.fat_tree(3, 4, 3)]
)
def test_a_broadcast_has_trees_that_fill_the_narrowest_cut(graph: Graph) -> None:
    """64 chunks on the 7 links of a rank took 1.105 times the bound, on the 6 links of a DGX-1 1.17 times."""
    result = synthesize(graph, "broadcast", 256e6)
    assert result.found.seconds <= 1.1 * result.bound


@pytest.mark.sampled(1)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_chunks_of_an_all_gather_fill_the_six_links_of_a_dgx1(collective: str) -> None:
    """16 chunks of each of 7 ranks do not divide by 6, and took 1.06 times the bound."""
    result = synthesize(Graph.dgx1(), collective, 256e6)
    assert result.found.seconds <= 1.05 * result.bound


def test_a_broadcast_between_two_boxes_has_three_levels() -> None:
    """Each level costs the latency of the network in every segment: with eight levels it took 1.46 times the bound."""
    result = synthesize(Graph.dgx(2), "broadcast", 256e6)
    assert len(result.found.schedule.steps) == 3
    assert result.found.seconds <= 1.37 * result.bound


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GRAPHS)
def test_an_all_to_all_is_near_the_flow_of_several_commodities(name: str) -> None:
    graph = GRAPHS[name]
    result = synthesize(graph, "all_to_all", 256e6, chunks=8)
    result.found.schedule.verify()
    assert result.best.seconds <= min(result.found.seconds, result.registered.seconds)
    assert (1 - 1e-6) * result.bound <= result.found.seconds <= 1.15 * result.bound


def test_the_bound_of_an_all_to_all_is_the_length_of_all_ways_on_a_ring_and_the_slow_link_of_a_host() -> None:
    distances = [min(rank, 8 - rank) for rank in range(8)]
    assert flow_bound(Graph.ring(8)) == pytest.approx(sum(distances) / 2 / 8 / 1e9)  # two links leave a rank
    assert flow_bound(SLOW_HOST) == pytest.approx(2 * 4 / 6 / 0.25e9)  # two ranks send to four others
    # Data for the ends of the slow link goes round it.
    assert flow_bound(Graph(3, [*Graph.ring(3).links[2:], (0, 1, 0, 1e6), (1, 0, 0, 1e6)])) == pytest.approx(
        2 / 3 / (1e9 + 1e6), rel=1e-3
    )


def test_two_ranks_have_one_route_in_the_bound_of_an_all_to_all() -> None:
    """The receivers of a leaf choose spines in turn: of 4 receivers 2 have the first of 3 spines."""
    graph = Graph.fat_tree(leaves=3, ranks=4, spines=3)
    assert flow_bound(graph) == pytest.approx(19 / 18 / 1e9)
    assert synthesize(graph, "all_to_all", 256e6).found.seconds <= 1.03 * 256e6 * flow_bound(graph)


def test_an_all_to_all_goes_round_a_slow_link() -> None:
    graph = Graph(4, [link._replace(bandwidth=1e9 - 9e8 * ({0, 1} == {*link[:2]})) for link in Graph.ring(4).links])
    result = synthesize(graph, "all_to_all", 256e6)
    result.found.schedule.verify()
    assert result.registered.seconds > 1.2 * result.found.seconds
    assert result.found.schedule.contract.total > result.found.schedule.data_chunks  # ranks on the way keep chunks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("collective", ALL_COLLECTIVES)
def test_the_time_ends_the_search_with_the_best_schedule_so_far(collective: str) -> None:
    calls: list[Any] = []
    result = synthesize(ONE_WAY, collective, 1e6, seconds=0, progress=lambda *each: calls.append(each))
    assert not calls
    assert result.best is result.found is result.registered
    assert result.is_cut_short
    result = synthesize(ONE_WAY, collective, 1e6, chunks=4, progress=lambda *each: calls.append(each))
    assert not result.is_cut_short
    assert len({priced.schedule.chunks for _, priced in calls}) > 1
    assert [elapsed for elapsed, _ in calls] == sorted(elapsed for elapsed, _ in calls)
    result.found.schedule.verify()


def test_the_command_says_that_the_time_ended_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = SLOW_HOST.save(tmp_path / "graph.json")
    assert main(["synthesize", str(graph), "--seconds", "0", "--collective", "broadcast"]) == 0
    *_, limit, verdict = capsys.readouterr().out.splitlines()
    assert limit == "limit       --seconds 0 ended the search before the first schedule was found"
    assert "nothing found is faster" in verdict


def test_the_command_names_the_library_that_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert main(["synthesize", str(ONE_WAY.save(tmp_path / "graph.json")), "--collective", "all_to_all"]) == 0
    out, err = capsys.readouterr()
    assert "bound       unknown: pip install scipy" in out
    assert "4 chunks, " in err


def test_the_same_seed_finds_the_same_schedule(tmp_path: Path) -> None:
    one, two = (synthesize(SLOW_HOST, "all_reduce", 1e6, chunks=4, seed=3).found.schedule for _ in range(2))
    assert one.save(tmp_path / "one.json").read_text() == two.save(tmp_path / "two.json").read_text()
    assert one.chunks in (6, 24)


def test_links_that_differ_are_used_better_than_by_registered_algorithms() -> None:
    result = synthesize(Graph.torus(3, 3), "all_gather", 256e6)
    assert result.schedule.algorithm == "synthesized"
    assert result.registered.seconds > 2 * result.best.seconds


def test_a_registered_algorithm_that_is_faster_is_returned() -> None:
    result = synthesize(SLOW_HOST, "all_gather", 1024)
    assert result.registered.seconds < result.found.seconds
    assert result.best is result.registered
    assert result.schedule.algorithm != "synthesized"


def crossing(graph: Graph, inside: set[Any]) -> int:
    return sum(int(link.bandwidth) for link in graph.links if link.src in inside and link.dst not in inside)


@pytest.mark.parametrize("name", ["ring", "mesh", "slow host", "one way", "two ranks"])
def test_the_bound_is_the_narrowest_of_all_cuts(name: str) -> None:
    graph = GRAPHS[name]
    every = [set(cut) for size in range(1, len(graph.nodes)) for cut in itertools.combinations(graph.nodes, size)]
    size, ranks = graph.ranks, set(range(graph.ranks))
    gather = max(Fraction(len(cut & ranks), size * crossing(graph, cut)) for cut in every if not ranks <= cut)
    rest = [({*graph.nodes} - cut, cut) for cut in every if cut & ranks and not ranks <= cut]
    scatter = max(Fraction(len(cut & ranks), size * crossing(graph, other)) for other, cut in rest)
    assert cut_bound("all_gather", graph) == gather
    assert cut_bound("reduce_scatter", graph) == scatter
    assert cut_bound("all_reduce", graph) == max(
        Fraction(1, crossing(graph, cut)) for cut in every if cut & ranks and not ranks <= cut
    )
    sent = max(Fraction(1, crossing(graph, cut)) for cut in every if 1 in cut and not ranks <= cut)
    assert cut_bound("broadcast", graph, root=1) == sent


def test_the_bound_counts_fractions_of_a_byte_a_second() -> None:
    """They were cut off, so a bandwidth below 1 was 0."""
    graph = Graph(3, [(*link[:2], 0, 0.3) for link in Graph.ring(3).links])
    assert cut_bound("broadcast", graph) == 1 / (2 * Fraction(0.3))
    assert cut_bound("all_gather", graph) == Fraction(2, 3) / (2 * Fraction(0.3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"collective": "scan"}, "schedules are found for all_gather, reduce_scatter, all_reduce, broadcast, all_to"),
        ({"root": 6, "collective": "broadcast"}, "root=6.*it must be a rank of a broadcast"),
        ({"root": 1}, "root=1"),
        ({"chunks": 0}, "chunks=0.*at least 1"),
        ({"nbytes": math.nan}, r"synthesize\(nbytes=nan\): it must be a finite number of bytes"),
        ({"nbytes": math.inf}, "nbytes=inf"),
        ({"nbytes": -1}, "nbytes=-1"),
    ],
)
def test_what_cannot_be_found_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(**{"graph": SLOW_HOST, "collective": "all_gather", "nbytes": 1e6, **given})


def test_the_command_prints_the_bound_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, found, picture = SLOW_HOST.save(tmp_path / "graph.json"), tmp_path / "found.json", tmp_path / "found.svg"
    command = f"synthesize {graph} --collective broadcast --bytes 1M --save {found} --draw {picture}"
    assert main(command.split()) == 0
    first, bound, registered, machine, size, verdict, saved, drawn = capsys.readouterr().out.splitlines()
    assert (first, bound) == ("broadcast of 1 MB: 6 ranks, 18 links", "bound       4.19 ms")
    assert "times the bound" in registered
    assert machine.startswith("found       synthesized")
    assert "proved" in size
    assert verdict == "Use the schedule found."
    assert (saved, drawn) == (f"saved       {found}", f"drawn       {picture}")
    assert "busiest: " in picture.read_text()
    assert Schedule.load(found).size == 6
    assert main(["synthesize", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_schedules_that_are_found_run_on_ranks(backend: str, tmp_path: Path) -> None:
    """From their files: named in calls, in Python over gloo and in C++, and pinned in segments."""
    for collective in ALL_COLLECTIVES:
        result = synthesize(ONE_WAY, collective, 1e6, chunks=4)
        result.found.schedule.save(tmp_path / f"{collective}.json")

    def body() -> None:
        for collective in ALL_COLLECTIVES:
            found = Schedule.load(tmp_path / f"{collective}.json")
            make: Any = lambda size, steps=found.steps: iter(steps)  # noqa: E731
            if collective == "broadcast":
                make = lambda size, root, steps=found.steps: iter(steps)  # noqa: E731
            scratch = found.contract.total - found.data_chunks
            algorithm(collective, name="found", chunks=found.chunks, scratch=scratch)(make)
        rank, ones = dist.get_rank(), torch.ones(1000)
        pinned: dict[str, Any] = dict.fromkeys(ALL_COLLECTIVES, "found x3")
        options = dist_prims.BackendOptions(**pinned)
        groups = [None, dist.new_group(pg_options=options)] if backend == "dist_prims" else [None]
        for group in groups:
            name = "found" if group is None else None
            gathered, summed, sent = torch.zeros(4000), ones * rank, ones * rank
            dist_prims.all_gather(gathered, ones * rank, group=group, algorithm=name)
            assert torch.equal(gathered, torch.arange(4.0).repeat_interleave(1000))
            dist_prims.all_reduce(summed, group=group, algorithm=name)
            assert torch.equal(summed, ones * 6)
            part = torch.zeros(1000)
            dist_prims.reduce_scatter(
                part, torch.arange(4.0).repeat_interleave(1000) + rank, group=group, algorithm=name
            )
            assert torch.equal(part, ones * (4 * rank + 6))
            dist_prims.broadcast(sent, group=group, algorithm=name)
            assert torch.equal(sent, ones * 0)
            blocks = 100 * rank + torch.arange(4.0).repeat_interleave(1000)
            received = torch.zeros(4000)
            dist_prims.all_to_all(received, blocks, group=group, algorithm=name)
            assert torch.equal(received, 100 * torch.arange(4.0).repeat_interleave(1000) + rank)

    dist_prims.spawn(body, 4, backend=backend, timeout=60)


def test_thirty_topologies_are_drawn_whose_links_differ_by_a_factor_of_4() -> None:
    draw = runpy.run_path(str(ROOT / "docs/benchmarks/topologies.py"))["topologies"]
    drawn = list(draw(seed=1))
    assert len(drawn) == 30
    assert drawn == list(draw(seed=1)) != list(draw(seed=2))
    for name, graph in drawn:
        speeds = [link.bandwidth for link in graph.links]
        assert max(speeds) >= 4 * min(speeds), name
