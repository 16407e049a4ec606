"""Groups made from groups: ProcessGroup.split_group and ProcessGroup.merge_remote_group."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, span
from torch._C._distributed_c10d import Backend, ErrorType

import dist_prims

LIMIT = timedelta(seconds=30)
SHORT = timedelta(seconds=1)


def world_group() -> Any:
    """The default group; torch's annotations know no str as a name of a group."""
    return dist.group.WORLD


def total(group: Any, value: int) -> int:
    """The sum of each rank's value over a group."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_halves_work_while_the_parent_does(size: int) -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        halves = [list(range(size // 2)), list(range(size // 2, size))]  # of 1 and 2 ranks for a size of 3
        mine = halves[rank >= size // 2]
        half = world.split_group(mine, timeout=LIMIT)
        assert (half.rank(), half.size()) == (mine.index(rank), len(mine))
        in_parent, in_half = torch.full((1000,), rank), torch.full((1000,), rank)
        works = [dist.all_reduce(in_parent, async_op=True), dist.all_reduce(in_half, group=half, async_op=True)]
        assert total(half, rank) == sum(mine)
        for algorithm in (None, "ring"):  # a direct call raised KeyError: torch does not list the group
            direct = torch.tensor([rank])
            dist_prims.all_reduce(direct, group=half, algorithm=algorithm)
            assert direct.item() == sum(mine)
        for work in works:
            work.wait()
        assert in_parent.eq(sum(range(size))).all()
        assert in_half.eq(sum(mine)).all()

    dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


def test_a_split_of_a_split_and_the_same_split_again() -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        for _ in range(2):  # torch gives both the same name
            group, members = world, list(range(4))
            while len(members) > 1:
                upper = members.index(rank) >= len(members) // 2
                places = range(len(members))[len(members) // 2 :] if upper else range(len(members) // 2)
                group, members = group.split_group(list(places), timeout=LIMIT), [members[each] for each in places]
                assert total(group, rank) == sum(members)

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=60)


def test_ranks_outside_get_none_and_need_not_call() -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        if rank == 2:
            assert world.split_group([0, 1]) is None
        elif rank < 2:
            assert total(world.split_group([0, 1]), 1) == 2

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=60)


def test_the_timeout_is_that_of_the_split_and_leaves_the_parents() -> None:
    def body() -> None:
        world = world_group()
        cpu = torch.device("cpu")
        before = world._get_backend(cpu).options._timeout
        half = world.split_group([0, 1], timeout=SHORT, group_name="short")
        assert half.group_name == "short"
        assert half._get_backend(cpu).options._timeout == SHORT
        assert world._get_backend(cpu).options._timeout == before
        assert world.group_name != "short"
        if dist.get_rank() == 0:
            start = time.monotonic()
            with pytest.raises(dist_prims.CommTimeoutError):
                half.allreduce([torch.ones(1)]).wait()
            assert time.monotonic() - start < 20
        dist.barrier()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize(
    ("ranks", "error"), [([0, 2], "rank 2 is not in a group of 2"), ([-1, 0], "rank -1"), ([0, 0], "duplicate")]
)
def test_bad_ranks_raise_before_anything_is_sent(ranks: list[int], error: str) -> None:
    def body() -> None:
        if dist.get_rank() == 0:  # the other rank does not call
            with pytest.raises((ValueError, RuntimeError), match=error):
                world_group().split_group(ranks, timeout=LIMIT)
        dist.barrier()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_ranks_that_disagree_get_an_error() -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        start = time.monotonic()
        with pytest.raises(ValueError, match="ranks disagree"):  # the same size
            world.split_group([0, 2] if rank == 0 else [1, 2], timeout=LIMIT, group_name="one")
        assert time.monotonic() - start < 20

    def sizes() -> None:
        rank, world = dist.get_rank(), world_group()
        start = time.monotonic()
        with pytest.raises((ValueError, RuntimeError, TimeoutError)):
            world.split_group([[0, 1], [0, 1, 2]][rank], timeout=SHORT, group_name="two")
        assert time.monotonic() - start < 20

    dist_prims.spawn(lambda: sizes() if dist.get_rank() < 2 else None, 3, backend="dist_prims", timeout=60)
    dist_prims.spawn(lambda: body() if dist.get_rank() != 1 else None, 3, backend="dist_prims", timeout=60)


def test_a_group_that_spans_hosts_splits() -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        across = world.split_group([0, 2] if rank % 2 == 0 else [1, 3], timeout=LIMIT)
        within = world.split_group([0, 1] if rank < 2 else [2, 3], timeout=LIMIT)
        cpu = torch.device("cpu")
        assert across._get_backend(cpu).spans_hosts
        assert not within._get_backend(cpu).spans_hosts
        assert total(across, rank) == (2 if rank % 2 == 0 else 4)
        assert total(within, rank) == (1 if rank < 2 else 5)

    span("a a b b", body)


@pytest.mark.parametrize("layout", ["a a a", "a a b"])
def test_two_groups_merge(layout: str) -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        part = world.split_group([0] if rank == 0 else [1, 2], timeout=LIMIT)
        store = dist.PrefixStore("merged", world.get_group_store())
        merged = part.merge_remote_group(store, 3, LIMIT, group_name="merged")
        assert merged.size() == 3
        assert total(merged, rank) == 3
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([merged.rank()]), group=merged)
        assert [int(each) for each in gathered] == [0, 1, 2]
        again = merged.split_group([0, 2], timeout=LIMIT)
        if merged.rank() != 1:
            assert total(again, 1) == 2
        else:
            assert again is None

    if len(set(layout.split())) > 1:
        span(layout, body)
    else:
        dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)


def test_a_merged_group_may_have_a_name_of_its_own_on_each_rank() -> None:
    """torch derives the name from that of each part, so the codes of the handshake cannot contain it."""

    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        part = world.split_group([rank], timeout=LIMIT, group_name=f"part {rank}")
        merged = part.merge_remote_group(dist.PrefixStore("merged", world.get_group_store()), 2, LIMIT)
        assert str(rank) in merged.group_name
        assert total(merged, rank) == 1

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_a_merge_with_too_many_calls_or_too_few_fails() -> None:
    def body() -> None:
        rank, world = dist.get_rank(), world_group()
        store = world.get_group_store()
        dist_group = world.split_group([rank], timeout=LIMIT)
        with pytest.raises((RuntimeError, TimeoutError, dist_prims.CommTimeoutError)):
            dist_group.merge_remote_group(dist.PrefixStore("few", store), 3, SHORT)  # there are two ranks
        full = dist.PrefixStore("full", store)
        full.add("mergeGroupRank", 2)
        with pytest.raises(ValueError, match="for a group of 2"):
            dist_group.merge_remote_group(full, 2, LIMIT)

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_the_function_split_group() -> None:
    def body() -> None:
        if torch.__version__ < "2.14":  # it refuses a host without an accelerator
            with pytest.raises(RuntimeError, match="No device associated"):
                dist.split_group(split_ranks=[[0, 1], [2]])
            return
        rank = dist.get_rank()
        part = dist.split_group(split_ranks=[[0, 1], [2]])
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=part)
        assert int(tensor) == (1 if rank < 2 else 2)
        assert dist.get_process_group_ranks(part) == ([0, 1] if rank < 2 else [2])

    dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)


def test_new_group_needs_no_call_of_the_ranks_outside() -> None:
    """torch calls perform_nocolor_split on them for a backend that supports splitting, if the world has a device."""

    def body() -> None:
        backend_of().perform_nocolor_split(torch.device("cpu"))

    dist_prims.spawn(body, 1, backend="dist_prims", timeout=60)


@pytest.mark.skipif(not hasattr(Backend, "get_error"), reason="this torch has get_error for NCCL only")
def test_get_error() -> None:
    def body() -> None:
        group = dist.new_group(timeout=SHORT)
        backend = group._get_backend(torch.device("cpu"))
        assert backend.get_error() == ErrorType.SUCCESS
        if dist.get_rank() == 0:
            with pytest.raises(dist_prims.CommTimeoutError):
                group.allreduce([torch.ones(1)]).wait()
            assert backend.get_error() == ErrorType.TIMEOUT
        dist.barrier()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.skipif(not hasattr(Backend, "register_abort_hook"), reason="this torch has no abort hooks")
def test_abort_hooks_run_when_the_group_ends_by_a_failure() -> None:
    def body() -> None:
        group = dist.new_group(timeout=SHORT)
        backend = group._get_backend(torch.device("cpu"))
        calls: list[int] = []

        def fail() -> None:
            raise ZeroDivisionError

        for number, hook in enumerate(
            [lambda: calls.append(0), fail, lambda: calls.append(2), lambda: calls.append(3)]
        ):
            backend.register_abort_hook(number, hook)
        with pytest.raises(ValueError, match="abort hook 2 is registered already"):
            backend.register_abort_hook(2, fail)
        backend.unregister_abort_hook(3)
        with pytest.raises(ValueError, match="there is no abort hook 3"):
            backend.unregister_abort_hook(3)
        with pytest.raises(dist_prims.MismatchError):  # ends no group
            group.allreduce([torch.ones(1 + dist.get_rank())]).wait()
        assert calls == []
        if dist.get_rank() == 0:
            with pytest.raises(dist_prims.CommTimeoutError):
                group.allreduce([torch.ones(1)]).wait()
            assert calls == [0, 2]
        dist.barrier()

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="this torch has no gather_single")
def test_gather_single() -> None:
    def body() -> None:
        rank = dist.get_rank()
        output = torch.zeros(6, dtype=torch.int64) if rank == 1 else None
        dist.gather_single(torch.tensor([rank, 10]), output, dst=1)  # type: ignore[attr-defined]
        if output is not None:
            assert output.tolist() == [0, 10, 1, 10, 2, 10]

    dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)
