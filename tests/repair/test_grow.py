"""grow() and join(): new ranks enter a running group, also after a failure, and some die on the way."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of
from survivors import join_at_rank_0, run_ranks

import dist_prims
from dist_prims.backend.create import made_group
from dist_prims.rendezvous.network import is_loopback, own_address
from dist_prims.rendezvous.secret import Secret, remember
from dist_prims.rendezvous.served import answers, serve_registers, served_store
from dist_prims.repair.grow import _given_options
from dist_prims.repair.meeting import open_meeting
from dist_prims.torch_compat import count_groups_from
from tests.repair.test_shrink import LIMIT, all_reduce_until_failure, die, lose, total, wait_until


def grow_to(size: int, place: str) -> dist.ProcessGroup | None:
    """Called by the running ranks, and by a new rank after it has joined: further ones may be admitted later."""
    deadline = time.monotonic() + LIMIT
    while (before := dist.get_world_size()) < size:
        assert dist_prims.grow(place) is dist.group.WORLD
        if dist.get_world_size() == before:
            late = torch.tensor([float(time.monotonic() > deadline)])
            dist.all_reduce(late)
            assert not late, f"the group still has {before} ranks"
    return dist.group.WORLD


@pytest.mark.parametrize(("running", "new"), [(2, 1), (3, 2), (1, 4)])
def test_new_ranks_join(running: int, new: int, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        if rank < running:
            join_at_rank_0(rank, running, tmp_path)
            grow_to(running + new, place)
            assert dist.get_rank() == rank
        else:
            dist_prims.join(place, timeout=LIMIT)
            grow_to(running + new, place)
        found = dist.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD), total()
        pair = dist.new_group([0, running])
        if dist.get_rank() in (0, running):
            assert total(pair) == 2
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, dist.get_rank())
        assert ranks == [*range(running + new)]
        return found

    size = running + new
    assert run_ranks(body, size, tmp_path, join=False) == [(size, [*range(size)], float(size))] * size


def test_without_new_ranks_the_group_stays(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.group.WORLD
        same = [dist_prims.grow(f"file://{tmp_path}/place") is group for _ in range(20)]
        return all(same), total()

    assert run_ranks(body, 3, tmp_path) == [(True, 3.0)] * 3


def test_a_group_shrinks_and_grows_again(tmp_path: Path) -> None:
    """Rank 0, which has served the stores, dies; then a new rank takes the free place."""
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        if rank == 3:
            dist_prims.join(place, timeout=LIMIT)
        else:
            join_at_rank_0(rank, 3, tmp_path)
            lose(rank == 0)
            dist_prims.shrink()
            grow_to(3, place)
        sums = [total()]
        if dist.get_rank() == 0:
            dist.barrier()
            die()
        dist.barrier()
        all_reduce_until_failure()
        dist_prims.shrink()
        return [*sums, total()]

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found == [-signal.SIGKILL, -signal.SIGKILL, [3, 2], [3, 2]]


def test_between_hosts(tmp_path: Path) -> None:
    """A group on one host becomes one on two hosts, which can be repaired."""
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = "aab"[rank]
        if rank == 2:
            dist_prims.join(place, timeout=LIMIT)
        else:
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            join_at_rank_0(rank, 2, tmp_path)
            grow_to(3, place)
        sums = [total()]
        lose(rank == 1)
        dist_prims.shrink()
        return [*sums, total()]

    assert run_ranks(body, 3, tmp_path, join=False) == [[3, 2], -signal.SIGKILL, [3, 2]]


def test_options_of_the_group_are_those_of_new_ranks(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        if rank == 2:
            dist_prims.join(place, timeout=LIMIT)
        else:
            options = dist_prims.BackendOptions(all_reduce="ring:1M-max", slot_bytes=1 << 16)
            store = dist.FileStore(f"{tmp_path}/store", 2)
            dist.init_process_group("dist_prims", store=store, rank=rank, world_size=2, pg_options=options)
            grow_to(3, place)
        return backend_of().algorithm(1 << 20), total()

    assert run_ranks(body, 3, tmp_path, join=False) == [("ring", 3.0)] * 3


def test_a_size_of_zero_is_an_option_of_new_ranks() -> None:
    """Zero was taken for "not given", so a new rank had another size than the running ranks."""
    options = dist_prims.BackendOptions(one_shot_bytes=0)
    assert dist_prims.BackendOptions(**_given_options(options)).one_shot_bytes == 0
    assert _given_options(dist_prims.BackendOptions()) == {}


@pytest.mark.parametrize("version", ["another version", "an earlier version"])
def test_a_new_rank_of_another_version_is_refused_at_once(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The running ranks tried to make the group again and again, and the new rank tried until its time was over.

    A rank of an earlier version announces no version.
    """
    place = f"file://{tmp_path}/place"
    module: Any = sys.modules["dist_prims.repair.meeting"]

    def announcement_of_earlier(secret: Secret | None, context: tuple[str, ...], *texts: str) -> str:
        return signed(secret, context, *(texts[:3] if context == ("waiting",) else texts))

    def body(rank: int) -> Any:
        if rank == 2:
            if version == "another version":
                monkeypatch.setattr(sys.modules["dist_prims.rendezvous.handshake"], "PROTOCOL", 99)
            else:
                monkeypatch.setattr(module, "signed", announcement_of_earlier)
            with pytest.raises(RuntimeError) as caught:
                dist_prims.join(place, timeout=LIMIT)
            return str(caught.value)
        join_at_rank_0(rank, 2, tmp_path)
        group = dist.group.WORLD
        assert group
        meeting = open_meeting(place, time.monotonic() + LIMIT)
        wait_until(lambda: meeting.add("waiting", 0) == 1)
        dist.barrier()
        assert [dist_prims.grow(place) is group for _ in range(2)] == [True, True]
        return total(), made_group(group.group_name).failed_grows

    signed = module.signed
    *running, refused_rank = run_ranks(body, 3, tmp_path, join=False)
    assert running == [(2, 0)] * 2
    reason = (
        rf"it has {r'dist_prims .* .protocol 99.' if version == 'another version' else version}, and the running ranks "
        r"have dist_prims .* \(protocol \d+\); install the same version of dist_prims for all ranks, and start that "
        "process again"
    )
    assert re.fullmatch(f"join: the running ranks refuse this process: {reason}", refused_rank)
    assert len(re.findall(f"that wants to join is refused: {reason}", capfd.readouterr().err)) == 1


