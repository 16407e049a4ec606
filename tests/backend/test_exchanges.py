"""Blocks of different lengths, on one host and between hosts, and an all_to_all by the algorithm that a call names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pinning import pin
from ranks import span
from values import equal, held, summed

import dist_prims
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.collectives import channel
from dist_prims.errors import CommInterruptedError, MismatchError
from dist_prims.schedules import Schedule, build
from dist_prims.schedules.program import RankSchedule, compile_program


def exchange(lengths: Callable[[int, int], int], **options: Any) -> None:
    """An all_to_all in which rank s sends lengths(s, d) elements to rank d."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.full((lengths(peer, rank),), -1) for peer in range(size)]
    sent = [held(10 * rank + peer, lengths(rank, peer)) for peer in range(size)]
    if options:
        dist_prims.all_to_all(received, sent, **options)
    else:
        dist.all_to_all(received, sent)
    for peer, found in enumerate(received):
        equal(found, held(10 * peer + rank, lengths(peer, rank)), (lengths(peer, rank), peer, options))


def choices(names: str, nbytes: int, collective: str = "all_to_all") -> tuple[int, int, str]:
    group = MultiHostSchedules(names.split(), 0, ASSUMED, Schedule.verify)
    found = group.choose(collective, nbytes, 0, is_even=False)
    assert found.low <= nbytes < found.high
    assert found.segments == 1
    return found.low, found.high, found.name


def test_large_uneven_exchanges_follow_each_other() -> None:
    """More than 4 streams into a host at once, of much data, make TCP drop packets."""
    assert choices("a a b b", 0) == (0, 1 << 19, "direct")
    assert choices("a a b b", (1 << 19) - 1)[2] == "direct"
    assert choices("a a b b", 1 << 19) == (1 << 19, 1 << 22, "pairwise")
    assert choices("a a b b", 1 << 22) == (1 << 22, 1 << 63, "direct")  # 4 streams are not too many for long blocks
    assert choices("a a a b b b", 1 << 30)[2] == "pairwise"
    assert choices("a a a b b b", 1 << 30, "gather")[2] == "direct"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("large", [{0}, {1, 2}, pytest.param({0, 1, 2, 3}, marks=pytest.mark.slow)])
def test_ranks_may_send_their_blocks_in_different_orders(large: set[int]) -> None:
    """Each rank knows its own lengths only, so some ranks are pairwise while others are direct."""

    def body() -> None:
        names: list[str] = []
        choose = MultiHostSchedules.choose

        def noted(self: MultiHostSchedules, collective: str, nbytes: int, root: int, is_even: bool) -> Any:
            found = choose(self, collective, nbytes, root, is_even)
            names.append(found.name)
            return found

        MultiHostSchedules.choose = noted  # type: ignore[method-assign, assignment]
        group = dist.new_group()
        rank, size = dist.get_rank(), dist.get_world_size()
        for longest in (25_000, 400_000):  # elements of 8 bytes
            lengths = lambda src, dst, longest=longest: longest + dst if src in large else 3 * src + dst  # noqa: E731
            received = [torch.full((lengths(peer, rank),), -1) for peer in range(size)]
            sent = [held(10 * rank + peer, lengths(rank, peer)) for peer in range(size)]
            for _ in range(5):
                dist.all_to_all(received, sent, group=group)
            for peer, found in enumerate(received):
                equal(found, held(10 * peer + rank, lengths(peer, rank)), (rank, peer))
        dist.barrier()
        if len(large) == 1:
            assert names[0] == ("pairwise" if rank in large else "direct")

    span("a a b b", body)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_orders_of_an_exchange_have_the_same_messages(size: int) -> None:
    """One message for each pair of ranks, so that ranks that follow different orders understand each other."""
    for rank in range(size):
        found = []
        for name in ("direct", "pairwise"):
            steps = compile_program(build("all_to_all", name, size), rank).steps
            sends = sorted((each.peer, each.pieces) for step in steps for each in step.sends)
            found.append((sends, sorted((each.peer, each.pieces) for step in steps for each in step.receives)))
        assert found[0] == found[1]
        assert [peer for peer, _ in found[0][0]] == [peer for peer in range(size) if peer != rank]


