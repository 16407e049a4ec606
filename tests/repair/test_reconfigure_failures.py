"""``reconfigure`` of torch 2.15 with wrong arguments, and with members that die, stop, or wait elsewhere."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reconfigured import Meeting, needs_reconfigure, place, reconfigure, reconfigured, start, total
from survivors import run_ranks

from dist_prims.errors import CommError, PeerDiedError, PeerLeftError
from dist_prims.rendezvous import served
from tests.repair.test_shrink import all_reduce_until_failure, die

pytestmark = needs_reconfigure


def test_wrong_arguments(tmp_path: Path) -> None:
    """The error comes before the group ends, and the uuid can be used."""

    def body(rank: int) -> Any:
        _, handles = reconfigured(rank, 2, tmp_path)
        for uuid, wrong, message in (
            (2, [], "is not among those of the members"),
            (2, [handles[1 - rank]], "is not among those of the members"),
            (2, [*handles, handles[0]], "listed twice"),
            (2, [*handles, "gloo:0:1:0:"], "'gloo:0:1:0:' is no handle of this backend"),
            (1, handles, "uuid 1 was already used"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=message):
                reconfigure(uuid, wrong)
            assert total() == 2
        reconfigure(2, handles)
        return total()

    assert run_ranks(body, 2, tmp_path, join=False) == [2, 2]


def test_members_that_disagree(tmp_path: Path) -> None:
    """No group is made, no rank waits for longer than the timeout, and a further call makes the group."""

    def body(rank: int) -> Any:
        start(rank, 3, tmp_path)
        meeting = Meeting(tmp_path)
        handles = meeting.handles(rank, range(3))
        mine = handles if rank < 2 else [handles[0], handles[2], handles[1]]
        began = time.monotonic()
        expected = "passed other handles with this uuid|call reconfigure again with another uuid"
        with pytest.raises((ValueError, CommError), match=expected) as found:
            reconfigure(1, mine, seconds=3)
        outcome = found.type
        assert time.monotonic() - began < 30
        meeting.barrier("failed", rank, range(3))
        reconfigure(2, handles)
        return outcome, total()

    found = run_ranks(body, 3, tmp_path, join=False)
    assert [each[1] for each in found] == [3, 3, 3]
    assert {each[0] for each in found} == {ValueError, CommError}


@pytest.mark.parametrize(("layout", "dead"), [("aaa", 0), ("aaa", 2), ("abc", 2)])
def test_a_member_that_has_died(layout: str, dead: int, tmp_path: Path) -> None:
    """The others do not wait for the timeout, and go on without it."""

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = layout[rank]
        _, handles = reconfigured(rank, 3, tmp_path)
        dist.barrier()
        if rank == dead:
            die()
        all_reduce_until_failure()
        began = time.monotonic()
        with pytest.raises(PeerDiedError, match=f"rank {dead} has died|process of new rank {dead} has ended"):
            reconfigure(2, handles, seconds=60)
        assert time.monotonic() - began < 30
        with pytest.raises(RuntimeError, match="the group has been destroyed"):
            dist.all_reduce(torch.ones(1))
        handles.pop(dead)
        reconfigure(3, handles)
        return place()

    found = run_ranks(body, 3, tmp_path, join=False)
    assert found.pop(dead) == -signal.SIGKILL
    assert found == [(0, 2, 2), (1, 2, 2)]


def test_a_member_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which the store answers is part of the limit: the error came too late to be the one raised."""
    module = importlib.import_module("dist_prims.repair.reconfigure")
    open_store = module.open_store

    def open_late(*args: Any) -> Any:
        time.sleep(0.7)
        return open_store(*args)

    def body(rank: int) -> Any:
        start(rank, 3, tmp_path)
        monkeypatch.setattr(module, "open_store", open_late)
        meeting = Meeting(tmp_path)
        handles = meeting.handles(rank, range(3))
        if rank < 2:
            began = time.monotonic()
            with pytest.raises(CommError, match=r"no sign of ranks \[2\]"):
                reconfigure(1, handles, seconds=2)
            assert 1.9 < time.monotonic() - began < 30
        meeting.barrier("late", rank, range(3))
        reconfigure(2, handles)
        return total()

    assert run_ranks(body, 3, tmp_path, join=False) == [3, 3, 3]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_dies_as_it_makes_the_group(victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rank 0 serves the store. TCPStore tries for a long time to connect to a process that has ended: the others
    notice its death meanwhile."""
    module = importlib.import_module("dist_prims.repair.reconfigure")
    connect = served.connect

    def body(rank: int) -> Any:
        meeting, handles = reconfigured(rank, 3, tmp_path)
        meeting.barrier("before", rank, range(3))  # or the death of rank 0 could end the first reconfigure() of others
        if rank == victim:
            monkeypatch.setattr(module, "make_group", lambda *_, **__: die())
        elif victim == 0:
            monkeypatch.setattr(served, "connect", lambda *_: time.sleep(100))
        began = time.monotonic()
        with pytest.raises(CommError):
            reconfigure(2, handles, seconds=60)
        assert time.monotonic() - began < 30
        monkeypatch.setattr(served, "connect", connect)
        handles.pop(victim)
        reconfigure(3, handles)
        return place()

    found = run_ranks(body, 3, tmp_path, join=False)
    assert found.pop(victim) == -signal.SIGKILL
    assert found == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(("victim", "delay"), [(1, 0.05), (0, 0.3), (3, 0.6)])
def test_a_rank_dies_at_some_moment(victim: int, delay: float, tmp_path: Path) -> None:
    """The others go on without it, whatever call it was in; some may have made a group that others have not."""

    def body(rank: int) -> Any:
        start(rank, 4, tmp_path)
        handles = Meeting(tmp_path).handles(rank, range(4))
        reconfigure(0, handles)
        if rank == victim:
            threading.Timer(delay, die).start()

        def work() -> None:
            for uuid in range(1, 1000):
                reconfigure(uuid, handles)
                assert total() == 4

        began = time.monotonic()
        with pytest.raises(CommError):
            work()
        handles.pop(victim)
        reconfigure(1000, handles)
        assert time.monotonic() - began < 40
        return place()

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found.pop(victim) == -signal.SIGKILL
    assert found == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


def test_ranks_that_wait_in_the_old_group(tmp_path: Path) -> None:
    """A rank that waits for one that reconfigures gets an error, and can call as well; asynchronous calls raise, also
    on a thread that waits already."""

    def body(rank: int) -> Any:
        _, handles = reconfigured(rank, 3, tmp_path)
        if rank == 0:
            pending: list[Any] = [dist.all_reduce(torch.ones(1), async_op=True), dist.irecv(torch.ones(1), 2)]
            with ThreadPoolExecutor() as threads:
                waiting = threads.submit(pending[0].wait)
                time.sleep(0.5)
                reconfigure(2, handles)
                with pytest.raises(CommError):
                    waiting.result(30)
            for each in pending:
                with pytest.raises(PeerLeftError):
                    each.wait()
        else:
            with pytest.raises(PeerLeftError):
                dist.recv(torch.ones(1), 0) if rank == 1 else dist.broadcast(torch.ones(1), 0)
            reconfigure(2, handles)
        return total()

    assert run_ranks(body, 3, tmp_path, join=False) == [3, 3, 3]


def test_reconfigure_works_after_an_abort(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        _, handles = reconfigured(rank, 3, tmp_path)
        total()
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        reconfigure(2, handles)
        return total()

    assert run_ranks(body, 3, tmp_path, join=False) == [3, 3, 3]


def test_a_stopped_member_does_not_stop_the_others(tmp_path: Path) -> None:
    """It serves the store: the call ends at its timeout. The stopped rank wakes in a group that has ended."""

    def body(rank: int) -> Any:
        meeting, handles = reconfigured(rank, 3, tmp_path)
        if rank == 0:
            meeting.write("pid", str(os.getpid()))
            meeting.read("done")
            with pytest.raises(CommError):
                dist.all_reduce(torch.ones(1))
            return "left"
        pid = int(meeting.read("pid"))
        if rank == 1:
            os.kill(pid, signal.SIGSTOP)
            meeting.write("stopped")
        meeting.read("stopped")
        began = time.monotonic()
        with pytest.raises(CommError):
            reconfigure(2, handles, seconds=2)
        assert time.monotonic() - began < 30
        reconfigure(3, handles[1:])
        found = place()
        if rank == 1:
            os.kill(pid, signal.SIGCONT)
            meeting.write("done")
        return found

    assert run_ranks(body, 3, tmp_path, join=False) == ["left", (0, 2, 2), (1, 2, 2)]
