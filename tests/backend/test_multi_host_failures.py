"""Failures of groups that span hosts: deaths, stops, limits, Ctrl-C, and the end of a group with work in flight."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import press_ctrl_c_soon, span
from values import equal

from dist_prims.errors import CommTimeoutError, PeerDiedError
from dist_prims.launch import RankFailedError

pytestmark = pytest.mark.usefixtures("host_engine")


def go_on_until_it_fails(tensor: torch.Tensor) -> None:
    for _ in range(10_000):
        dist.all_reduce(tensor)


@pytest.mark.parametrize("count", [2, 500_000])
def test_a_death_is_known_on_every_host(count: int) -> None:
    def body() -> None:
        rank, tensor = dist.get_rank(), torch.zeros(count)
        dist.all_reduce(tensor)
        if rank == 3:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerDiedError, match="rank 3 on host b"):
            go_on_until_it_fails(tensor)
        assert time.monotonic() - began < 10
        began = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - began < 5

    with pytest.raises(RankFailedError, match="rank 3"):
        span("a a b b c c", body)


def test_a_rank_that_is_stopped_is_named_on_every_host() -> None:
    def body() -> None:
        rank = dist.get_rank()
        pids: list[Any] = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        began = time.monotonic()
        with pytest.raises(CommTimeoutError, match="rank 2"):
            go_on_until_it_fails(torch.zeros(100_000))
        assert 1.9 < time.monotonic() - began < 15
        if rank == 0:
            time.sleep(1)
            os.kill(pids[2], signal.SIGCONT)

    span("a a b b", body, group=2)


def test_a_wait_with_a_limit_ends_the_group_and_writes_nothing_late() -> None:
    def body() -> None:
        rank = dist.get_rank()
        if rank == 2:
            time.sleep(3)
            with pytest.raises((PeerDiedError, CommTimeoutError)):
                dist.all_reduce(torch.ones(50_000))
            return
        tensor = torch.full((50_000,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            with pytest.raises(CommTimeoutError, match="300 ms"):
                work.wait(timedelta(milliseconds=300))
        else:
            with pytest.raises((CommTimeoutError, PeerDiedError)):
                work.wait()
        before = tensor.clone()
        time.sleep(3)
        equal(tensor, before, "written late")

    span("a a b", body)


def test_ctrl_c_ends_a_wait_for_another_host() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            time.sleep(1)
            return
        press_ctrl_c_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))

    span("a b", body)


def test_destroyed_with_work_in_flight() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(100_000), async_op=True)
            began = time.monotonic()
            dist.destroy_process_group()
            assert time.monotonic() - began < 10
            with pytest.raises(RuntimeError, match=r"left|destroyed"):
                work.wait()
        else:
            time.sleep(2)

    span("a b", body)
