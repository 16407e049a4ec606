"""torch's own ways to a smaller group: ``shrink_group``, with its flags, and ``abort``; while ranks live or have died.

The scenarios are those of PyTorch's tests of ``shrink_group``, which need NCCL, and some more.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import run_ranks

import dist_prims
from dist_prims.errors import CommError, PeerLeftError
from dist_prims.torch_compat import default_group
from tests.repair.test_shrink import all_reduce_until_failure, die, lose, total, wait_until

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1  # torch's flags
TIMEOUT = timedelta(seconds=60)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("excluded", "flags"),
    [
        ({0}, SHRINK_DEFAULT),
        ({3}, SHRINK_ABORT),
        ({1, 2}, SHRINK_ABORT),
        ({0, 2, 3}, SHRINK_DEFAULT),
    ],
)
def test_torch_shrink_group_while_all_ranks_live(excluded: set[int], flags: int, tmp_path: Path) -> None:
    """An excluded rank need not call; if it does, torch refuses. Its calls in the old group and its end do no harm."""

    def body(rank: int) -> Any:
        assert total() == 4
        if rank in excluded:
            with pytest.raises(RuntimeError, match="excluded"):
                dist.distributed_c10d.shrink_group(sorted(excluded), shrink_flags=flags)
            if rank % 2:
                with pytest.raises(PeerLeftError):
                    dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            return "excluded"
        group = dist.distributed_c10d.shrink_group(sorted(excluded), shrink_flags=flags)
        assert group is dist.group.WORLD
        return dist.get_rank(), dist.get_world_size(), total()

    found = run_ranks(body, 4, tmp_path)
    assert all(found[rank] == "excluded" for rank in excluded)
    left = [each for rank, each in enumerate(found) if rank not in excluded]
    assert left == [(place, len(left), len(left)) for place in range(len(left))]


def test_torch_shrink_group_refuses_other_options(tmp_path: Path) -> None:
    """The group goes on."""

    def body(rank: int) -> Any:
        group: Any = dist.group.WORLD
        options = group._get_backend(torch.device("cpu")).options
        with pytest.raises(ValueError, match="a shrunk group of this backend has the options of the"):
            dist.distributed_c10d.shrink_group([(rank + 1) % 3], pg_options=options)
        return total()

    assert run_ranks(body, 3, tmp_path) == [3, 3, 3]


def test_torch_shrink_group_aborts_what_has_not_ended(tmp_path: Path) -> None:
    """A call that only some ranks have made, and a message without a partner, raise."""

    def body(rank: int) -> Any:
        total()
        pending: list[Any] = []
        if rank == 0:
            pending = [dist.all_reduce(torch.ones(1), async_op=True), dist.irecv(torch.ones(1), 2)]
        if rank == 3:
            return "excluded"
        dist.distributed_c10d.shrink_group([3], shrink_flags=SHRINK_ABORT)
        for work in pending:
            with pytest.raises(CommError):
                work.wait()
        return total()

    assert run_ranks(body, 4, tmp_path) == [3, 3, 3, "excluded"]


@pytest.mark.parametrize("dies", [False, True])
def test_torch_shrink_group_twice_in_a_row(dies: bool, tmp_path: Path) -> None:
    """The last rank is excluded, then that of the new group, until one is left; timeout and options remain."""

    def body(rank: int) -> Any:
        for size in (4, 3, 2, 1):
            assert (dist.get_rank(), dist.get_world_size(), total()) == (rank, size, size)
            group: Any = dist.group.WORLD
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 60
            if rank == size - 1 or size == 1:
                if dies:
                    die()
                return size
            if dies:
                all_reduce_until_failure()
            dist.shrink_group([size - 1], group=group)
        return None

    assert run_ranks(body, 4, tmp_path) == ([-signal.SIGKILL] * 4 if dies else [1, 2, 3, 4])


def test_repairs_after_torch_shrink_group(tmp_path: Path) -> None:
    """torch has given the group another name than its backend has; ``shrink`` and ``grow`` once raised KeyError."""

    def body(rank: int) -> Any:
        total()
        if rank == 3:
            return "excluded"
        dist.distributed_c10d.shrink_group([3])
        assert dist_prims.grow(f"file://{tmp_path}/place") is dist.group.WORLD
        assert total() == 3
        lose(rank == 1)
        dist_prims.shrink()
        return dist.get_rank(), total(), total(dist.new_group([0, 1]))

    assert run_ranks(body, 4, tmp_path) == [(0, 2, 2), -signal.SIGKILL, (1, 2, 2), "excluded"]


def test_torch_shrink_group_of_sub_groups(tmp_path: Path) -> None:
    """Ranks to exclude are those within the group. Other groups go on, until the default group is shrunk."""

    def body(rank: int) -> Any:
        trio, others = dist.new_group([1, 2, 3]), dist.new_group([0, 1, 2, 3])
        if rank in (1, 3):
            smaller: Any = dist.shrink_group([1], group=trio)
            assert (smaller.rank(), smaller.size()) == (rank // 2, 2)
            found = torch.tensor([rank])
            smaller.allreduce([found]).wait()
            assert found == 4
        assert total(others) == 4
        assert total() == 4
        if rank == 3:
            return "excluded"
        dist.shrink_group([3])
        assert not dist.distributed_c10d._world.pg_names.get(others)
        return total(), total(dist.new_group([0, 1, 2]))

    assert run_ranks(body, 4, tmp_path) == [(3, 3)] * 3 + ["excluded"]


def test_abort_and_a_new_default_group(tmp_path: Path) -> None:
    """The way to a smaller group without shrink: all survivors abort, and make a group at another place."""

    def body(rank: int) -> Any:
        groups = [dist.new_group([0, 1, 2, 3]) for _ in range(3)]
        if rank == 1:
            die()
        with pytest.raises(CommError):
            total(groups[0])
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()
        new = [0, 2, 3].index(rank)
        dist.init_process_group("dist_prims", init_method=f"file://{tmp_path}/again", rank=new, world_size=3)
        return dist.get_rank(), total()

    assert run_ranks(body, 4, tmp_path) == [(0, 3), -signal.SIGKILL, (1, 3), (2, 3)]


def test_abort_from_another_thread(tmp_path: Path) -> None:
    """A watchdog ends a collective that waits for a rank without a deadline in sight; the others learn it."""

    def body(rank: int) -> Any:
        total()
        if rank == 2:
            wait_until((tmp_path / "aborted").exists)
            with pytest.raises(CommError):
                dist.barrier()
            return "late"
        began = time.monotonic()
        group = default_group()
        if rank == 0:
            threading.Timer(0.3, dist.distributed_c10d._abort_process_group).start()
        # dist.barrier() logs an error with the name of the default group, which may have gone by then.
        with pytest.raises((CommError, RuntimeError)):
            group.barrier().wait()
        assert time.monotonic() - began < 20
        (tmp_path / "aborted").touch()
        return "aborted"

    assert run_ranks(body, 3, tmp_path) == ["aborted", "aborted", "late"]


def test_abort_leaves_other_groups_usable(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        group = dist.new_group([0, 1, 2])
        assert total(group) == 3
        group.abort()
        with pytest.raises(RuntimeError, match="the group has been destroyed"):
            dist.all_reduce(torch.ones(1), group=group)
        return total()

    assert run_ranks(body, 3, tmp_path) == [3, 3, 3]


def test_shrink_after_a_refused_shrink_group(tmp_path: Path) -> None:
    """``shrink_group`` with too few excluded ranks makes no group, and its error advises to call ``shrink``."""

    def body(rank: int) -> Any:
        lose(rank >= 2)
        with pytest.raises(
            CommError, match=r"of the ranks \[0, 1, 2\] that are not excluded only \[0, 1\] are left; call"
        ):
            dist.distributed_c10d.shrink_group([3])
        dist_prims.shrink()
        return total()

    assert run_ranks(body, 4, tmp_path) == [2, 2, -signal.SIGKILL, -signal.SIGKILL]


def test_torch_shrink_of_a_merged_group(tmp_path: Path) -> None:
    """It raised IndexError: a merged group has no global ranks. Its ranks have the order of the calls."""

    def body(rank: int) -> Any:
        world: Any = dist.group.WORLD
        part = world.split_group([0] if rank == 0 else [1, 2], group_name=f"part {min(rank, 1)}")
        merged = part.merge_remote_group(dist.PrefixStore("merged", world.get_group_store()), 3, TIMEOUT)
        if merged.rank() == 2:
            return 0
        shrunk = merged._get_backend(torch.device("cpu")).shrink([2], SHRINK_DEFAULT, None)
        ones = torch.ones(1)
        shrunk.allreduce([ones]).wait()
        return ones.item()

    assert sorted(run_ranks(body, 3, tmp_path)) == [0, 2, 2]
