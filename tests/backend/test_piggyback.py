"""Collectives between hosts whose data travels in the messages of the agreement, and the choice of which do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pinning import pin
from ranks import backend_of, span
from values import every_collective

from dist_prims import MismatchError
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.schedules import Schedule
from dist_prims.schedules.piggyback import MOST_BYTES, added_seconds, fits
from dist_prims.schedules.program import FOLLOWED
from dist_prims.schedules.recommend import bound
from dist_prims.schedules.topology import Level, Topology

GIGABIT = {**ASSUMED, "outer": {"alpha": 5e-5, "beta": 8.5e-9}}
NAME = "piggyback"


def travels(layout: str, collective: str, nbytes: int, costs: Any = ASSUMED) -> bool:
    group = MultiHostSchedules(layout.split(), 0, costs, Schedule.verify)
    return group.choose(collective, nbytes, 0).is_slower_than_piggyback


@pytest.mark.sampled(8)
@pytest.mark.parametrize("collective", FOLLOWED)
@pytest.mark.parametrize("layout", ["a b", "a a b b", "a a b b c c"])
def test_small_data_travels_with_the_agreement(layout: str, collective: str) -> None:
    assert all(travels(layout, collective, nbytes) for nbytes in (1, 2048, 8192))


def test_a_schedule_is_better_where_it_sends_less() -> None:
    """A host that broadcasts to three others by messages of its own sends three times as much as a chain does."""
    assert not travels("a b c d", "broadcast", 1 << 16, GIGABIT)
    assert not travels("a b c d", "all_reduce", 1 << 16, GIGABIT)
    assert travels("a b c d", "gather", 1 << 16, GIGABIT)
    assert travels("a b", "broadcast", 1 << 16, GIGABIT)


def test_between_more_hosts_no_price_decides() -> None:
    """Leaders of more than 4 hosts forward what they receive, so little may travel: C++ decides by the size alone."""
    assert travels("a b c d", "all_gather", 2048)
    assert not travels("a b c d e", "all_gather", 2048)


def test_a_rank_alone_on_its_host_copies_less() -> None:
    """It neither copies its data to shared memory nor its result from there: half of the copies of two ranks."""

    def copies(hosts: tuple[int, ...]) -> float:
        topology = Topology(hosts, Level(0, 1e-10), Level(0, 0))
        return added_seconds("broadcast", 1 << 16, topology)

    assert copies((1, 1)) == copies((2, 2)) / 2


def test_blocks_of_different_lengths_are_not_known_to_all() -> None:
    group = MultiHostSchedules(["a", "b"], 0, ASSUMED, Schedule.verify)
    assert not group.choose("all_to_all", 64, 0, is_even=False).is_slower_than_piggyback


@given(
    st.sampled_from(FOLLOWED),
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.integers(1, 1 << 20),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_link_carries_at_least_what_must_cross_it(
    collective: str, hosts: list[int], nbytes: int, one_machine: bool
) -> None:
    topology = Topology(
        tuple(hosts), Level(0, 0), Level(0, 1e-9), cores=2 if one_machine else None, one_machine=one_machine
    )
    added = added_seconds(collective, nbytes, topology)
    assert added >= bound(collective, nbytes, topology) * (1 - 1e-9)
    crowded = Topology(tuple(hosts), Level(0, 1e-10), Level(0, 1e-9), gamma=1e-10, congestion=1e-10)
    assert added_seconds(collective, nbytes, crowded) > added
    busy = replace(topology, processor=Level(0, 4e-9))  # a byte takes two cores 2 ns, and the link 1 ns
    assert added_seconds(collective, nbytes, busy) >= (2 * added if one_machine else added)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("host_transport")
@pytest.mark.parametrize(
    "layout", ["a b", "a b a c b d", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a b b c", "a b c d e"))]
)
def test_every_collective_moves_the_right_data(layout: str) -> None:
    def body() -> None:
        every_collective(0, 1, 33, 700)
        every_collective(33, place=lambda values: torch.empty(len(values), 2, dtype=values.dtype)[:, 1].copy_(values))

    span(layout, body)


def test_the_name_tells_how_data_travels() -> None:
    def body() -> None:
        names = [backend_of().algorithm(nbytes, "all_gather") for nbytes in (64, 8192, 1 << 22)]
        assert [name == NAME for name in names] == [True, True, False]
        two_by_two = Topology((2, 2), Level(0, 0), Level(0, 0))
        for collective, most in (("broadcast", MOST_BYTES), ("all_to_all", MOST_BYTES // 2)):
            assert fits(collective, most, two_by_two)
            assert not fits(collective, most + 1, two_by_two)
            assert backend_of().algorithm(most + 1, collective, 0 if collective == "broadcast" else -1) != NAME
        pin(all_gather="ring")
        assert backend_of().algorithm(64, "all_gather") == "ring"
        every_collective(5)

    span("a a b b", body)


@pytest.mark.usefixtures("host_transport")
def test_a_mismatch_is_raised_on_all_ranks_and_writes_no_output() -> None:
    """The blocks of ranks 0, 1 and 3 could travel with the agreement. Rank 2 has other lengths, or another call."""

    def body() -> None:
        rank = dist.get_rank()
        for _ in range(3):
            received = [torch.full((8,), -1.0) for _ in range(4)]
            with pytest.raises(MismatchError, match="Rank 2 sends"):
                dist.all_to_all(received, [torch.ones(8 + (rank == peer == 2)) for peer in range(4)])
            with pytest.raises(MismatchError, match="rank 2 calls broadcast"):
                dist.broadcast(torch.ones(2000), 0) if rank == 2 else dist.all_gather(received, torch.ones(8))
            assert (torch.stack(received) == -1).all()
            uneven = [torch.full((8 + (rank == peer),), float(rank)) for peer in range(4)]
            results = [torch.zeros_like(each) for each in uneven]
            dist.all_to_all(results, uneven)
            assert [each[0].item() for each in results] == [0, 1, 2, 3]
            every_collective(20)

    span("a b b c", body)
