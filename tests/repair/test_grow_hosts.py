"""grow() with new ranks on another host, a network namespace that does not reach the loopback address of the first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from netns import cluster, needs_hosts

PROGRAM = """
import os, sys, time, traceback, torch, torch.distributed as dist, dist_prims
from dist_prims.rendezvous.secret import Secret, remember

KINDS = "one rank", "store at the loopback address", "launcher", "spawn"
REFUSING = KINDS[2:]

def grow(kind, *rank_and_size):
    place, running, refused = files(kind)
    if kind == "launcher":
        remember(Secret(b"k" * 32, "MPI", is_of_launcher=True))
    if rank_and_size:
        rank, size = rank_and_size
        store = dist.TCPStore("127.0.0.1", 29500, size, rank == 0) if size > 1 else dist.HashStore()
        dist.init_process_group("dist_prims", store=store, rank=rank, world_size=size)
    size, is_refused = dist.get_world_size(), torch.tensor(0)
    open(running, "w").close()
    while dist.get_world_size() == size:
        is_refused.fill_(os.path.exists(refused))
        dist.all_reduce(is_refused, dist.ReduceOp.MAX)
        if is_refused:
            break
        dist_prims.grow("file://" + place)
    finish(size + (not is_refused))

def join(kind):
    place, running, refused = files(kind)
    deadline = time.monotonic() + 60
    while not os.path.exists(running):
        assert time.monotonic() < deadline, "no group on host 0"
        time.sleep(0.01)
    try:
        dist_prims.join("file://" + place, timeout=1.5 if kind in REFUSING else 90)
    except TimeoutError:
        open(refused, "w").close()
    else:
        finish(dist.get_world_size())

def files(kind):
    place = f"{sys.argv[1]}/{kind}"
    return place, place + ".running", place + ".refused"

def finish(size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == size, total
    dist.barrier()
    dist.destroy_process_group()

def start(kind):
    if os.environ["HOST"] == "1":
        join(kind)
    elif kind == "spawn":
        dist_prims.spawn(grow, 2, (kind,), backend="dist_prims", timeout=150)
    elif kind == "one rank":
        grow(kind, 0, 1)
    elif child := os.fork():
        grow(kind, 0, 2)
        assert os.waitpid(child, 0)[1] == 0
    else:
        grow(kind, 1, 2)

def in_a_fork(kind):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, kind
        return
    status = 1
    try:
        start(kind)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

if __name__ == "__main__":
    for kind in KINDS:
        in_a_fork(kind)
"""
LOST = "the running ranks have a secret of their launcher, which a new rank cannot know"
UNREACHABLE = "the running ranks listen at the loopback interface"


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(240)
def test_a_group_on_one_host_admits_a_rank_of_another_or_refuses_it(tmp_path: Path) -> None:
    """Host 0 runs ``grow`` and host 1 ``join``, with groups that were made in four ways.

    - One rank: the store of the new group was at the loopback address, because the old group was on one host. Each
      attempt failed. A group whose other hosts had been lost could not grow again.
    - A store at the loopback address: the secret of the user for one host was taken for that of a launcher. The ranks
      of a group between hosts get it when one host is left.
    - A secret of the launcher, and spawn: the new rank is refused. It made grow() raise, or the running ranks tried for
      its whole timeout to make a group with it.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with cluster(2, 1, [sys.executable, str(program), str(tmp_path)], how="each", timeout=200) as job:
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ranks are no longer authenticated" in done.stderr
    for reason in (LOST, UNREACHABLE):
        assert f"that wants to join is refused: {reason}" in done.stderr
