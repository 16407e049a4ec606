"""What happens to the other ranks when one of them fails while a group is made, and signals meanwhile."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, span
from survivors import join_at_rank_0, run_ranks, store_process

import dist_prims
from dist_prims.backend import create, tcp_endpoint, transport_selection, ucx_library
from dist_prims.backend.origin import GroupRequest, Origin, Repairs
from dist_prims.errors import CommError, CommInterruptedError, CommTimeoutError, PeerDiedError
from dist_prims.rendezvous import handshake
from dist_prims.rendezvous.deadline import until

SOON = 25  # seconds on a crowded machine; the group's timeout is 60


def new_group() -> tuple[str, str]:
    """Make a group that cannot be made: the type and the message of the error that this raises before time is up."""
    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        dist.new_group(timeout=timedelta(seconds=60))
    assert time.monotonic() - began < SOON
    return type(caught.value).__name__, str(caught.value)


def between_rendezvous_and_attaching(act: Any) -> None:
    """Have this rank call `act` there when it makes its next group."""
    module: Any = create
    tuned = module.tuned

    def acting(*args: Any, **kwargs: Any) -> int:
        module.tuned = tuned
        act()
        return tuned(*args, **kwargs)

    module.tuned = acting


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("has_met_the_others", [False, True])
def test_a_rank_that_dies_is_named(has_met_the_others: bool, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 2:
            between_rendezvous_and_attaching(die) if has_met_the_others else die()
        return new_group()

    outcomes = run_ranks(body, 4, tmp_path)
    assert outcomes.pop(2) == -signal.SIGKILL
    for rank, (kind, text) in zip((0, 1, 3), outcomes, strict=True):
        assert (kind, text.partition(":")[0]) == ("PeerDiedError", f"rank {rank}"), text
        assert "rank 2 has died while the group was made" in text, text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_has_attached_and_dies(victim: int, tmp_path: Path) -> None:
    """Of the default group: no other group watches the processes."""

    def body(rank: int) -> Any:
        if rank == victim:
            between_rendezvous_and_attaching(threading.Timer(0.5, die).start)
        elif rank == 2:
            between_rendezvous_and_attaching(lambda: time.sleep(1.5))
        began = time.monotonic()
        meeting = f"file://{tmp_path}/meeting"
        with pytest.raises(PeerDiedError) as caught:
            dist.init_process_group(
                "dist_prims", init_method=meeting, rank=rank, world_size=3, timeout=timedelta(seconds=60)
            )
        assert time.monotonic() - began < SOON
        return str(caught.value)

    outcomes = run_ranks(body, 3, tmp_path, join=False)
    assert outcomes.pop(victim) == -signal.SIGKILL
    for text in outcomes:
        assert f"rank {victim} has died" in text or f"rank {victim} does not listen" in text, text


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_the_store_that_dies_with_rank_0(hosts: str, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
        join_at_rank_0(rank, 3, tmp_path)
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
            die()
        return new_group()

    outcomes = run_ranks(body, 3, tmp_path, join=False)
    assert outcomes.pop(0) == -signal.SIGKILL
    for kind, text in outcomes:
        assert (kind, "rank 0 has died while the group was made" in text) == ("PeerDiedError", True), text


def test_a_rank_that_is_interrupted_tells_the_others(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 2:
            between_rendezvous_and_attaching(lambda: time.sleep(1))
        if rank != 1:
            return new_group()
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(LookupError("of the handler")))
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with pytest.raises(LookupError, match="of the handler"):
            dist.new_group(timeout=timedelta(seconds=60))
        return None

    outcomes = run_ranks(body, 3, tmp_path)
    assert outcomes.pop(1) is None
    for kind, text in outcomes:
        assert kind == CommInterruptedError.__name__, text
        assert text.endswith("the group cannot be made: rank 1: interrupted while the group was made")


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2]])
def test_handled_signals_do_no_harm(ranks: list[int], tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        seen = []
        if rank in ranks:
            signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        for turn in range(25):
            time.sleep(0.005 * (rank == turn % 3))
            dist.destroy_process_group(dist.new_group())
        signal.setitimer(signal.ITIMER_REAL, 0)
        return len(seen)

    outcomes = run_ranks(body, 3, tmp_path)
    assert [count > 0 for count in outcomes] == [rank in ranks for rank in range(3)]


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    """Linux counts shared memory as a file. The error had no remedy."""

    def body(rank: int) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:  # makes the memory of the group
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(RuntimeError) as caught:
            dist.new_group(timeout=timedelta(seconds=60))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        return str(caught.value)

    for text in run_ranks(body, 2, tmp_path):
        assert re.search(r"rank 0: cannot reserve \d+ bytes of shared memory; is the .*`ulimit -f`", text)


def test_a_rank_that_has_no_memory_for_its_slots(control_group: Path, tmp_path: Path) -> None:
    """Each rank reserves its own slots, and the error of one of them reaches all ranks."""
    (control_group / "memory.limit_in_bytes").write_text(str(256 << 20))

    def body(rank: int) -> Any:
        if rank == 1:
            (control_group / "cgroup.procs").write_text(str(os.getpid()))
        with pytest.raises(RuntimeError) as caught:
            dist.new_group(pg_options=dist_prims.BackendOptions(slot_bytes=128 << 20), timeout=timedelta(seconds=60))
        dist.all_reduce(result := torch.ones(1))  # the default group goes on
        return str(caught.value), result.item()

    for text, result in run_ranks(body, 3, tmp_path):
        assert "rank 1: cannot reserve 268435456 bytes of shared memory: the machine or the control group of" in text
        assert result == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deaths_at_any_moment(tmp_path: Path) -> None:
    """Every survivor names the dead rank, unless it was between two groups and then names it in the next.

    The store is a process of its own. A rank that dies within a write leaves half a record in torch's FileStore, and a
    store that is a thread of this process may hold a lock of the C library while a rank is forked, which then waits
    for that lock and never joins.
    """

    def body(rank: int) -> Any:
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("dist_prims", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
        threading.Timer(delay, die).start() if rank == victim else None
        began = time.monotonic()
        while time.monotonic() < began + 60:
            try:
                dist.destroy_process_group(dist.new_group())
            except CommError as error:
                return time.monotonic() - began - delay, str(error)
        raise AssertionError("no rank has died")

    choose = random.Random(5)
    with store_process() as port:
        for number in range(20):
            prefix, victim, delay = str(number), choose.randrange(4), 0.3 + choose.random() / 2
            outcomes = run_ranks(body, 4, tmp_path, join=False)
            assert outcomes.pop(victim) == -signal.SIGKILL
            for late, text in outcomes:
                assert late < SOON, text
                assert f"rank {victim}" in text, text


def test_a_group_of_other_ranks_is_made_although_one_has_died(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 1:
            die()
        while not backend_of().ended():
            time.sleep(0.01)
        group = dist.new_group([0, 2], use_local_synchronization=True)
        dist.all_reduce(tensor := torch.ones(3), group=group)
        return tensor.tolist()

    assert run_ranks(body, 3, tmp_path) == [[2.0] * 3, -signal.SIGKILL, [2.0] * 3]


@pytest.mark.parametrize("has_met_the_others", [False, True])
@pytest.mark.parametrize(
    ("layout", "victim"),
    [("a a b b", 3), pytest.param("a b c", 0, marks=pytest.mark.slow), pytest.param("a b", 1, marks=pytest.mark.slow)],
)
def test_a_rank_of_another_host_that_dies_before_it_listens(
    layout: str, victim: int, has_met_the_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts waited for the timeout, 30 minutes by default: at first in the handshake, and later, when the
    handshake looked for deaths, for the address of the rank. Rank 3 of "a a b b" has no connection to host a."""

    def body() -> tuple[str, str]:
        dist.barrier()
        if dist.get_rank() == victim:
            if not has_met_the_others:
                die()
            monkeypatch.setattr(tcp_endpoint, "make", lambda *_: die())
        return new_group()

    outcomes = span(layout, body, losses=1)
    assert outcomes.pop(victim) is None
    for kind, text in outcomes:
        assert (kind, f"rank {victim} has died while the group was made" in text) == ("PeerDiedError", True), text


