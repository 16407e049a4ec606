"""Algorithms beside their sources: the partners of each step, the number of steps, and what crosses a link."""

from __future__ import annotations

import numpy as np
import pytest

from dist_prims.schedules import Schedule, build
from dist_prims.schedules.cost_card import ceil_log2


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
