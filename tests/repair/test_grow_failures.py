"""grow() and join() while ranks die, are cut off, or cannot make the group."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from survivors import join_at_rank_0, run_ranks

import dist_prims
from dist_prims.backend.create import made_group
from dist_prims.errors import CommError, LeftOutError
from dist_prims.repair.meeting import open_meeting
from dist_prims.repair.quorum import NoMajorityError
from dist_prims.repair.survivors import Announce, Make
from tests.backend.test_descriptors import take_all_but
from tests.repair.test_grow import grow_to
from tests.repair.test_shrink import LIMIT, all_reduce_until_failure, die, total, wait_until


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hosts", ["aaaa", "aaba"])
@pytest.mark.parametrize("moment", ["announced", "confirmed", "admitted", "met", "published"])
def test_a_new_rank_dies_on_the_way(moment: str, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running ranks go on with the group that they have, and admit the next rank.

    A new rank that died after its admission cost them the whole timeout of grow(), and as much another new rank.
    """
    place = f"file://{tmp_path}/place"
    module: Any = sys.modules["dist_prims.repair.meeting"]
    create: Any = sys.modules["dist_prims.backend.create"]

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        if rank == 2:
            until = module.until
            calls = iter(["announced", "confirmed"])

            def dying(done: Any, deadline: float, awaited: str) -> None:
                if next(calls) == moment:
                    die()
                until(done, deadline, awaited)

            monkeypatch.setattr(module, "until", dying)
            if moment == "admitted":
                monkeypatch.setattr(sys.modules["dist_prims.repair.grow"], "_make_group", lambda *_: die())
            monkeypatch.setattr(create, "_TemporaryKeys" if moment == "met" else "extension", lambda *_: die())
            dist_prims.join(place, timeout=LIMIT)
        if rank == 3:
            dist_prims.join(place, timeout=LIMIT)
            return total()
        join_at_rank_0(rank, 2, tmp_path)
        meeting = open_meeting(place, time.monotonic() + LIMIT) if rank == 0 else None
        if meeting:
            wait_until(lambda: meeting.add("waiting", 0) == 2)
        dist.barrier()
        group = dist.group.WORLD
        assert dist_prims.grow(place, timeout=200) is group or moment == "announced"
        grow_to(3, place)
        return total()

    assert run_ranks(body, 4, tmp_path, join=False) == [3, 3, -signal.SIGKILL, 3]


def test_the_rank_that_has_read_an_announcement_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new rank announced itself once. If rank 0 died before it had invited the new rank, that one waited in vain."""
    place = f"file://{tmp_path}/place"
    monkeypatch.setattr(sys.modules["dist_prims.repair.meeting"], "_TIME_FOR_ADMISSION", 0.5)

    def body(rank: int) -> Any:
        if rank == 1:
            dist_prims.join(place, timeout=LIMIT)
        else:
            join_at_rank_0(rank, 1, tmp_path)
            meeting = open_meeting(place, time.monotonic() + LIMIT)
            wait_until(lambda: meeting.add("waiting", 0) == 1)
            meeting.add("served", 1)  # the first step of an earlier rank 0
            grow_to(2, place)
        return total()

    assert run_ranks(body, 2, tmp_path, join=False) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "module", "function", "timeout"),
    [("aaaa", "repair.repair_attempt", "make_group", 1), ("abca", "backend.tcp_endpoint", "make", 200)],
)
def test_a_running_rank_dies_meanwhile(
    hosts: str, module: str, function: str, timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others keep their group, whose next call raises; the new rank announces itself again. Between hosts, they
    waited for the timeout of grow() if the rank died before it had published its address."""
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        if rank == 3:
            dist_prims.join(place, timeout=LIMIT)
            return total()
        join_at_rank_0(rank, 3, tmp_path)
        if rank == 1:
            monkeypatch.setattr(sys.modules[f"dist_prims.{module}"], function, lambda *_, **__: die())
        with contextlib.suppress(dist_prims.CommError):
            while dist.get_world_size() == 3:
                dist_prims.grow(place, timeout=timeout)
                dist.barrier()
        dist_prims.shrink()
        grow_to(3, place)
        return total()

    assert run_ranks(body, 4, tmp_path, join=False) == [3, -signal.SIGKILL, 3, 3]


def die_when(file: Path) -> None:
    wait_until(file.exists)
    die()


