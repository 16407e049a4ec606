"""``reconfigure`` of torch 2.15 between hosts; the ranks are on one machine, with different host ids."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import free_port
from ranks import backend_of
from reconfigured import Meeting, needs_reconfigure, place, reconfigure, reconfigured, start, total
from survivors import run_ranks

from dist_prims.backend.create import find_made_group
from dist_prims.rendezvous.network import is_loopback, own_address
from dist_prims.rendezvous.secret import Secret, remember
from tests.repair.test_shrink import all_reduce_until_failure, die

pytestmark = needs_reconfigure


def without_secret_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_loopback(own_address()):
        pytest.skip("this host has a loopback address only, at which the ranks of a user have a secret")
    for name in ("DIST_PRIMS_SECRET", "DIST_PRIMS_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def on_host(name: str) -> None:
    os.environ["DIST_PRIMS_HOST_ID"] = name


def test_between_hosts(tmp_path: Path) -> None:
    """A group of one host becomes one of two hosts; a rank dies; a new rank takes its place on a third host."""

    def body(rank: int) -> Any:
        on_host("aabbc"[rank])
        meeting = Meeting(tmp_path)
        start(rank, 4, tmp_path) if rank < 4 else start(0, 1, tmp_path, "new")
        handles = meeting.handles(rank, range(5))
        if rank < 2:
            reconfigure(1, handles[:2])
            assert total() == 2
        if rank < 4:
            reconfigure(2, handles[:4])
            assert total() == 4
            backend = backend_of()
            assert backend.spans_hosts
            assert backend.transport == "tcp"
            if rank == 0:
                die()
            all_reduce_until_failure()
        reconfigure(3, [handles[4], *handles[1:4]])
        assert total() == 4
        token = torch.tensor([dist.get_rank()])
        dist.broadcast(token, 3)
        if dist.get_rank() == 0:
            dist.send(token + 4, 3)
        elif dist.get_rank() == 3:
            dist.recv(token, 0)
            assert token == 7
        return place()

    found = run_ranks(body, 5, tmp_path, join=False)
    assert found == [-signal.SIGKILL, (1, 4, 4), (2, 4, 4), (3, 4, 4), (0, 4, 4)]


def test_members_with_the_secret_of_one_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group between hosts is authenticated by it, and so is one that is made later."""
    without_secret_of_the_user(monkeypatch)

    def body(rank: int) -> Any:
        on_host("ab"[rank])
        remember(Secret(b"k" * 32, "MPI", is_of_launcher=True))
        reconfigured(rank, 2, tmp_path)
        world: Any = dist.group.WORLD
        found = [find_made_group(each) for each in (world, dist.new_group([0, 1]))]
        return [made is not None and made.key != b"" for made in found], total()

    assert run_ranks(body, 2, tmp_path, join=False) == [([True, True], 2)] * 2


def test_a_member_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a secret does not join one that has none; the user can provide one for both."""
    without_secret_of_the_user(monkeypatch)

    def body(rank: int) -> Any:
        on_host("ab"[rank])
        if rank == 0:
            remember(Secret(b"k" * 32, "MPI", is_of_launcher=True))
        start(rank, 2, tmp_path)
        handles = Meeting(tmp_path).handles(rank, range(2))
        with pytest.raises(RuntimeError, match="does not have the secret" if rank == 0 else "reconfigure again"):
            reconfigure(1, handles, seconds=2)
        os.environ["DIST_PRIMS_SECRET"] = "0123456789abcdef"
        reconfigure(2, handles)
        world: Any = dist.group.WORLD
        made = find_made_group(world)
        assert made
        return made.key != b"", total()

    assert run_ranks(body, 2, tmp_path, join=False) == [(True, 2)] * 2


def test_a_warning_that_the_group_loses_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The secret of a user for one host authenticates the first group; a group between hosts cannot have it."""
    without_secret_of_the_user(monkeypatch)
    monkeypatch.setenv("DIST_PRIMS_QUIET", "1")  # no line about the store that the ranks start with
    port = free_port()

    def body(rank: int) -> Any:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("dist_prims", address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        world: Any = dist.group.WORLD
        first = find_made_group(world)
        assert first
        assert first.key
        reconfigure(1, Meeting(tmp_path).handles(rank, range(2)))
        second = find_made_group(world)
        assert second
        return second.key, total()

    assert run_ranks(body, 2, tmp_path, join=False) == [(b"", 2)] * 2
    assert capfd.readouterr().err.count("the members are no longer authenticated") == 1
