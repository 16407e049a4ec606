"""shrink() of groups that span hosts: deaths of ranks and of whole hosts, and a quorum that is lost."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import join_at_rank_0, run_ranks

import dist_prims
from dist_prims.errors import CommError
from tests.repair.test_shrink import all_reduce_until_failure, die, lose, total, wait_until


@pytest.mark.parametrize("layout", ["aaaaa", "abcde"])
def test_a_rank_dies_as_it_makes_the_group(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for the timeout of 100 s: they see the exit of its process, or, on other hosts, that its
    address refuses connections, although it has announced itself before."""
    attempt = importlib.import_module("dist_prims.repair.repair_attempt").RepairAttempt

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, 5, tmp_path)
        total()
        lose(rank == 4)
        if rank == 2:
            monkeypatch.setattr(attempt, "_make_group", lambda *_: die())
        began = time.monotonic()
        dist_prims.shrink(timeout=100)
        assert time.monotonic() - began < 50
        found = total()
        dist.barrier()  # rank 0 serves the store
        return found

    assert run_ranks(body, 5, tmp_path, join=False) == [3, 3, -signal.SIGKILL, 3, -signal.SIGKILL]


@pytest.mark.parametrize("layout", ["aaaaa", "abcde"])
def test_the_rank_that_serves_the_store_dies_as_the_others_connect(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCPStore tries for 6 s, here for 100 s, to connect to a process that has ended, and no rank looked for deaths
    meanwhile: one of several tries of ``shrink`` took 6 to 9 s instead of 0.2 s."""
    served = importlib.import_module("dist_prims.rendezvous.served")
    connect: Callable[..., Any] = served.connect

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, 5, tmp_path)
        total()
        server = torch.tensor(os.getpid())
        dist.broadcast(server, 0)
        lose(rank == 4)

        def connect_after_death(address: str, port: int, *more: Any) -> Any:
            monkeypatch.setattr(served, "connect", connect)
            (tmp_path / f"connects.{rank}").touch()
            wait_until(lambda: len([*tmp_path.glob("connects.*")]) == 3)
            os.kill(int(server), signal.SIGKILL)
            place = f"{address}:{port}"
            wait_until(lambda: served.answers([place], 1) == {place: False})
            return connect(address, port, *more)

        if rank in (1, 2, 3):
            monkeypatch.setattr(served, "_FIRST_ATTEMPT", 100)
            monkeypatch.setattr(served, "connect", connect_after_death)
        began = time.monotonic()
        dist_prims.shrink(timeout=100)
        assert time.monotonic() - began < 50
        found = total()
        dist.barrier()  # the first of the ranks that are left serves the store
        return found

    assert run_ranks(body, 5, tmp_path, join=False) == [-signal.SIGKILL, 3, 3, 3, -signal.SIGKILL]


@pytest.mark.parametrize("phase", ["_look", "_make_group"])
@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_a_rank_that_was_interrupted_in_shrink_is_not_waited_for(
    layout: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others waited for it twice as long as their timeout, here 100 s: once to make a group with it, and once for
    its entry into the next round. Its process lives on, so only the rank itself can tell that it is gone."""
    attempt = importlib.import_module("dist_prims.repair.repair_attempt").RepairAttempt
    perform: Callable[..., Any] = getattr(attempt, phase)

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, 3, tmp_path)
        total()

        def interrupted(self: Any, *arguments: Any) -> Any:
            if arguments[0]:  # a further look, after this rank has announced itself, or the members
                signal.raise_signal(signal.SIGINT)
            return perform(self, *arguments)

        if rank == 1:
            monkeypatch.setattr(attempt, phase, interrupted)
            with pytest.raises(KeyboardInterrupt):
                dist_prims.shrink()
            return "interrupted"
        if rank == 2 and phase == "_look":
            time.sleep(0.5)
        began = time.monotonic()
        group = dist_prims.shrink(timeout=100)
        assert time.monotonic() - began < 50
        found = total(group)
        dist.barrier()  # rank 0 serves the store
        return found

    assert run_ranks(body, 3, tmp_path, join=False) == [2, "interrupted", 2]


@pytest.mark.parametrize("layout", ["abc", "aab"])
def test_one_rank_alone_has_an_error(layout: str, tmp_path: Path) -> None:
    """The ranks of other hosts waited for it until their timeouts, and it had gone on without them before."""

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, 3, tmp_path)
        total()
        if rank != 1:
            with pytest.raises(CommError, match=r"rank 1 .*has left the group"):
                total()
        dist_prims.shrink(timeout=10)
        found = total()
        dist.barrier()  # rank 0 serves the store
        return found

    assert run_ranks(body, 3, tmp_path, join=False) == [3, 3, 3]


@pytest.mark.slow
def test_a_pause_of_most_servers(tmp_path: Path) -> None:
    """Servers of registers that do not answer for 2.5 s are not lost."""

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = "abcc"[rank]
        join_at_rank_0(rank, 4, tmp_path)
        total()
        lose(rank == 3)
        if rank < 2:
            subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        dist_prims.shrink(timeout=100)
        found = total()
        dist.barrier()
        return found

    assert run_ranks(body, 4, tmp_path, join=False) == [3, 3, 3, -signal.SIGKILL]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "dead"), [("ab", {0}), ("aabb", {0, 1}), ("abc", {0, 1})])
def test_without_a_majority_the_survivors_raise(layout: str, dead: set[int], tmp_path: Path) -> None:
    """The ranks that serve the stores of the quorum are lost: the survivors cannot know that others do not go on."""

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        join_at_rank_0(rank, len(layout), tmp_path)
        total()
        lose(rank in dead)
        began = time.monotonic()
        with pytest.raises(CommError, match=rf"rank {rank}: this rank cannot reach a majority of the ranks \["):
            dist_prims.shrink()
        assert time.monotonic() - began < 20
        return "no majority"

    found = run_ranks(body, len(layout), tmp_path, join=False)
    assert [outcome for rank, outcome in enumerate(found) if rank not in dead] == ["no majority"] * (
        len(layout) - len(dead)
    )


@pytest.mark.slow
def test_a_stopped_rank_of_another_host_is_left_out(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = "aab"[rank]
        join_at_rank_0(rank, 3, tmp_path)
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
        pid = torch.tensor([os.getpid()])
        dist.broadcast(pid, 2)
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:  # the messages of the others have arrived, so its first call may be complete
            all_reduce_until_failure(torch.ones(1), group)
            with pytest.raises(CommError):
                dist_prims.shrink(group)
            return "left out"
        with pytest.raises(CommError):
            dist.all_reduce(torch.ones(1), group=group)
        group = dist_prims.shrink(group)
        assert total(group) == 2
        if rank == 0:
            os.kill(int(pid), signal.SIGCONT)
        assert [total(group) for _ in range(20)] == [2] * 20
        return "went on"

    assert run_ranks(body, 3, tmp_path, join=False) == ["went on", "went on", "left out"]