def test_a_running_rank_without_descriptors_cannot_make_the_group(tmp_path: Path) -> None:
    """The others waited for it in grow() until the timeout, while it made the next call, which timed out and named one
    of them as late."""
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        if rank == 3:
            threading.Thread(target=die_when, args=(tmp_path / "end",)).start()
            dist_prims.join(place, timeout=LIMIT)
        join_at_rank_0(rank, 3, tmp_path)
        group = dist.group.WORLD
        meeting = open_meeting(place, time.monotonic() + LIMIT) if rank == 0 else None
        if meeting:
            wait_until(lambda: meeting.add("waiting", 0) == 1)
        dist.barrier()
        taken = take_all_but(0) if rank == 1 else []
        assert dist_prims.grow(place, timeout=LIMIT) is group
        if rank == 1:
            group.set_timeout(timedelta(seconds=10))
        assert total() == 3
        for each in taken:
            os.close(each)
        (tmp_path / "end").touch()
        return total()

    assert run_ranks(body, 4, tmp_path, join=False) == [3, 3, 3, -signal.SIGKILL]


def grow_until_failure(place: str) -> None:
    while made_group(dist.group.WORLD.group_name).failed_grows == 0:
        dist_prims.grow(place, timeout=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hosts", ["aaa", "abc"])
@pytest.mark.parametrize("has_made", [True, False])
def test_a_rank_is_cut_off_in_grow(has_made: bool, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grow() raises, and it cannot know whether the others have made the group. When its link was mended, its
    shrink() formed a second group from the old one."""
    place = f"file://{tmp_path}/place"
    attempt: Any = sys.modules["dist_prims.repair.repair_attempt"].RepairAttempt
    perform = attempt._perform

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        is_cut = False

        def perform_until_cut(self: Any, request: Any) -> Any:
            nonlocal is_cut
            is_cut = is_cut or (isinstance(request, Make) and not has_made)
            if is_cut:
                raise NoMajorityError
            found = perform(self, request)
            is_cut = isinstance(request, Announce) and request.record.made
            return found

        if rank == 2:
            dist_prims.join(place, timeout=LIMIT)
        else:
            join_at_rank_0(rank, 2, tmp_path)
        if rank == 1:
            monkeypatch.setattr(attempt, "_perform", perform_until_cut)
            with pytest.raises(CommError, match="cannot reach a majority"):
                grow_to(3, place) if has_made else grow_until_failure(place)
            monkeypatch.setattr(attempt, "_perform", perform)
            if has_made:
                wait_until((tmp_path / "grown").exists)
                with pytest.raises(LeftOutError, match="gone on with a group that an earlier call"):
                    dist_prims.shrink(timeout=1)
                die()
        elif has_made:
            grow_to(3, place)
            (tmp_path / "grown").touch()
            all_reduce_until_failure()
        elif rank == 0:
            grow_until_failure(place)
        if rank < 2 or has_made:
            dist_prims.shrink()
        if not has_made:
            grow_to(3, place)
        return total()

    assert run_ranks(body, 3, tmp_path, join=False) == ([2, -signal.SIGKILL, 2] if has_made else [3, 3, 3])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_many_failures(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new rank that cannot reach the others fails again and again. After 8 failures a group admitted no more ranks.

    On one host that comes after 32, and the log of the group has room for a repair then.
    """
    place = f"file://{tmp_path}/place"
    module: Any = sys.modules["dist_prims.repair.grow"]

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        if rank == 2:
            wait_until((tmp_path / "others have failed").exists)
            dist_prims.join(place, timeout=LIMIT)
            return total()
        join_at_rank_0(rank, 2, tmp_path)
        group = dist.group.WORLD
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_announcements", lambda _: {})
            patch.setattr(module, "invite", lambda *_: {secrets.token_hex(16): ""})
            for _ in range(40 if hosts == "aaa" else 10):
                assert dist_prims.grow(place, timeout=0.02) is group
        (tmp_path / "others have failed").touch()
        if hosts == "aaa":  # the repaired group has had no failure
            dist_prims.shrink()
        grow_to(3, place)
        return total()

    assert run_ranks(body, 3, tmp_path, join=False) == [3, 3, 3]
    assert ("this group admits no more" in capfd.readouterr().err) == (hosts == "aaa")
