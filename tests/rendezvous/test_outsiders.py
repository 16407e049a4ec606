"""Processes that do not have the secret of a job, and try to join it over its own ports; the job itself completes."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import clean, free_port, listening
from transports import require

import dist_prims
from dist_prims.rendezvous import served
from dist_prims.rendezvous.deadline import until
from dist_prims.rendezvous.network import own_address

FORK: Any = multiprocessing.get_context("fork")
OTHER_USER = 65534


def end_of(act: Callable[[], str], home: Path, **environ: str) -> tuple[Any, Any]:
    """Start a process that acts in an environment of its own: the process, and where it tells how it ended."""
    mine, theirs = FORK.Pipe(duplex=False)

    def run() -> None:
        os.environ.clear()
        os.environ.update(clean(HOME=str(home), XDG_CACHE_HOME=str(home), DIST_PRIMS_QUIET="1", **environ))
        torch.set_num_threads(1)
        try:
            theirs.send(act())
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    return process, mine


def result_of(started: tuple[Any, Any]) -> str:
    process, pipe = started
    try:
        assert pipe.poll(60), "no result"
        return str(pipe.recv())
    finally:
        process.kill()
        process.join()


def joins(url: str, rank: int, by: str, seconds: float) -> str:
    """Join by torch's own call, or by dist_prims.init with a backend."""
    if by == "init_process_group":
        limit = timedelta(seconds=seconds)
        dist.init_process_group("dist_prims", init_method=url, rank=rank, world_size=2, timeout=limit)
    else:
        dist_prims.init(by, init_method=url, rank=rank, world_size=2, timeout=seconds)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    size = dist.get_world_size()
    dist.destroy_process_group()
    return f"{total.item()} of {size}"


def ports_of(pid: int) -> set[int]:
    """The ports at which a process listens."""
    return {int(address.rpartition(":")[2], 16) for address in listening(pid)}


def become_another_user() -> None:
    "x".encode("idna")  # imports what the other user may not read
    os.setgroups([])
    os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("by", "outsider"),
    [
        ("gloo", "another user"),
        ("dist_prims", "another user"),
        ("dist_prims", "another secret"),
        ("init_process_group", "another secret"),
    ],
)
def test_a_process_without_the_secret_cannot_join(by: str, outsider: str, tmp_path: Path) -> None:
    """The secret of the environment, as ranks of several hosts have it. On one host the ranks of a user find their
    secret in a file that other users cannot read.

    A rank that rank 0 refuses waits until its timeout, which is therefore short, and is for the answer of rank 0 alone.
    Once it was for the start of rank 0 as well, and a TCPStore of torch made its last attempt to connect too early.
    """
    secret = secrets.token_hex(32)
    ours, theirs, home = {"DIST_PRIMS_SECRET": secret}, {"DIST_PRIMS_SECRET": "x" * 32}, Path(mkdtemp())
    if is_another_user := outsider == "another user":
        if os.geteuid() != 0:
            pytest.skip("only root can start a process of another user")
        ours = theirs = {}
        os.chown(home, OTHER_USER, OTHER_USER)
    url = f"tcp://127.0.0.1:{(port := free_port())}"

    def intrude() -> str:
        if is_another_user:
            become_another_user()
        return joins(url, 1, by, 2)

    rank_0 = end_of(lambda: joins(url, 0, by, 40), tmp_path, **ours)
    until(lambda: port in ports_of(rank_0[0].pid), time.monotonic() + 40, "the store of rank 0")
    refused = result_of(end_of(intrude, home, **theirs))
    rmtree(home)
    assert "rank 0 has another secret than this rank" in refused
    assert secret not in refused
    if by == "init_process_group":  # a TCPStore of torch counts its clients
        rank_0[0].kill()
        rank_0[0].join()
        return
    assert not rank_0[1].poll(0)
    rank_1 = end_of(lambda: joins(url, 1, by, 40), tmp_path, **ours)
    assert [result_of(rank_1), result_of(rank_0)] == ["3 of 2", "3 of 2"]


def test_ranks_of_two_users_share_no_memory(tmp_path: Path) -> None:
    """The kernel tells each rank the user of the other. The ranks were taken for ranks of one host, accepted no shared
    memory of each other, and had "no sign of" each other until the timeout.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    url, secret = f"tcp://127.0.0.1:{free_port()}", {"DIST_PRIMS_SECRET": secrets.token_hex(32)}

    def other_user() -> str:
        become_another_user()
        return joins(url, 1, "init_process_group", 40)

    rank_0 = end_of(lambda: joins(url, 0, "init_process_group", 40), tmp_path, **secret)
    rank_1 = end_of(other_user, tmp_path, **secret)
    assert [result_of(rank_1), result_of(rank_0)] == ["3 of 2", "3 of 2"]


def greetings(port: int, count: int) -> None:
    """Connections to a port that send garbage, or the beginning of a greeting, or nothing."""
    for number in range(count):
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if number % 8:
                connection.sendall(secrets.token_bytes(1 + number % 96))


def greet_an_established_group(transport: str, count: int) -> list[Any]:
    """What the ranks of a group on two hosts get, while another process sends greetings to all their ports."""

    def rank() -> tuple[bool, int, int]:
        mine = "ab"[dist.get_rank()]
        dist.destroy_process_group()
        os.environ.update(DIST_PRIMS_HOST_ID=mine, DIST_PRIMS_TRANSPORT=transport)
        of_gloo = watch_ports_of_gloo()
        before = ports_of(os.getpid())
        dist_prims.init("dist_prims", timeout=60)
        dist.all_reduce(torch.ones(1))
        ports = ports_of(os.getpid()) - before - of_gloo
        if not served._servers:  # the port that shows that this process runs; nothing is accepted there
            ports.remove(int(served.listening_address(own_address()).rpartition(":")[2]))
        assert ports
        for port in ports:
            greetings(port, 100)
        descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
        outsiders = [FORK.Process(target=greetings, args=(port, count // (2 * len(ports)))) for port in ports]
        for each in outsiders:
            each.start()
        sums = [bool((all_reduced(step) == 2 * step + 1).all()) for step in range(50)]
        while any(each.is_alive() for each in outsiders):
            time.sleep(0.01)
        for each in outsiders:
            each.join()
            assert each.exitcode == 0
            each.close()
        sums += [bool((all_reduced(step) == 2 * step + 1).all()) for step in range(50)]
        dist.barrier()
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) > descriptors + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        return all(sums), len(os.listdir("/proc/self/fd")) - descriptors, resident() - memory

    return dist_prims.spawn(rank, 2, timeout=1000)


def watch_ports_of_gloo() -> set[int]:
    """The ports at which gloo will listen. It keeps every connection that has not sent what it waits for."""
    make, found = dist.ProcessGroupGloo, set()

    def making(*args: Any) -> Any:
        before = ports_of(os.getpid())
        made = make(*args)
        found.update(ports_of(os.getpid()) - before)
        return made

    dist.ProcessGroupGloo = making  # type: ignore[assignment,misc]
    return found


def all_reduced(step: int) -> torch.Tensor:
    tensor = torch.full((1000,), step + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.sampled(1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.long(minutes=1))])
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_group_works_while_random_bytes_arrive_at_its_ports(transport: str, count: int) -> None:
    require(transport)
    for right, descriptors, memory in greet_an_established_group(transport, count):
        assert right
        assert descriptors <= 2
        assert memory < 16 << 20