def test_wrong_calls_of_join_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give file:///path, tcp://host:port, or a store"):
        dist_prims.join("nowhere")
    with pytest.raises(TimeoutError, match=r"none has called grow\(\)"):
        dist_prims.join(f"file://{tmp_path}/place", timeout=0.2)

    def body(rank: int) -> str:
        with pytest.raises(RuntimeError, match="only a new process can join"):
            dist_prims.join(f"file://{tmp_path}/place")
        return "refused"

    assert run_ranks(body, 1, tmp_path) == ["refused"]


def test_a_process_without_the_secret_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        monkeypatch.setenv("DIST_PRIMS_SECRET", "another secret, long enough" if rank == 2 else "the secret of the job")
        if rank == 2:
            with pytest.raises(TimeoutError, match="none has called grow"):
                dist_prims.join(place, timeout=1)
            return "refused"
        if rank == 3:
            dist_prims.join(place, timeout=LIMIT)
        else:
            join_at_rank_0(rank, 2, tmp_path)
            meeting = open_meeting(place, time.monotonic() + LIMIT)
            wait_until(lambda: meeting.add("waiting", 0) == 2)
            grow_to(3, place)
        return total()

    assert run_ranks(body, 4, tmp_path, join=False) == [3, 3, "refused", 3]
    assert "a process that wants to join is refused" in capfd.readouterr().err


def test_a_forked_child_keeps_nothing_of_what_its_parent_serves() -> None:
    """The destructor of a TCPStore waits for the thread of its server, which a forked child does not have."""

    def body() -> str:
        store, address = served_store("127.0.0.1")
        registers, _ = serve_registers("127.0.0.1", "group", b"")
        child = os.fork()
        if child == 0:
            gc.collect()
            with contextlib.suppress(BaseException):
                assert all(answers([address, registers], 10).values())  # the parent listens
            os._exit(0)
        deadline = time.monotonic() + LIMIT
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "the child does not end"
            time.sleep(0.01)
        store.set("key", "value")
        return store.get("key").decode()

    assert dist_prims.spawn(body, 1, timeout=100) == ["value"]


def test_groups_of_a_job_of_spawn_with_a_new_rank(tmp_path: Path) -> None:
    """The new rank does not know the secret of spawn, so groups that are made later use another one as well. It may
    have failed to make a group, which torch counted: its next new_group() had another name, and waited."""
    place = f"file://{tmp_path}/place"

    def join() -> None:
        count_groups_from(6)
        dist_prims.join(place, timeout=LIMIT)
        assert total(dist.new_group([0, 1, 2])) == 3
        dist.barrier()
        os._exit(0)

    def body() -> float:
        grow_to(3, place)
        found = total(dist.new_group([0, 1, 2]))
        dist.barrier()
        return found

    newcomer = multiprocessing.get_context("fork").Process(target=join, daemon=True)
    newcomer.start()
    try:
        assert dist_prims.spawn(body, 2, backend="dist_prims", timeout=LIMIT) == [3, 3]
        newcomer.join(LIMIT)
        assert newcomer.exitcode == 0
    finally:
        newcomer.kill()


@pytest.mark.parametrize("place", ["nowhere", "tcp://127.0.0.1:1"])
def test_a_place_that_cannot_be_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone uses it. All ranks raise, and keep their group."""
    monkeypatch.setattr(sys.modules["dist_prims.repair.grow"], "TIME_FOR_MEETING", 0.5)

    def body(rank: int) -> Any:
        expected: type[Exception] = dist_prims.MismatchError
        if rank == 0:
            expected = ValueError if place == "nowhere" else TimeoutError
        with pytest.raises(expected):
            dist_prims.grow(place)
        return total()

    assert run_ranks(body, 2, tmp_path) == [2, 2]


def test_ranks_with_a_secret_of_their_launcher_do_not_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts a new rank without the secret was admitted, and the new group had none."""
    if is_loopback(own_address()):
        pytest.skip("this host has a loopback address only, at which the ranks of a user have a secret")
    for name in ("DIST_PRIMS_SECRET", "DIST_PRIMS_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)

    def body(rank: int) -> Any:
        os.environ["DIST_PRIMS_HOST_ID"] = "ab"[rank]
        remember(Secret(b"k" * 32, "MPI", is_of_launcher=True))
        dist.init_process_group("dist_prims", init_method=f"file://{tmp_path}/start", rank=rank, world_size=2)
        with pytest.raises(RuntimeError, match="have a secret of their launcher, which a new rank cannot know"):
            dist_prims.grow(f"file://{tmp_path}/place")
        return total()

    assert run_ranks(body, 2, tmp_path, join=False) == [2, 2]