def test_a_late_rank_of_another_host_is_waited_for_although_a_rank_outside_the_group_has_died() -> None:
    """Rank 3 makes the group after several probes of its process. Rank 1, which has died, is not to be in the group."""

    def body() -> Any:
        rank = dist.get_rank()
        dist.barrier()
        if rank == 1:
            die()
        time.sleep(2.5 * (rank == 3))
        group = dist.new_group([0, 2, 3], use_local_synchronization=True, timeout=timedelta(seconds=60))
        dist.all_reduce(tensor := torch.ones(3), group=group)
        return tensor.tolist()

    assert span("a b b c", body, losses=1) == [[3.0] * 3, None, [3.0] * 3, [3.0] * 3]


@pytest.mark.slow
def test_a_rank_that_stops_before_it_publishes_its_address_is_named_by_all_others(tmp_path: Path) -> None:
    """Between hosts the error was torch's "wait timeout", with the names of keys; on one host it names the rank."""

    def wait_for_others(*_: Any) -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2, time.monotonic() + 50, "the errors of the other ranks")
        raise RuntimeError("this rank goes on too late")

    def body() -> None:
        rank = dist.get_rank()
        os.environ["DIST_PRIMS_HOST_ID"] = "abc"[rank]
        if rank == 1:
            tcp_endpoint.make = wait_for_others  # type: ignore[assignment]
        dist.barrier()  # the timeout is one of the handshake as well
        with pytest.raises(RuntimeError if rank == 1 else CommTimeoutError) as caught:
            dist.new_group(backend="dist_prims", timeout=timedelta(seconds=3))
        if rank != 1:
            expected = f"rank {rank}: timeout while the group was made: no sign of rank 1; "
            assert str(caught.value).startswith(expected), str(caught.value)
            (tmp_path / str(rank)).touch()

    dist_prims.spawn(body, 3, timeout=100)


