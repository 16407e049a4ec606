"""Ranks of this host for tests and notebooks: results come back, failures too, and nothing stays behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import children

import dist_prims
from dist_prims.launch import RankFailedError, spawn_child, spawn_parent


@pytest.fixture(autouse=True)
def _nothing_stays() -> object:
    before, files = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the pipe to multiprocessing's tracker, once it runs


def test_results_come_back_by_rank() -> None:
    offset = 10  # a closure
    assert dist_prims.spawn(lambda: dist.get_rank() + offset, 4, timeout=60) == [10, 11, 12, 13]
    assert dist_prims.spawn(lambda a, b: (a, b, dist.get_world_size()), 1, (1, "x"), timeout=60) == [(1, "x", 1)]
    tensors = dist_prims.spawn(lambda: torch.full((3,), dist.get_rank()), 2, timeout=60)
    assert [each.tolist() for each in tensors] == [[0] * 3, [1] * 3]


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    def body() -> None:
        if dist.get_rank() == 2:
            raise LookupError("this one")
        dist.barrier()  # the others wait for it, and fail after it

    with pytest.raises(RankFailedError, match="rank 2 raised") as caught:
        dist_prims.spawn(body, 4, timeout=60)
    assert caught.value.rank == 2
    assert 'raise LookupError("this one")' in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


def test_an_exception_that_cannot_be_pickled_is_reported_as_text() -> None:
    def body() -> None:
        class Local(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__("stays here")

        raise Local(1, 2)

    with pytest.raises(RankFailedError, match="stays here") as caught:
        dist_prims.spawn(body, 1, timeout=60)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL before its function returned"),
        (lambda: os._exit(7), "rank 1 exited with status 7 before its function returned"),
    ],
    ids=["killed", "exits"],
)
def test_a_rank_that_ends_is_named_and_the_others_go(end: Callable[[], None], words: str) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            end()
        time.sleep(1000)

    with pytest.raises(RankFailedError, match=words):
        dist_prims.spawn(body, 3, timeout=60)


def test_a_notice_sent_just_before_a_death_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent read the notices, then looked for deaths: a rank that began and died in between had "not begun"."""
    has_died = spawn_parent._Rank.has_died

    def later(rank: Any) -> bool:
        if rank.number == 1:
            rank.process.join(30)
        return has_died(rank)

    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    monkeypatch.setattr(spawn_parent._Rank, "has_died", later)
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGKILL before its function returned"):
        dist_prims.spawn(body, 2, timeout=60)


def test_what_a_rank_has_started_goes_with_it() -> None:
    def body() -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    (pid,) = dist_prims.spawn(body, 1, timeout=60)
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_hang_ends_and_says_where() -> None:
    """Over gloo a rank cannot leave without a loss of data, so the parent says which ranks the others may wait for."""

    def dream() -> None:
        if dist.get_rank() == 1:
            time.sleep(1000)

    gone = r"these of 2 ranks were still running: 1 \(the function has returned on rank 0, for which"
    with pytest.raises(TimeoutError, match=gone) as caught:
        dist_prims.spawn(dream, 2, timeout=1)
    assert "in dream" in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ["aaa", "aab"], ids=["one host", "two hosts"])
def test_a_rank_whose_function_has_returned_is_named_as_gone(hosts: str) -> None:
    """It kept its groups until all functions had returned, so the other ranks waited for the timeout."""

    def one_barrier_too_many() -> None:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[int(os.environ["RANK"])]
        dist_prims.init("dist_prims", timeout=200)
        if dist.get_rank() != 1:
            with pytest.raises(dist_prims.PeerLeftError, match=r"rank [02]: rank 1.* has left the group in "):
                dist.barrier()

    dist_prims.spawn(one_barrier_too_many, 3, timeout=100, init=False)


@pytest.mark.parametrize("hosts", ["aaa", "abc"], ids=["one host", "several hosts"])
def test_what_a_rank_has_sent_before_its_function_returned_arrives(hosts: str) -> None:
    def late_receivers() -> list[float]:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[int(os.environ["RANK"])]
        dist_prims.init("dist_prims", timeout=60)
        rank, data = dist.get_rank(), torch.full((1000,), 7.0)
        if rank == 0:
            dist.send(data, 1)
            dist.broadcast(data, 0)
            return []
        time.sleep(0.3)  # rank 0 returns as soon as its part of the broadcast is done
        received = torch.zeros(2, 1000)
        if rank == 1:
            dist.recv(received[0], 0)
        dist.broadcast(received[1], 0)
        return received.mean(1).tolist()

    assert dist_prims.spawn(late_receivers, 3, timeout=100, init=False) == [[], [7, 7], [0, 7]]


