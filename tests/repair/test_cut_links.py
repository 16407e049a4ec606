"""Links between hosts that fail while both hosts live, and hosts that vanish: whom errors name, and who goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from netns import Job, cluster, needs_hosts

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(240)]

# Each rank does collectives until an error, and then as many in the group of those that are left.
PROGRAM = """
import os, subprocess, sys
import numpy.ma  # which the choice of a schedule would import, with a descriptor
import torch, torch.distributed as dist
import dist_prims

def run(host, local, ranks):
    world = ranks * int(os.environ["HOSTS"])
    place = {"RANK": host * ranks + local, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    dist_prims.init("dist_prims", timeout=float(sys.argv[1]))
    rank = dist.get_rank()
    steps(int(os.environ["STEPS"]))
    print(f"{rank}: begins", flush=True)
    if local == 0 and len(sys.argv) > 2 + host:
        for command in filter(None, sys.argv[2 + host].split(";")):
            free = os.dup(0)
            os.close(free)
            subprocess.run(command.format(pid=os.getpid(), free=free).split(), check=True)
    try:
        steps(100_000)
    except dist_prims.CommError as error:
        print(f"{rank}: fails with {type(error).__name__} {error}", flush=True)
    try:
        dist_prims.shrink(timeout=100)
        steps(5)
        print(f"{rank}: ends as {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    except dist_prims.CommError as error:
        print(f"{rank}: ends with {type(error).__name__} {error}", flush=True)
    sys.stdin.read()  # rank 0 serves a store

def steps(count):
    size = dist.get_world_size()
    for _ in range(count):
        for elements in (2, 250_000):
            total = torch.ones(elements)
            dist.all_reduce(total)
            assert (total == size).all()
        received = torch.empty(size * 50_000)
        dist.all_to_all_single(received, torch.full((size * 50_000,), float(dist.get_rank())))
        assert (received.view(size, -1)[:, -1] == torch.arange(size)).all()

ranks = int(os.environ["RANKS"])
for local in range(ranks):
    if os.fork() == 0:
        run(int(os.environ["HOST"]), local, ranks)
        os._exit(0)
for _ in range(ranks):
    os.wait()
"""


def outcomes(
    folder: Path,
    hosts: int,
    ranks: int,
    fault: Callable[[Job], object],
    ending: int,
    commands: Mapping[int, str] | None = None,
    timeout: float = 4,
    steps: int = 3,
) -> tuple[dict[int, str], dict[int, str]]:
    """What the ranks say of the error and of the group after it, when so many have ended. ``commands``: what a host
    runs when the ranks have begun, after ``steps`` steps."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    of_hosts = [(commands or {}).get(host, "") for host in range(hosts)]
    command = [sys.executable, str(program), str(timeout), *of_hosts]
    env = {"DIST_PRIMS_SECRET": "x" * 32, "DIST_PRIMS_QUIET": "1", "STEPS": str(steps)}
    with cluster(hosts, ranks, command, how="each", rate="1gbit", timeout=200, env=env) as job:
        job.wait_for(": begins", hosts * ranks)
        fault(job)
        job.wait_for(": ends ", ending, timeout=80)
        text = job.stdout.read_text()
    failed, ended = (
        {int(rank): words for rank, words in re.findall(rf"^(\d+): {what} (.*)$", text, re.MULTILINE)}
        for what in ("fails with", "ends")
    )
    return failed, ended


def check_cut(failed: Mapping[int, str], first: int, second: int) -> None:
    """All ranks name the same link, and none of them the other ranks."""
    link = f"rank {second} on host host{second} cannot be reached from rank {first} on host host{first}"
    back = f"rank {first} on host host{first} cannot be reached from rank {second} on host host{second}"
    for rank, text in failed.items():
        assert text.startswith(f"CommError rank {rank}: no rank is late, but "), text
        assert link in text or back in text, text
        assert "tag" not in text, text  # it was that of an internal message


UNREACHABLE = {2: "ip rule add to 10.0.0.4 unreachable pref 0", 3: "ip rule add to 10.0.0.3 unreachable pref 0"}
_NOWHERE = "ip neigh replace 10.0.0.{} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
SILENT = {0: _NOWHERE.format(3), 2: _NOWHERE.format(1)}


@pytest.mark.parametrize(("hosts", "commands", "cut"), [(4, UNREACHABLE, (2, 3)), (3, SILENT, (0, 2))])
def test_of_two_hosts_that_cannot_reach_each_other_one_is_left_out(
    hosts: int, commands: Mapping[int, str], cut: tuple[int, int], tmp_path: Path
) -> None:
    """The ranks blamed a healthy rank, each another one, and shrink() tried to make a group of all."""
    failed, ended = outcomes(tmp_path, hosts, 1, lambda _: None, hosts, commands)
    check_cut(failed, *cut)
    last = hosts - 1
    assert {rank: ended[rank] for rank in range(last)} == {rank: f"as {rank} of {last}" for rank in range(last)}
    reason = rf"gone on without this rank, whose host cannot reach the hosts of the ranks \[{cut[0]}\]"
    assert re.match("with LeftOutError", ended[last]), ended
    assert re.search(reason, ended[last]), ended


def test_a_host_whose_link_drops_large_packets_is_left_out(tmp_path: Path) -> None:
    """Each rank answers, so each was to blame in turn, and shrink() left out none of them."""
    failed, ended = outcomes(tmp_path, 3, 1, lambda job: job.limit(1, 1400), 3)
    assert all("cannot be reached" in text and "host host1" in text for text in failed.values()), failed
    assert {rank: ended[rank] for rank in (0, 2)} == {0: "as 0 of 2", 2: "as 1 of 2"}, (failed, ended)
    assert "LeftOutError" in ended[1]


def test_all_ranks_of_a_host_that_vanishes_are_left_out_at_once(tmp_path: Path) -> None:
    """shrink() waited for its timeout, here 100 s, for the ranks of the host that the error did not name."""
    failed, ended = outcomes(tmp_path, 3, 2, lambda job: job.cut(2), 4)
    assert all(re.search(r"rank [45] on host host2 has not replied", failed[rank]) for rank in range(4)), failed
    assert ended == {rank: f"as {rank} of 4" for rank in range(4)}


def test_a_rank_asks_its_own_registers_without_its_network(tmp_path: Path) -> None:
    """Two ranks are left of three that serve registers, so both are needed. Rank 1, which cannot connect to its own
    address, found no majority."""
    _, ended = outcomes(tmp_path, 3, 1, lambda job: job.cut(2), 2, {1: "ip link set lo down"})
    assert {rank: ended[rank] for rank in range(2)} == {rank: f"as {rank} of 2" for rank in range(2)}


def test_a_rank_without_descriptors_is_named_and_left_out(tmp_path: Path) -> None:
    """The others blamed the rank that it could not reach, as dead. Its shrink() raised an OSError."""
    starve = {1: "prlimit --pid {pid} --nofile={free}:"}
    failed, ended = outcomes(tmp_path, 3, 2, lambda _: None, 6, starve, steps=0)
    for rank, text in failed.items():
        assert re.search(rf"rank {rank}: rank 2 on host host1 has no file descriptor left", text), failed
    left = [0, 1, 3, 4, 5]
    assert {rank: ended[rank] for rank in left} == {rank: f"as {left.index(rank)} of 5" for rank in left}, ended
    assert re.search("rank 2: this process has no file descriptor left", ended[2]), ended
