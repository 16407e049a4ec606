"""``reconfigure`` of torch 2.15: the program gives a group other members."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of
from reconfigured import ALONE, Meeting, needs_reconfigure, newest, place, reconfigure, reconfigured, start, total
from survivors import join_at_rank_0, run_ranks

import dist_prims
from dist_prims.errors import PeerLeftError
from tests.repair.test_shrink import all_reduce_until_failure, die

pytestmark = needs_reconfigure


def test_a_group_without_members(tmp_path: Path) -> None:
    """Its calls raise, and say what is missing; rank and size are those of init_process_group."""

    def body(rank: int) -> Any:
        start(rank, 2, tmp_path)
        assert newest._supports_reconfigure()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
        ones, other = torch.ones(1), 1 - rank
        refused: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(ones),
            lambda: dist.all_reduce(ones, async_op=True),
            lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            lambda: dist_prims.all_reduce(ones),
            lambda: dist.barrier(),
            lambda: dist.monitored_barrier(),
            lambda: dist.send(ones, other),
            lambda: dist.irecv(ones, other),
            lambda: newest._new_window(),
            lambda: dist_prims.shrink(),
            lambda: dist_prims.grow(f"file://{tmp_path}/place"),
        ]
        for call in refused:
            with pytest.raises(RuntimeError, match=ALONE):
                call()
        handles = Meeting(tmp_path).handles(rank, range(2))
        reconfigure(1, handles)
        return place()

    assert run_ranks(body, 2, tmp_path, join=False) == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_have_the_order_of_the_handles(size: int, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        start(rank, size, tmp_path)
        meeting = Meeting(tmp_path)
        reconfigure(1, meeting.handles(rank, range(size))[::-1])
        assert place() == (size - 1 - rank, size, size)
        reconfigure(2, set(meeting.handles(rank, range(size))))  # in no order: by the ranks of the beginning
        return place()

    assert run_ranks(body, size, tmp_path, join=False) == [(rank, size, size) for rank in range(size)]


@pytest.mark.parametrize("excluded", [0, 1, 2])
def test_without_a_rank_that_is_alive(excluded: int, tmp_path: Path) -> None:
    """The excluded rank gets an error from the old group, whose members have changed without it."""

    def body(rank: int) -> Any:
        _, handles = reconfigured(rank, 3, tmp_path)
        assert total() == 3
        if rank == excluded:
            with pytest.raises(PeerLeftError):
                dist.all_reduce(torch.ones(1))
            return "excluded"
        reconfigure(2, [each for number, each in enumerate(handles) if number != excluded])
        return place()

    found = run_ranks(body, 3, tmp_path, join=False)
    assert found.pop(excluded) == "excluded"
    assert found == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_rank_is_replaced(dead: int, tmp_path: Path) -> None:
    """Also rank 0, whose process serves the store of the job. The group was made without enable_reconfigure."""

    def body(rank: int) -> Any:
        meeting, alive = Meeting(tmp_path), [each for each in range(4) if each != dead]
        if rank == 3:
            start(0, 1, tmp_path)
        else:
            join_at_rank_0(rank, 3, tmp_path)
            total(dist.new_group([0, 1, 2]))  # the new process has counted no group
            if rank == dead:
                die()
            all_reduce_until_failure()
        handles = dict(zip(alive, meeting.handles(rank, alive), strict=True))
        members = [3 if each == dead else each for each in range(3)]  # the new process has the place of the dead one
        reconfigure(1, [handles[each] for each in members])
        assert dist.get_rank() == members.index(rank)
        pair = dist.new_group([0, 2])  # the job has lost its store with rank 0, and the new process had another one
        if dist.get_rank() != 1:
            assert total(pair) == 2
        return total()

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found.pop(dead) == -signal.SIGKILL
    assert found == [3, 3, 3]


def test_new_ranks_are_added_and_leave(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        start(rank, 2, tmp_path) if rank < 2 else start(rank - 2, 2, tmp_path, "others")
        meeting = Meeting(tmp_path)
        handles = meeting.handles(rank, range(4))
        sums = []
        for uuid, members in enumerate(([0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 0], [0, 1, 2, 3])):
            if rank in members:
                reconfigure(uuid, [handles[each] for each in members])
                assert dist.get_rank() == members.index(rank)
                sums.append(total())
            meeting.barrier(f"step{uuid}", rank, range(4))
        return sums

    assert run_ranks(body, 4, tmp_path, join=False) == [[2, 3, 4, 2, 4], [2, 3, 4, 4], [3, 4, 4], [4, 2, 4]]


def test_groups_of_one_rank_and_of_all(tmp_path: Path) -> None:
    """Groups that exist at the same time have different uuids; then their ranks merge."""

    def body(rank: int) -> Any:
        start(rank, 3, tmp_path)
        meeting, sums = Meeting(tmp_path), []
        for step in range(3):
            own = newest._get_reconfigure_handle()
            reconfigure(10 * step + rank, [own])
            sums.append(total())
            reconfigure(10 * step + 5, meeting.handles(rank, range(3)))
            sums.append(total())
        return sums

    assert run_ranks(body, 3, tmp_path, join=False) == [[1, 3] * 3] * 3


def test_group_functions_afterwards(tmp_path: Path) -> None:
    """Global ranks are those of the new members; options and the timeout remain; messages and objects arrive."""

    def body(rank: int) -> Any:
        start(rank, 4, tmp_path, pg_options=dist_prims.BackendOptions(all_reduce="ring:1M-max"))
        handles = Meeting(tmp_path).handles(rank, range(4))
        reconfigure(1, handles)
        if rank == 1:
            return "excluded"
        reconfigure(2, handles[3:] + handles[2:3] + handles[:1], seconds=50)
        me, size = dist.get_rank(), dist.get_world_size()
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]
        backend = backend_of()
        assert backend.algorithm(1 << 20) == "ring"
        assert backend.options._timeout == timedelta(seconds=60)
        assert backend.options.global_ranks_in_group == [0, 1, 2]
        pair = dist.new_group([0, 2])
        if me in (0, 2):
            assert total(pair) == 2
        token = torch.tensor([me])
        if me == 0:
            dist.send(token, size - 1)
        elif me == size - 1:
            dist.recv(token, 0)
        dist.broadcast(token, 2)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, (me, rank))
        sparse = torch.eye(2).to_sparse()
        dist.all_reduce(sparse)
        assert sparse.to_dense()[0, 0] == 3
        dist.monitored_barrier()
        dist.destroy_process_group()
        return objects, token.item()

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found.pop(1) == "excluded"
    assert found == [([(0, 3), (1, 2), (2, 0)], 0)] * 3


def test_shrink_and_grow_afterwards(tmp_path: Path) -> None:
    """The repairs of this library work on a group that was reconfigured, and reconfigure works on a repaired one."""

    def body(rank: int) -> Any:
        start(rank, 4, tmp_path)
        meeting = Meeting(tmp_path)
        reconfigure(1, meeting.handles(rank, range(4)))
        assert dist_prims.grow(f"file://{tmp_path}/place") is dist.group.WORLD
        if rank == 0:
            die()
        all_reduce_until_failure()
        dist_prims.shrink()
        assert total() == 3
        handles = meeting.handles(rank, range(1, 4))  # of the new group object
        reconfigure(2, handles)
        assert total() == 3
        if rank == 3:
            die()
        all_reduce_until_failure()
        dist_prims.shrink()
        return place()

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found == [-signal.SIGKILL, (0, 2, 2), (1, 2, 2), -signal.SIGKILL]


def test_a_sub_group(tmp_path: Path) -> None:
    """Only that group changes. Its global ranks are known, because all members are in one default group."""

    def body(rank: int) -> Any:
        trio, pair = dist.new_group([1, 2, 3]), dist.new_group([0, 3])
        meeting = Meeting(tmp_path)
        handles = dict(enumerate(meeting.handles(rank, range(4), trio if rank else pair)))
        if rank == 0:
            return total(), total(pair)
        reconfigure(1, [handles[each] for each in (3, 1)] if rank != 2 else [handles[2]], group=trio)
        if rank != 2:
            assert dist.get_process_group_ranks(trio) == [3, 1]
            token = torch.tensor([rank])
            dist.broadcast(token, 3, group=trio)
            assert token == 3
        assert total(trio) == (1 if rank == 2 else 2)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
        return total(), total(pair) if rank == 3 else 0

    assert run_ranks(body, 4, tmp_path) == [(4, 2), (4, 0), (4, 0), (4, 2)]


def test_a_sub_group_takes_a_rank_of_another_job(tmp_path: Path) -> None:
    """Its members have no global ranks in common; ranks within the group work."""

    def body(rank: int) -> Any:
        start(rank, 2, tmp_path) if rank < 2 else start(0, 1, tmp_path, "other")
        meeting = Meeting(tmp_path)
        group = None
        if rank < 2:
            reconfigure(1, meeting.handles(rank, range(2)))
            group = dist.new_group([0, 1])
        else:
            next(meeting._numbers)
        reconfigure(2, meeting.handles(rank, range(3), group), group=group)
        found = torch.ones(1)
        dist.all_reduce(found, group=group)
        dist.broadcast(found, group_src=2, group=group)
        whole: Any = group or dist.group.WORLD
        part = whole.split_group([1, 2], group_name="part")
        if part:
            part.allreduce([found]).wait()
        return dist.get_rank(group), dist.get_world_size(group), found.item()

    assert run_ranks(body, 3, tmp_path, join=False) == [(0, 3, 3), (1, 3, 6), (2, 3, 6)]


def test_windows_of_the_old_group_raise(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        _, handles = reconfigured(rank, 2, tmp_path)
        old = newest._new_window(dist_prims.empty(4096).zero_())
        reconfigure(2, handles)
        with pytest.raises(RuntimeError, match="make a new window"):
            old.put(torch.ones(1), 0, 0, False)
        with pytest.raises(RuntimeError, match="make a new window"):
            old.signal(1 - rank, False)
        tensor = dist_prims.empty(4096).zero_()
        new = newest._new_window(tensor)
        new.put(torch.ones(1), 1 - rank, 0, False)
        new.signal(1 - rank, False)
        new.wait_signal(1 - rank, False)
        return tensor[0].item()

    assert run_ranks(body, 2, tmp_path, join=False) == [1, 1]


def test_nothing_is_left_of_the_old_groups(tmp_path: Path) -> None:
    """Descriptors, mappings and threads, after many calls; each takes less than a second."""

    def body(rank: int) -> Any:
        start(rank, 3, tmp_path)
        handles = Meeting(tmp_path).handles(rank, range(3))

        def used() -> tuple[int, int, int]:
            maps = Path("/proc/self/maps").read_text()
            return len(os.listdir("/proc/self/fd")), maps.count("memfd"), len(os.listdir("/proc/self/task"))

        found = []
        for uuid in range(12):
            reconfigure(uuid, handles)
            assert total() == 3
            found.append(used())
        return found[2], found[-1]

    for before, after in run_ranks(body, 3, tmp_path, join=False):
        assert after[0] <= before[0] + 2, (before, after)
        assert after[1] <= before[1], (before, after)
        assert after[2] <= before[2] + 1, (before, after)