def test_a_rank_that_has_destroyed_its_group_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time to destroy the groups was over, the error said that the others may wait for the ranks that had."""

    def finish_soon(ranks: spawn_parent.RankProcesses) -> None:
        ranks.start_timeout = 0.5
        finish(ranks)

    def body() -> None:
        if dist.get_rank() == 1:
            dist.destroy_process_group = lambda group=None: time.sleep(1000)

    finish = spawn_parent.RankProcesses.finish
    monkeypatch.setattr(spawn_parent.RankProcesses, "finish", finish_soon)
    with pytest.raises(TimeoutError, match=r"2 ranks were still destroying their group: 1\. Give"):
        dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (0, {}, "nprocs is 0"),
        (1, {"start_method": "thread"}, "choose 'fork' or 'spawn'"),
        (1, {"start_timeout": 0}, "start_timeout is 0 s; give a positive time"),
        (1, {"timeout": -1}, "timeout is -1 s; give a positive time"),
    ],
)
def test_wrong_arguments_are_refused(ranks: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dist_prims.spawn(dist.get_rank, ranks, **options)


def test_ranks_do_not_outlive_a_parent_that_dies(tmp_path: Path) -> None:
    def body() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(1000)

    parent = multiprocessing.get_context("fork").Process(target=dist_prims.spawn, args=(body, 2))
    parent.start()
    end = time.monotonic() + 60
    while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.join(30)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def slow_to_join(seconds: float) -> str:
    """A backend whose groups take so long to make."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        time.sleep(seconds)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    name = f"slow{int(seconds)}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


@pytest.mark.slow
def test_the_time_to_run_begins_when_all_have_joined() -> None:
    assert dist_prims.spawn(dist.get_rank, 2, backend=slow_to_join(3), timeout=2) == [0, 1]


@pytest.mark.slow
def test_the_time_to_run_is_not_the_time_to_start() -> None:
    assert dist_prims.spawn(lambda: time.sleep(3), 1, start_timeout=2) == [None]


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(
        TimeoutError, match="with start_timeout=1 s these of 2 ranks were still starting: 0, 1"
    ) as caught:
        dist_prims.spawn(dist.get_rank, 2, backend=slow_to_join(1000), start_timeout=1, timeout=60)
    assert "time.sleep(seconds)" in str(caught.value) or "in make" in str(caught.value)


def test_a_rank_that_dies_before_the_last_one_begins_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent had not yet the notice of each rank when one died in the function, and the call failed."""

    def notify_late(spec: spawn_child.RankSpec, *notice: int) -> None:
        time.sleep(0.5 if spec.rank == 2 else 0)
        notify(spec, *notice)

    def die_on_rank_1() -> int:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return dist.get_rank()

    notify = spawn_child._notify
    monkeypatch.setattr(spawn_child, "_notify", notify_late)
    assert dist_prims.spawn(die_on_rank_1, 3, backend="dist_prims", timeout=60, min_ranks=2) == [0, None, 2]


@pytest.mark.parametrize("min_ranks", [None, 2])
def test_a_rank_that_dies_before_it_has_joined_is_named(min_ranks: int | None) -> None:
    """Not counted as a loss, because the others wait for it in the rendezvous until the time to start is over."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if rank == 1:
            os._exit(3)
        time.sleep(1000)

    if "mortal" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mortal", make, devices=["cpu"])
    with pytest.raises(RankFailedError, match="rank 1 exited with status 3 before its function began"):
        dist_prims.spawn(dist.get_rank, 3, backend="mortal", timeout=60, start_timeout=60, min_ranks=min_ranks)


def test_ranks_do_not_collect_what_became_garbage_in_the_parent() -> None:
    """A forked rank hung where it destroyed gloo's group, which waits for a thread that only the parent has."""

    def body() -> None:
        assert gc.isenabled()
        gc.collect()
        node = type("Node", (), {})()
        node.itself = node
        of_node = weakref.ref(node)
        del node
        gc.collect()
        assert of_node() is None, "garbage of the rank itself is collected"

    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # the garbage must be there when the ranks are forked
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cycle = [dist.group.WORLD]
        cycle.append(cycle)  # type: ignore[arg-type]
        of_group = weakref.ref(cycle[0])
        dist.destroy_process_group()
        del cycle
        dist_prims.spawn(body, 2, timeout=60)
        assert gc.isenabled()
        assert of_group() is not None
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()


def test_a_call_without_enough_descriptors_closes_what_it_has_opened() -> None:
    """Each such call kept its pipes and files open, so that a later call failed with fewer ranks, too. The error was
    "Too many open files" without a remedy."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as first_free:
        for more in range(10):  # before the first rank starts, the two need eleven
            limit = first_free.fileno() + 2 + more
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
            words = rf"spawn: .* no descriptors left for the ranks, about 7 each \(its limit is {limit}\); raise"
            try:
                with pytest.raises(OSError, match=words):
                    dist_prims.spawn(dist.get_rank, 2, timeout=60, init=False)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_destroyed_default_group_keeps_no_memory() -> None:
    """init() kept a reference to the group, and so its shared memory, until the next init()."""

    def body() -> tuple[bool, bool]:
        of_group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        return of_group() is None, "memfd:dist_prims (" in Path("/proc/self/maps").read_text()

    assert dist_prims.spawn(body, 2, backend="dist_prims", timeout=60) == [(True, False)] * 2


def test_spawn_in_several_threads_leaves_garbage_collection_enabled() -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(dist_prims.spawn, gc.isenabled, 2, timeout=60) for _ in range(8)]
        assert [call.result() for call in calls] == [[True, True]] * 8
    assert gc.isenabled()
