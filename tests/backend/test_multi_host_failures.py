"""Failures of groups that span hosts: deaths, stops, limits, Ctrl-C, and the end of a group with work in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import press_ctrl_c_soon, span, store
from values import equal

from dist_prims.errors import CommTimeoutError, PeerDiedError
from dist_prims.launch import RankFailedError
from dist_prims.rendezvous.deadline import until

pytestmark = pytest.mark.usefixtures("host_transport")


def await_raised(count: int) -> None:
    """Until so many ranks have called ``has_raised()``."""
    until(lambda: store().add("raised", 0) >= count, time.monotonic() + 50, "the errors of the other ranks")


def has_raised() -> None:
    store().add("raised", 1)


def go_on_until_it_fails(tensor: torch.Tensor) -> None:
    for _ in range(10_000):
        dist.all_reduce(tensor)


@pytest.mark.sampled(1)
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


@pytest.mark.parametrize(
    ("layout", "members", "transfer"),
    [
        ("a a a", "0, 2", ""),
        ("a b b", "0, 2", r"recv\(\d+ bytes from rank 1 on host b\)"),
        pytest.param("a a a a a a a a a a", "0, 2, 3, 4, 5, 6, 7, 8, ... 9", "", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_a_subgroup_names_it_and_the_call(layout: str, members: str, transfer: str) -> None:
    """A reader took "rank 1" for the global rank 1, which was healthy; and between hosts only the message was named."""

    def body() -> None:
        group = dist.new_group([0, *range(2, dist.get_world_size())], timeout=timedelta(seconds=1))
        if dist.get_rank() == 0:
            call = r"all_reduce\(SUM, float32, 5 elements.*\) as call number 1: "
            with pytest.raises(CommTimeoutError, match=rf"^rank 0 of group \[{members}\]: .*{call}{transfer}"):
                dist.all_reduce(torch.ones(5), group=group)
            has_raised()
        await_raised(1)

    span(layout, body)


@pytest.mark.parametrize("layout", ["a a a", pytest.param("a a b", marks=pytest.mark.slow)])
def test_a_wait_with_a_limit_ends_the_group_and_writes_nothing_late(layout: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        if rank == 2:
            await_raised(2)
            with pytest.raises((PeerDiedError, CommTimeoutError)):
                dist.all_reduce(torch.ones(50_000))
            store().set("has come late", "")
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
        has_raised()
        store().wait(["has come late"])
        time.sleep(0.2)
        equal(tensor, before, "written late")

    span(layout, body)


def test_ctrl_c_ends_a_wait_for_another_host() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            return await_raised(1)
        press_ctrl_c_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        return has_raised()

    span("a b", body)


@pytest.mark.parametrize("layout", ["a a", "a b"])
def test_destroyed_with_work_in_flight(layout: str) -> None:
    def body() -> None:
        over = store()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(100_000), async_op=True)
            began = time.monotonic()
            dist.destroy_process_group()
            assert time.monotonic() - began < 10
            with pytest.raises(RuntimeError, match=r"left|destroyed"):
                work.wait()
            over.set("over", "")
        else:
            over.wait(["over"])

    span(layout, body)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["a b", "a a b b", "a b a b", "a b c"])
def test_monitored_barriers(layout: str) -> None:
    """Each barrier waits for the last rank, also while a message of a user is pending."""

    def body(folder: Path) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.zeros(3)
        message = dist.irecv(received, size - 1) if rank == 0 else None
        for turn in range(10):
            if rank == turn % size:
                time.sleep(0.02)
            (folder / f"{turn} {rank}").touch()
            monitored_barrier(50)
            assert all((folder / f"{turn} {each}").exists() for each in range(size))
        if rank == size - 1:
            dist.send(torch.ones(3), 0)
        if message:
            message.wait()
            assert received.sum() == 3
        dist.barrier()

    with tempfile.TemporaryDirectory() as folder:
        span(layout, body, Path(folder))


def monitored_barrier(seconds: float, wait_all_ranks: bool = False) -> None:
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["a a a", "a a b b"])
def test_the_limit_of_a_monitored_barrier_is_that_of_rank_0(layout: str) -> None:
    """The other ranks wait for rank 0 for the timeout of the group, as in gloo's barrier."""

    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.6)
        monitored_barrier(0.3)

    span(layout, body)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "wait_all_ranks"), [("a a b b", False), ("a b a b", True), ("a b c d", False)])