def test_a_rank_that_does_not_make_the_group_is_named_by_all_others() -> None:
    """The error was "no sign of ranks [2]" on rank 0, without rank, operation and remedy."""

    def body() -> str:
        if dist.get_rank() == 2:
            return ""
        with pytest.raises(CommTimeoutError) as caught:
            dist.new_group(backend="dist_prims", timeout=timedelta(seconds=1))
        return str(caught.value)

    for rank, text in enumerate(span("a b c", body)[:2]):
        assert text.startswith(f"rank {rank}: timeout while the group was made: no sign of ranks [2]; see"), text


def test_a_rank_that_stops_before_the_transport_is_chosen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was torch's "wait timeout" with the name of a key, or named rank 0, which waited for another rank."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    monkeypatch.setattr(ucx_library, "unusable_reason", lambda: "")
    for rank, missing in ((0, "1, 2"), (2, "1"), (0, "1")):
        expected = f"^rank {rank}: timeout while the group was made: no sign of rank {missing}; "
        with pytest.raises(CommTimeoutError, match=expected):
            transport_selection.select(store, rank, [0, 1, 2], "ucx", True)


@pytest.mark.parametrize("hosts", ["a a a", "a a b"])
def test_ranks_of_unlike_versions_make_no_group(hosts: str) -> None:
    """A field that one version adds to the description of a call would be data to another version."""

    def body() -> str:
        if dist.get_rank() == 1:
            handshake.PROTOCOL += 1
        with pytest.raises(RuntimeError) as caught:
            dist.new_group()
        return str(caught.value)

    for rank, text in enumerate(span(hosts, body)):
        assert text.startswith(f"rank {rank}: the group cannot be made: rank 0 has dist_prims ")
        assert re.search(r"\(protocol (\d+)\), and rank 1 has dist_prims .* \(protocol (\d+)\); install", text)


@pytest.mark.parametrize("value", [2**40 + 1, 2**62, 2**63 - 1, -5, 0, "abc"])
def test_a_size_out_of_range_is_refused_before_anything_is_sent(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the shared memory is a multiple of it, which overflowed: all ranks died by SIGSEGV."""
    shown = re.escape(f"{value!r} is not a number of bytes from 1 to {2**40} (2**40)")
    with pytest.raises(ValueError, match=rf"BackendOptions\(slot_bytes=...\) or DIST_PRIMS_SLOT_BYTES: {shown}"):
        dist_prims.BackendOptions(slot_bytes=value)
    monkeypatch.setenv("DIST_PRIMS_SLOT_BYTES", str(value))
    store = dist.HashStore()
    with pytest.raises(ValueError, match=r"DIST_PRIMS_SLOT_BYTES: .* is not a number of bytes from 1 to"):
        dist.init_process_group("dist_prims", store=store, rank=1, world_size=2)
    assert not store.check(["0//cpu//dist_prims/hello/1"])
    assert not dist.is_initialized()
    if value:
        with pytest.raises(ValueError, match=r"BackendOptions\(one_shot_bytes=...\): .* from 0 to"):
            dist_prims.BackendOptions(one_shot_bytes=value)


def attempt() -> Any:
    """A backend of this process alone, under a name that another one may have."""
    store, limit, repairs = dist.HashStore(), timedelta(seconds=30), Repairs(print, str, print)
    request = GroupRequest(store, "0 after it", 0, 1, limit, [], None, Origin.SURVIVED, repairs)
    return create.make_group(request)


def test_a_group_is_found_after_the_end_of_another_one_of_its_name() -> None:
    """A torch with CUDA splits a group once for each kind of device, and keeps the first backend."""

    def body() -> None:
        first, second = attempt(), attempt()
        second.abort()
        del second
        gc.collect()
        assert create.made_group("0 after it").request.name == first.options.group_name

    dist_prims.spawn(body, 1, timeout=60)


def test_an_attempt_that_ends_late_does_not_replace_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair tries again under the same name when its time is up. The earlier attempt succeeded then, was discarded,
    and took with it what was known about the living group: the next grow() raised KeyError."""
    make_handshake, is_waiting, go_on = create._handshake, threading.Event(), threading.Event()

    def slow_at_first(*args: Any) -> Any:
        if not is_waiting.is_set():
            is_waiting.set()
            assert go_on.wait(30)
        return make_handshake(*args)

    def body() -> None:
        monkeypatch.setattr(create, "_handshake", slow_at_first)
        late: list[Any] = []
        thread = threading.Thread(target=lambda: late.append(attempt()))
        thread.start()
        assert is_waiting.wait(30)
        living = attempt()
        go_on.set()
        thread.join(30)
        late.pop().abort()
        gc.collect()
        assert create.made_group("0 after it").request.name == living.options.group_name

    dist_prims.spawn(body, 1, timeout=60)
