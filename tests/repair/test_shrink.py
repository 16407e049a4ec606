"""shrink() with real processes: deaths, stops, further deaths meanwhile, sub-groups, and what the old group leaves."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of
from survivors import join_at_rank_0, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from transports import require

import dist_prims
from dist_prims.errors import CommError, LeftOutError, PeerLeftError
from dist_prims.repair.registers import SharedRegisters

LIMIT = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def all_reduce_until_failure(tensor: torch.Tensor | None = None, group: dist.ProcessGroup | None = None) -> None:
    tensor = torch.ones(1000) if tensor is None else tensor

    def work() -> None:
        while True:
            dist.all_reduce(tensor.fill_(1), group=group)

    with pytest.raises(CommError):
        work()


def lose(dies: bool) -> None:
    """This rank dies, or works until it learns that another one has died."""
    if dies:
        die()
    all_reduce_until_failure()


def total(group: dist.ProcessGroup | None = None) -> float:
    """The sum of 1 over all ranks, after a collective of each kind that needs every rank."""
    dist.barrier(group)
    small, large = torch.ones(1), torch.ones(300_000)
    dist.all_reduce(small, group=group)
    dist.all_reduce(large, group=group)
    assert (large == small).all()
    return small.item()


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("layout", "dead", "transport"),
    [
        ("aa", {0}, "tcp"),
        ("aa", {1}, "tcp"),
        ("aaaa", {1, 3}, "tcp"),
        ("aaaa", {0, 1, 2}, "tcp"),
        ("aaaaaaa", {0, 4, 5}, "tcp"),
        ("ab", {1}, "tcp"),
        ("abab", {1}, "tcp"),
        ("abcd", {0}, "tcp"),
        ("abcd", {3}, "ucx"),
        ("aabb", {0}, "tcp"),
        ("aabb", {2, 3}, "ucx"),
        ("aabbc", {0, 1}, "tcp"),
        ("aaabc", {0, 1, 2}, "tcp"),
    ],
)
def test_the_survivors_go_on(
    layout: str, dead: set[int], transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without rank 0, which serves the store of the job. A letter of the layout is the host of a rank."""
    require(transport)
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", transport)

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, len(layout), tmp_path)
        total()
        lose(rank in dead)
        assert dist_prims.shrink() is dist.group.WORLD
        found = dist.get_rank(), dist.get_world_size(), total()
        backend = backend_of()
        assert not backend.spans_hosts or backend.transport == transport
        assert total(dist_prims.shrink()) == found[2], "a repaired group can be repaired"
        dist.barrier()  # rank 0 serves the store
        return found

    found = run_ranks(body, len(layout), tmp_path, join=False)
    left = [outcome for rank, outcome in enumerate(found) if rank not in dead]
    assert left == [(place, len(left), float(len(left))) for place in range(len(left))]
    assert all(found[rank] == -signal.SIGKILL for rank in dead)


def test_group_functions_after_shrink(tmp_path: Path) -> None:
    """new_group, split_group and messages work, and global ranks are those of the new default group."""

    def body(rank: int) -> Any:
        join_at_rank_0(rank, 4, tmp_path)
        lose(rank == 0)
        dist_prims.shrink()
        me, size = dist.get_rank(), dist.get_world_size()
        pair = dist.new_group([0, 2])
        found = [dist.get_process_group_ranks(dist.group.WORLD), dist.get_backend()]
        if me in (0, 2):
            assert total(pair) == 2
        rest = dist.group.WORLD.split_group([1, 2])
        if me in (1, 2):
            assert total(rest) == 2
        token = torch.tensor([me])
        if me == 0:
            dist.send(token, size - 1)
        elif me == size - 1:
            dist.recv(token, 0)
        dist.broadcast(token, 2)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, me)
        dist.destroy_process_group()
        return found, token.item(), objects

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found[1:] == [([[0, 1, 2], "dist_prims"], 0, [0, 1, 2])] * 3


def test_one_failure_after_another(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        join_at_rank_0(rank, 5, tmp_path)
        sums = []
        for victim in range(4):
            lose(rank == victim)
            sums.append(total(dist_prims.shrink()))
        return sums

    assert run_ranks(body, 5, tmp_path, join=False)[4] == [4, 3, 2, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6, 7, 4])  # the default tier has the first and the last
