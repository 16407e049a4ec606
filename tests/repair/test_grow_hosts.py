"""grow() with new ranks on another host, a network namespace that does not reach the loopback address of the first."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from netns import cluster, needs_hosts

PROGRAM = """
import os, sys, torch, torch.distributed as dist, dist_prims
from dist_prims.launch.secret import Secret, remember

place, kind = "file://" + sys.argv[1], sys.argv[2]
refused = sys.argv[1] + ".refused"

def grow(*rank_and_size):
    if kind == "launcher":
        remember(Secret(b"k" * 32, "MPI", is_of_launcher=True))
    if rank_and_size:
        rank, size = rank_and_size
        store = dist.TCPStore("127.0.0.1", 29500, size, rank == 0) if size > 1 else dist.HashStore()
        dist.init_process_group("dist_prims", store=store, rank=rank, world_size=size)
    size, is_refused = dist.get_world_size(), torch.tensor(0)
    while dist.get_world_size() == size:
        is_refused.fill_(os.path.exists(refused))
        dist.all_reduce(is_refused, dist.ReduceOp.MAX)
        if is_refused:
            break
        dist_prims.grow(place)
    finish(size + (not is_refused))

def join():
    try:
        dist_prims.join(place, timeout=8 if kind in ("launcher", "spawn") else 90)
    except TimeoutError:
        open(refused, "w").close()
    else:
        finish(dist.get_world_size())

def finish(size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == size, total
    dist.barrier()
    dist.destroy_process_group()

def main():
    if os.environ["HOST"] == "1":
        join()
    elif kind == "spawn":
        dist_prims.spawn(grow, 2, backend="dist_prims", timeout=150)
    elif kind == "one rank":
        grow(0, 1)
    elif child := os.fork():
        grow(0, 2)
        assert os.waitpid(child, 0)[1] == 0
    else:
        grow(1, 2)

if __name__ == "__main__":
    main()
"""


def grow_on_host_0(folder: Path, kind: str) -> CompletedProcess[str]:
    """Run ``grow`` on host 0 and ``join`` on host 1; ``kind`` says how the ranks of host 0 have made their group."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder / "place"), kind]
    with cluster(2, 1, command, how="each", timeout=200) as job:
        return job.result()


@needs_hosts
@pytest.mark.timeout(240)
def test_a_group_on_one_host_admits_a_rank_of_another(tmp_path: Path) -> None:
    """The store of the new group was at the loopback address, because the old group was on one host: each attempt
    failed. A group whose other hosts had been lost could not grow again."""
    done = grow_on_host_0(tmp_path, "one rank")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_hosts
@pytest.mark.timeout(240)
def test_the_secret_of_the_user_for_one_host_refuses_no_rank(tmp_path: Path) -> None:
    """It was taken for that of a launcher. The ranks of a group between hosts get it when one host is left."""
    done = grow_on_host_0(tmp_path, "store at the loopback address")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ranks are no longer authenticated" in done.stderr


@needs_hosts
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("launcher", "the running ranks have a secret of their launcher, which a new rank cannot know"),
        ("spawn", "the running ranks listen at the loopback interface"),
    ],
)
def test_a_rank_that_is_refused_does_not_disturb_the_others(tmp_path: Path, kind: str, reason: str) -> None:
    """It made grow() raise, or the running ranks tried for its whole timeout to make a group with it."""
    done = grow_on_host_0(tmp_path, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"that wants to join is refused: {reason}" in done.stderr
