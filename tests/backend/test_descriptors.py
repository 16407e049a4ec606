"""File descriptors: what groups cost, and what happens when none is left."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import clean
from ranks import span
from survivors import join_at_rank_0, run_ranks

import dist_prims
from dist_prims.errors import CommError, LeftOutError, PeerDiedError


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def take_all_but(spare: int) -> list[int]:
    """Leave this process so many descriptors; the others are returned."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(spare):
            os.close(taken.pop())
    return taken


def test_groups_share_what_they_watch(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        before, groups = descriptors(), []
        for _ in range(12):
            groups.append(dist.new_group())
        dist.barrier(groups[-1])
        return descriptors() - before

    assert run_ranks(body, 4, tmp_path) == [0] * 4


def test_many_groups_under_a_low_limit_still_see_a_death(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        groups = [dist.new_group() for _ in range(25)]
        dist.barrier(groups[-1])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError, match="rank 1 "):
            dist.all_reduce(torch.ones(1), group=groups[-1])
        return None

    assert run_ranks(body, 4, tmp_path) == [None, -signal.SIGKILL, None, None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("poor", "spare", "has_folder"),
    [
        pytest.param(poor, spare, has_folder, marks=[pytest.mark.slow] * ((poor // 2 + spare + has_folder) % 2))
        for poor, spare, has_folder in itertools.product([0, 2], range(4), [False, True])
    ],
)
def test_none_is_left_to_make_a_group(
    poor: int, spare: int, has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks say why, soon, and none spins until then; or the group is made, and then a death is seen.

    Past bug: a folder of measurements, which is read first, ended the poor rank with an OSError, and the others waited
    until the timeout of the group.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if has_folder:
        (tmp_path / "dist_prims").mkdir()

    def body(rank: int) -> Any:
        join_at_rank_0(rank, 4, tmp_path)
        taken = take_all_but(spare) if rank == poor else []
        began, used = time.monotonic(), time.process_time()
        try:
            group = dist.new_group(timeout=timedelta(seconds=60))
        except RuntimeError as error:
            assert time.monotonic() - began < 25
            assert time.process_time() - used < 5
            return str(error)
        finally:
            for each in taken:
                os.close(each)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError, match="rank 3 "):
            dist.recv(torch.ones(1), 3, group=group)
        return "made"

    outcomes = run_ranks(body, 4, tmp_path, join=False)
    if outcomes[3] == -signal.SIGKILL:
        assert outcomes[:3] == ["made"] * 3
        assert spare > 0
        return
    for text in outcomes:
        assert "descriptors" in text, outcomes
        assert "`ulimit -n`" in text, outcomes


@pytest.mark.parametrize("pause", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_none_is_left_to_shrink_a_group(pause: float) -> None:
    """The error was the OSError of a socket. The other ranks wait, and a second call finds them. They go on instead if
    they have read that rank 2 is gone; then the error says so.

    Past bug: the error did not say so if rank 2 had reached no majority of the servers. But the others read the server
    of rank 2, too, once it has descriptors and before the second call.
    """

    def body() -> int:
        shrink = dist_prims.shrink  # imports it
        text = ""
        if dist.get_rank() == 2:
            taken = take_all_but(0)
            with pytest.raises(CommError, match="rank 2: this process has no file descriptor left") as error:
                shrink()
            text = str(error.value)
            for each in taken:
                os.close(each)
            time.sleep(pause)
        try:
            shrink()
        except LeftOutError:
            assert "if the other ranks have gone on without this one" in text
            return 0
        return dist.get_world_size()

    assert span("a b c", body) in ([3, 3, 3], [2, 2, 0])


FIRST_REPAIR = """
import os, resource
import torch.distributed as dist
import dist_prims

dist.init_process_group("dist_prims", store=dist.HashStore(), rank=0, world_size=1)
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    dist_prims.shrink()
except dist_prims.CommError as error:
    print(error)
"""


def test_none_is_left_for_the_first_repair_of_a_process() -> None:
    """The import of the modules for a repair raised an OSError. They are imported with the first group."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REPAIR], timeout=60, capture_output=True, text=True, check=False, env=clean()
    )
    assert "rank 0: this process has no file descriptor left to repair the group" in done.stdout, done.stderr


def test_none_is_left_to_ask_which_rank_is_late() -> None:
    """The rank received no reply, and named the rank for which it waited. Here rank 2 is late."""

    def body() -> None:
        rank, one = dist.get_rank(), torch.ones(1)
        dist.barrier()
        if rank == 1:
            dist.group.WORLD.set_timeout(timedelta(seconds=1))
            taken = take_all_but(0)
            try:
                with pytest.raises(CommError, match="rank 1 on host b has no file descriptor left"):
                    dist.recv(one, 0)
            finally:
                for each in taken:
                    os.close(each)
        elif rank == 0:
            with pytest.raises(CommError):
                dist.recv(one, 2)
        else:
            with pytest.raises(CommError):
                dist.recv(one, 0)

    span("a b c", body)