def test_a_monitored_barrier_names_the_late_ranks(layout: str, wait_all_ranks: bool) -> None:
    """Rank 2 waits for rank 3, which is late. All ranks name rank 3, and rank 0 also those that it has not seen."""
    late = 3

    def body() -> None:
        rank = dist.get_rank()
        dist.barrier()
        if rank >= late:
            return await_raised(late)
        if rank == 0:
            time.sleep(0.4)  # longer than the limit, which begins when this rank calls
        with pytest.raises(CommTimeoutError, match=rf"rank {late}( on host \w)? has not replied") as caught:
            dist.recv(torch.zeros(3), 3) if rank == 2 else monitored_barrier(0.3, wait_all_ranks)
        has_raised()
        if rank == 0:
            assert f"no sign of rank {'2, 3' if wait_all_ranks else '2'})" in str(caught.value)
        elif rank == 1:
            assert "in monitored_barrier: recv(0 bytes from rank 0" in str(caught.value)
        return None

    span(layout, body)


def test_a_rank_that_was_stopped_for_a_moment_receives_the_replies_of_others() -> None:
    """SIGCONT ended the thread that receives them, so the rank named the healthy rank that it waited for."""

    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group(timeout=timedelta(seconds=1.5))
        dist.barrier(group)
        if rank == 2:
            return await_raised(2)
        if rank == 1:
            moment = f"kill -STOP {os.getpid()}; sleep 0.1; kill -CONT {os.getpid()}"
            subprocess.run(["sh", "-c", moment], check=True, timeout=20)
        else:
            time.sleep(0.5)  # so that rank 1 times out first
        with pytest.raises(CommTimeoutError, match=r"rank 2( on host \w)? has not replied"):
            dist.recv(torch.zeros(3), 2 * (1 - rank), group)
        has_raised()
        return None

    span("a b c", body)


@pytest.mark.slow
def test_a_monitored_barrier_ends_by_a_death_and_by_ctrl_c() -> None:
    def dies() -> str:
        monitored_barrier(50)
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError, match="rank 3 on host") as caught:
            monitored_barrier(1000)
        return str(caught.value)

    assert sum(bool(text) for text in span("a a b b", dies, losses=1)) == 3

    def is_interrupted() -> None:
        monitored_barrier(50)
        if dist.get_rank() == 0:
            press_ctrl_c_soon()
            with pytest.raises(KeyboardInterrupt):
                monitored_barrier(50)
        elif dist.get_rank() == 1:
            with pytest.raises(RuntimeError):
                monitored_barrier(50)

    span("a b c", is_interrupted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", [monitored_barrier, lambda limit: dist.recv(torch.zeros(3), 0)])
def test_a_dead_rank_is_named_by_ranks_that_wait_for_another_rank(
    call: Callable[[float], Any],
) -> None:
    """Rank 0 closed its connections before it sent the notice, so the others named rank 0."""

    def body() -> str:
        rank = dist.get_rank()
        dist.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError, match="rank 3 on host d") as caught:
            dist.recv(torch.zeros(3), 3) if rank == 0 else call(1000)
        return str(caught.value)

    assert sum(bool(text) for text in span("a b c d", body, losses=1)) == 3


def test_groups_over_tcp_and_ucx_make_no_gloo() -> None:
    """Such a group made one for monitored_barrier, with a port at which any process could take the place of a rank."""

    def body() -> set[str]:
        monitored_barrier(50)
        return {name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")}

    for threads in span("a b", body):
        assert not any("gloo" in name for name in threads)
