"""Algorithms beside their sources: the partners of each step, the number of steps, and what crosses a link."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dist_prims.schedules import Schedule, build
from dist_prims.schedules.algorithms.double_tree import two_trees
from dist_prims.schedules.cost import best_segments, seconds
from dist_prims.schedules.cost_card import ceil_log2
from dist_prims.schedules.load import Hosts, count
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology


def partners(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """(src, dst) of the messages of each step."""
    return [sorted({(src, dst) for src, dst, *_ in step.rows() if src != dst}) for step in schedule.steps]


def crossing(schedule: Schedule, ranks: int) -> int:
    """Messages between hosts of ``ranks`` ranks each."""
    return sum(src // ranks != dst // ranks for step in partners(schedule) for src, dst in step)


def test_a_broadcast_by_halving_reaches_the_other_hosts_first() -> None:
    assert partners(build("broadcast", "halving", 8))[:2] == [[(0, 4)], [(0, 2), (4, 6)]]
    assert partners(build("broadcast", "binomial", 8))[:2] == [[(0, 1)], [(0, 2), (1, 3)]]  # the nearest first
    for hosts, ranks in ((2, 4), (4, 3), (8, 5)):
        for root in range(hosts * ranks):
            schedule = build("broadcast", "halving", hosts * ranks, root=root)
            assert crossing(schedule, ranks) == hosts - 1
            between = partners(schedule)[: ceil_log2(hosts)]
            assert sum(map(len, between)) == hosts - 1  # all of them before any message within a host


@pytest.mark.parametrize("size", range(1, 20))
def test_a_broadcast_by_halving_doubles_the_ranks_with_the_data(size: int) -> None:
    for root in range(size):
        schedule = build("broadcast", "halving", size, root=root)
        assert len(schedule.steps) == ceil_log2(size)
        reached = np.cumsum([1, *map(len, partners(schedule))])
        assert reached[-1] == size
        assert (reached[1:-1] == 2 ** np.arange(1, len(schedule.steps))).all()


@pytest.mark.parametrize("size", [2, 3, 6, 7, 8, 12, 33])
def test_pat_all_reduce_has_the_rounds_and_blocks_of_the_theorem(size: int) -> None:
    """Träff 2024: 2 ceil(log2 p) rounds; each rank sends, receives and keeps one partner a round, 2(p-1) blocks."""
    schedule = build("all_reduce", "pat", size)
    assert len(schedule.steps) == 2 * ceil_log2(size)
    for step in partners(schedule):
        assert [src for src, _ in step] == sorted(dst for _, dst in step) == [*range(size)]
        assert len({(dst - src) % size for src, dst in step}) == 1  # a circulant graph: all send equally far
    assert {schedule.bytes_sent(rank, schedule.chunks) for rank in range(size)} == {2 * (size - 1)}
    additions = sum(int(step.reduce.sum()) for step in schedule.steps)
    assert additions == size * (size - 1)


@pytest.mark.parametrize(("size", "root", "chunks"), [(2, 0, 1), (5, 0, 3), (5, 3, 1), (8, 7, 4)])
def test_a_chain_passes_the_data_on_from_rank_to_rank(size: int, root: int, chunks: int) -> None:
    """Each rank sends the data once, to the next rank, and the last chunk arrives after n-2+k steps."""
    along = [(root + place) % size for place in range(size)]
    for collective, line in (("broadcast", along), ("reduce", [*along[:0:-1], root])):
        schedule = build(collective, "chain", size, root=root, chunks=chunks)
        assert len(schedule.steps) == size - 2 + chunks
        links = {link for step in partners(schedule) for link in step}
        assert links == set(itertools.pairwise(line))
        sent = [schedule.bytes_sent(rank) for rank in line]
        assert sent == [1] * (size - 1) + [0]
    assert str(build("reduce", "chain", 4, chunks=1).order(chunk=0)) == "((r2+r3)+r1)+r0"


def test_many_segments_make_a_chain_as_fast_as_one_link() -> None:
    links = Topology((1,) * 8, Level(1e-6, 0), Level(1e-6, 1e-9))
    for collective in ("broadcast", "reduce"):
        chain = build(collective, "chain", 8, chunks=1)
        assert seconds(chain, 1e8, links) == pytest.approx(7 * 0.1, rel=1e-3)
        assert seconds(chain, 1e8, links, best_segments(count(chain, Hosts.of(links)), 1e8, links)) < 0.1 * 1.15
        few = Topology((1,) * 3, links.inner, links.outer)
        assert recommend(collective, 1e8, few).candidates[0].schedule.algorithm == "chain"
    names = [each.name for each in recommend("broadcast", 1e8, links).candidates]
    assert {"chain", "chain chunks=1"} <= {*names}


def test_rabenseifner_halves_then_gathers() -> None:
    """2 log2 p steps, less than two buffers sent and less than one added up by each rank."""
    assert partners(build("reduce", "rabenseifner", 4, root=1)) == [
        [(0, 2), (1, 3), (2, 0), (3, 1)],
        [(0, 3), (1, 2), (2, 1), (3, 0)],
        [(0, 3), (2, 1)],
        [(3, 1)],
    ]
    for size in range(2, 34):
        p = 1 << (size.bit_length() - 1)
        schedule = build("reduce", "rabenseifner", size, root=size // 2)
        added: Any = sum(np.bincount(step.dst[step.reduce], minlength=size) for step in schedule.steps)
        assert added.max() * schedule.share <= (p - 1) / p + (size > p) / 2
        assert max(schedule.bytes_sent(rank) for rank in range(size)) < 2


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_rabenseifner_folds_pairs_of_ranks_that_share_the_additions(size: int) -> None:
    """The first two steps of a size that is not a power of two, p: r = n - p pairs, half of the data each way."""
    schedule = build("reduce", "rabenseifner", size)
    p, pairs = schedule.chunks, [(2 * i, 2 * i + 1) for i in range(size - schedule.chunks)]
    first, second = partners(schedule)[:2]
    assert first == sorted(pairs + [pair[::-1] for pair in pairs])
    assert second == [pair[::-1] for pair in pairs]
    assert [len(step) for step in schedule.steps[:2]] == [p * len(pairs), p // 2 * len(pairs)]


@pytest.mark.parametrize("size", [2, 4, 6, 8, 10, 12, 14, 22, 24, 32, 36])
def test_swing_meets_ranks_to_the_left_and_right_in_turn(size: int) -> None:
    """De Sensi et al. 2024: distances 1, -1, 3, -5, 11, ..., for any even size, with the fewest bytes."""
    schedule = build("all_reduce", "swing", size)
    half = ceil_log2(size)
    assert len(schedule.steps) == 2 * half
    for number, step in enumerate(partners(schedule)):
        distance = (1, -1, 3, -5, 11, -21)[number if number < half else 2 * half - 1 - number]
        assert set(step) <= {(rank, (rank + (-distance if rank % 2 else distance)) % size) for rank in range(size)}
    assert {schedule.bytes_sent(rank, size) for rank in range(size)} == {2 * (size - 1)}


@pytest.mark.parametrize("size", [3, 5, 7, 13])
def test_swing_of_an_odd_size_has_one_surplus_rank(size: int) -> None:
    first, *between, last = partners(build("all_reduce", "swing", size))
    assert (first, last) == ([(size - 1, 0)], [(0, size - 1)])
    assert between == partners(build("all_reduce", "swing", size - 1))


@pytest.mark.parametrize("size", [*range(2, 20), 32, 33, 64, 100])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_two_trees_send_and_receive_one_message_a_step(collective: str, size: int) -> None:
    """Sanders, Speck and Träff 2009: by colours of the edges; a delay of two steps a level, each rank sends once."""
    for chunks in (1, 4):
        schedule = build(collective, "double_tree", size, root=size // 3, chunks=chunks)
        for step in schedule.steps:
            assert len(set(step.src.tolist())) == len(set(step.dst.tolist())) == len(step)
        assert len(schedule.steps) <= 2 * ceil_log2(size) + 2 * chunks
        sent = [schedule.bytes_sent(rank) for rank in range(size)]
        assert max(sent) <= 1
        assert sum(sent) == size - 1  # no rank receives anything twice


@pytest.mark.parametrize("nodes", range(1, 40))
def test_the_inner_ranks_of_one_tree_are_leaves_of_the_other(nodes: int) -> None:
    inner = [set(parent[parent > 0].tolist()) for parent in two_trees(nodes)]
    assert not inner[0] & inner[1]
    children = [np.bincount(parent, minlength=nodes + 1) for parent in two_trees(nodes)]
    assert [int(count[0]) for count in children] == [1, 1]
    assert max(int(count.max()) for count in children) <= 2


def test_two_trees_are_as_fast_as_one_link_for_many_ranks() -> None:
    links = Topology((1,) * 64, Level(1e-6, 0), Level(1e-6, 1e-9))
    for collective in ("broadcast", "reduce"):
        best = min(recommend(collective, 1e8, links).candidates, key=lambda candidate: candidate.seconds)
        assert best.schedule.algorithm == "double_tree"
        assert best.seconds < 0.1 * 1.2