def test_a_rank_dies_while_the_survivors_agree(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member, which serves the store of the next group, dies at each of its requests."""
    attempt = importlib.import_module("dist_prims.repair.repair_attempt").RepairAttempt
    perform: Callable[..., Any] = attempt._perform

    def body(rank: int) -> Any:
        left = iter(range(place))

        def dying(self: Any, request: Any) -> Any:
            if rank == 0 and next(left, None) is None:
                die()
            return perform(self, request)

        monkeypatch.setattr(attempt, "_perform", dying)
        join_at_rank_0(rank, 4, tmp_path)
        lose(rank == 3)
        group = dist_prims.shrink()
        try:
            return total(group)
        except CommError:  # rank 0 has died after all had made the group
            return total(dist_prims.shrink())

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found in ([-signal.SIGKILL, 2, 2, -signal.SIGKILL], [3, 3, 3, -signal.SIGKILL])
    assert place > 2 or found[0] == -signal.SIGKILL


def test_a_stopped_rank_is_left_out(tmp_path: Path) -> None:
    """It wakes after the others have gone on: it gets an error, and their sums and its memory remain right."""

    def body(rank: int) -> Any:
        shared = dist_prims.empty(200_000).fill_(1)
        dist.all_reduce(shared)
        pid = torch.zeros(3, dtype=torch.int64)
        pid[rank] = os.getpid()
        dist.all_reduce(pid)
        if rank == 2:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        all_reduce_until_failure(shared)
        if rank == 2:
            with pytest.raises(LeftOutError, match=r"rank 2: the ranks \[0, 1\] have gone on without this rank"):
                dist_prims.shrink()
            return "left out"
        dist_prims.shrink()
        again = dist_prims.empty(200_000)
        for step in range(200):
            if step == 20 and dist.get_rank() == 0:
                os.kill(int(pid[2]), signal.SIGCONT)
            for tensor in (shared, again):
                dist.all_reduce(tensor.fill_(1))
                assert (tensor == 2).all()
        return "went on"

    found = run_ranks(body, 3, tmp_path, group_timeout=2)
    assert found == ["went on", "went on", "left out"]


def test_a_rank_that_computes_is_waited_for(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            die()
        if rank == 1:
            time.sleep(0.7)
        all_reduce_until_failure()
        return total(dist_prims.shrink())

    assert run_ranks(body, 3, tmp_path)[1:] == [2, 2]


def test_a_rank_that_does_not_call_is_left_out_after_the_timeout(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        lose(rank == 0)
        if rank == 1:
            wait_until((tmp_path / "gone on").exists)
            with pytest.raises(LeftOutError):
                dist_prims.shrink()
            return "left out"
        group = dist_prims.shrink(timeout=0.5)
        (tmp_path / "gone on").touch()
        return total(group)

    assert run_ranks(body, 3, tmp_path)[1:] == ["left out", 1]


def test_a_group_without_failure(tmp_path: Path) -> None:
    """All ranks remain; a call that has not ended raises."""

    def body(rank: int) -> Any:
        pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        dist_prims.shrink()
        if pending:
            with pytest.raises(PeerLeftError):
                pending.wait()
        return total()

    assert run_ranks(body, 3, tmp_path) == [3, 3, 3]


def test_only_a_sub_group_is_replaced(tmp_path: Path) -> None:
    """It can be split. Rank 1, which is dead, was once taken for the second member of the part."""

    def body(rank: int) -> Any:
        trio = dist.new_group([1, 2, 3], timeout=timedelta(seconds=20))
        other = dist.new_group([0, 2, 3])
        if rank == 1:
            die()
        if rank == 0:
            return total(other)
        with pytest.raises(CommError):
            dist.all_reduce(torch.ones(1), group=trio)
        pair: Any = dist_prims.shrink(trio)
        assert dist.get_process_group_ranks(pair) == [2, 3]
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
        found = torch.tensor([rank])
        dist.broadcast(found, 3, group=pair)
        assert found == 3
        assert total(pair) == 2
        part = pair.split_group([0, 1], timeout=timedelta(seconds=60), group_name="part")
        part.allreduce([found]).wait()
        assert found == 6
        return total(other)

    assert run_ranks(body, 4, tmp_path)[2:] == [3, 3]


@pytest.mark.parametrize("layout", ["aaaa", "abab"])
def test_a_rank_that_waits_for_a_survivor_in_another_group_takes_part(layout: str, tmp_path: Path) -> None:
    """In a mesh rank 0 shared only the default group with the dead rank 3. Rank 0 waited in its row for rank 1, which
    waited in shrink() for rank 0, and left it out."""

    def body(rank: int) -> float:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, 4, tmp_path)
        mesh = init_device_mesh("cpu", (2, 2))
        column, row = mesh.get_group(0), mesh.get_group(1)
        total(row)
        if rank == 3:
            die()
        with pytest.raises(CommError):
            print(total(column), total(row))
        dist_prims.shrink(timeout=10)
        return total()

    assert run_ranks(body, 4, tmp_path, join=False)[:3] == [3, 3, 3]


def test_options_pins_and_the_timeout_remain(tmp_path: Path) -> None:
    """The group that the second call made once had the timeout of the first call."""

    def body(rank: int) -> Any:
        join_at_rank_0(rank, 3, tmp_path)
        options = dist_prims.BackendOptions(all_reduce="ring:1M-max")
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=7), pg_options=options)
        if rank == 2:
            die()
        all_reduce_until_failure(group=group)
        for _ in range(2):
            group = dist_prims.shrink(group, timeout=20)
        backend = backend_of(group)
        return backend.algorithm(1 << 20), backend.options._timeout.total_seconds(), total(group)

    assert run_ranks(body, 3, tmp_path, join=False)[:2] == [("ring", 7, 2), ("ring", 7, 2)]


def test_other_backends_are_refused() -> None:
    def body() -> str:
        with pytest.raises(TypeError, match="only groups of the backend dist_prims alone can be repaired"):
            dist_prims.shrink()
        return "refused"

    assert dist_prims.spawn(body, 2, backend="gloo", timeout=60) == ["refused", "refused"]


def test_nothing_is_left_of_the_old_group(tmp_path: Path) -> None:
    """Descriptors and mappings, after the survivors have formed a group several times."""

    def body(rank: int) -> Any:
        lose(rank == 1)
        dist_prims.shrink()
        total()

        def used() -> tuple[int, int]:
            maps = Path("/proc/self/maps").read_text()
            return len(os.listdir("/proc/self/fd")), maps.count("memfd")

        dist_prims.shrink()
        total()
        before = used()
        for _ in range(5):
            dist_prims.shrink()
            total()
        return before, used()

    for before, after in run_ranks(body, 3, tmp_path)[::2]:
        assert after[1] <= before[1]
        assert after[0] <= before[0] + 2, (before, after)


def test_names_of_repaired_groups_are_their_own(tmp_path: Path) -> None:
    """torch counts the groups from 0 again after a repair. The default group and a later group "0" once both became
    "0.1", and the second repair failed."""

    def body(rank: int) -> Any:
        lose(rank == 3)
        dist_prims.shrink()
        default = dist.group.WORLD
        assert default is not None
        other = dist_prims.shrink(dist.new_group([0, 1, 2]))
        assert other.group_name != default.group_name
        return total(), total(other)

    assert run_ranks(body, 4, tmp_path) == [(3, 3)] * 3 + [-signal.SIGKILL]


def test_a_full_log_says_what_to_do_once() -> None:
    """The error once gave two remedies: of the log, and of the agreement that writes into it."""

    def body() -> str:
        registers = SharedRegisters(backend_of(), "agreement")

        def fill() -> None:
            while True:
                registers.announce("x" * 1000)

        with pytest.raises(CommError) as caught:
            fill()
        return str(caught.value)

    (error,) = dist_prims.spawn(body, 1, backend="dist_prims", timeout=60)
    assert re.fullmatch(
        r"the group cannot be repaired any more: rank 0: [^;]*; end the processes and start the group again", error
    )