@pytest.mark.parametrize("name", ["direct", "pairwise"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_part_of_an_exchange_is_the_program_of_its_rank(size: int, name: str) -> None:
    schedule = build("all_to_all", name, size)
    assert schedule.part is not None
    whole = Schedule(
        schedule.collective, schedule.algorithm, schedule.size, schedule.chunks, schedule.contract, schedule.steps
    )
    for rank in range(size):
        assert compile_program(schedule, rank) == compile_program(whole, rank)


@pytest.mark.parametrize("layout", ["a a a", "a b", "a a b b"])
def test_a_named_algorithm_runs_in_the_backend(layout: str) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        channel.Channel.start = None  # type: ignore[method-assign]  # no message of Python
        for name in ("bruck", "direct", "pairwise", "hierarchical"):
            for count in (0, 1, 5000):
                output = torch.full((count * size,), -1)
                sent = torch.cat([held(10 * rank + peer, count) for peer in range(size)])
                work = dist_prims.all_to_all(output, sent, algorithm=name, async_op=count == 1)
                if work is not None:
                    work.wait()
                equal(output, torch.cat([held(10 * peer + rank, count) for peer in range(size)]), (name, count))
        dist_prims.all_to_all(output, sent, algorithm="bruck(radix=3)")
        for name in ("direct", "pairwise"):
            exchange(lambda src, dst: 3 * src + dst, algorithm=name)
            exchange(lambda src, dst: 4000 * (src % 2), algorithm=name)

    span(layout, body)


def test_a_schedule_for_uneven_blocks_is_chosen_when_it_is_needed() -> None:
    """Each rank compiled it before its first all_to_all, which was a fifth of the processor time of that call."""

    def body() -> None:
        asked, choose = [], MultiHostSchedules.choose

        def recorded(*arguments: Any) -> RankSchedule:
            asked.append(arguments[-1])  # is_even
            return choose(*arguments)

        MultiHostSchedules.choose = recorded  # type: ignore[assignment, method-assign]
        rank, group = dist.get_rank(), dist.new_group()
        dist.all_to_all_single(torch.ones(2000), torch.ones(2000), group=group)
        assert asked == [True]
        received = torch.empty(2 * (rank + 1))
        dist.all_to_all_single(received, torch.tensor([1.0, 2, 2]), [rank + 1] * 2, [1, 2], group=group)
        assert received.tolist() == [rank + 1] * len(received)
        assert asked == [True, False]

    span("a b", body)


def test_an_interrupt_while_the_schedule_is_chosen_is_known_on_the_other_ranks() -> None:
    """They have begun the call by then, and would wait for this rank until their timeouts."""

    def body() -> None:
        def interrupted(*arguments: Any) -> RankSchedule:
            raise KeyboardInterrupt

        rank = dist.get_rank()
        if rank == 0:
            MultiHostSchedules.choose = interrupted  # type: ignore[assignment, method-assign]
        received, group = torch.empty(2 * (rank + 1)), dist.new_group()
        with pytest.raises(KeyboardInterrupt if rank == 0 else CommInterruptedError):
            dist.all_to_all_single(received, torch.ones(3), [rank + 1] * 2, [1, 2], group=group)

    span("a b", body)


@pytest.mark.parametrize("layout", ["a a a", "a b b"])
def test_mismatches_of_a_named_algorithm_are_named(layout: str) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        count = 5 if rank == 2 else 4
        with pytest.raises(MismatchError, match=rf"{4 * size} elements.*rank 2 calls.*{5 * size} elements"):
            dist_prims.all_to_all(torch.ones(count * size), torch.ones(count * size), algorithm="bruck")
        name = "pairwise" if rank == 2 else "direct"
        with pytest.raises(MismatchError, match=r"direct.*rank 2 calls.*pairwise"):
            dist_prims.all_to_all(torch.ones(size), torch.ones(size), algorithm=name)
        expected = [torch.ones(4 + (rank == 2 and peer == 0)) for peer in range(size)]
        with pytest.raises(MismatchError, match="Rank 0 sends 16 bytes to rank 2, which expects 20"):
            dist_prims.all_to_all(expected, [torch.ones(4) for _ in range(size)], algorithm="pairwise")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0] == size

    span(layout, body)


@pytest.mark.parametrize("layout", ["a a a", "a a b b"])
def test_blocks_of_different_lengths(layout: str) -> None:
    """Pins apply to unequal blocks of all_gather and reduce_scatter, and are left out in an uneven exchange."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for segments in ("", " x3"):
            pin(all_gather="ring" + segments, reduce_scatter="ring" + segments)
            counts = [7 * peer for peer in range(size)]
            blocks = [torch.full((count,), -1) for count in counts]
            dist.all_gather(blocks, held(rank, counts[rank]))
            for peer, found in enumerate(blocks):
                equal(found, held(peer, counts[peer]), ("all_gather", peer))
            output = torch.empty(counts[rank], dtype=torch.int64)
            dist.reduce_scatter(output, [held(rank, count) for count in counts])
            equal(output, summed(size, counts[rank]), "reduce_scatter")
        for pins in ({}, {"all_to_all": "bruck x2", "gather": "binomial"}):
            pin(**pins)
            # rank 0 sends and receives 4 elements of each, the others also 5 of each other: only they know it
            exchange(lambda src, dst: 4 if 0 in (src, dst) else 5)
            exchange(lambda src, dst: src * dst)
            exchange(lambda src, dst: 300)
            parts = [torch.full((peer + 1,), -1) for peer in range(size)] if rank == 1 else None
            dist.gather(held(rank, rank + 1), parts, 1)
            for peer, found in enumerate(parts or []):
                equal(found, held(peer, peer + 1), ("gather", peer))
            row = torch.zeros(size, 6, dtype=torch.int64)
            dist.all_to_all_single(row, torch.arange(6 * size).view(size, 6) + 100 * rank)
            expected = torch.stack([torch.arange(6 * rank, 6 * rank + 6) + 100 * peer for peer in range(size)])
            equal(row, expected, "all_to_all_single")
            strided = torch.zeros(6, size, dtype=torch.int64).t()
            dist.all_to_all([*strided], [*torch.arange(6 * size).view(size, 6) + 100 * rank])
            equal(strided, expected, "strided")

    span(layout, body)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["a a a", "a b b"])
def test_lengths_that_do_not_match_are_named(layout: str) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for pins in ({}, {"all_to_all": "bruck", "gather": "binomial", "scatter": "binomial"}):
            pin(**pins)
            expected = [torch.ones(4 + (rank == peer == 2)) for peer in range(size)]
            with pytest.raises(MismatchError, match="Rank 2 sends 16 bytes to rank 2, which expects 20"):
                dist.all_to_all(expected, [torch.ones(4) for _ in range(size)])
            longer = 4 + (rank == 1)  # even on every rank, and yet they differ
            with pytest.raises(MismatchError, match="Rank 0 sends 16 bytes to rank 1, which expects 20"):
                dist.all_to_all([torch.ones(longer) for _ in range(size)], [torch.ones(longer) for _ in range(size)])
            own, blocks = torch.ones(longer), [torch.ones(4) for _ in range(size)] if rank == 0 else None
            with pytest.raises(MismatchError, match="Rank 1 sends 20 bytes to rank 0, which expects 16"):
                dist.gather(own, blocks, 0)
            with pytest.raises(MismatchError, match=r"ank 1 calls scatter.*5 elements"):
                dist.scatter(own, blocks, 0)
            dist.all_to_all([torch.ones(4) for _ in range(size)], [torch.ones(4) for _ in range(size)])

    span(layout, body)
