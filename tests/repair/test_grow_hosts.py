"""grow() with new ranks on another host, a network namespace that does not reach the loopback address of the first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from netns import cluster, needs_hosts

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, dist_prims
place = "file://" + sys.argv[1]
if os.environ["HOST"] == "0":
    dist.init_process_group("dist_prims", store=dist.HashStore(), rank=0, world_size=1)
    deadline = time.monotonic() + 60
    while dist.get_world_size() == 1 and time.monotonic() < deadline:
        dist_prims.grow(place)
else:
    dist_prims.join(place, timeout=60)
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2, total
dist.barrier()
dist.destroy_process_group()
"""


@needs_hosts
@pytest.mark.timeout(240)
def test_a_group_on_one_host_admits_a_rank_of_another(tmp_path: Path) -> None:
    """The store of the new group was at the loopback address, because the old group was on one host: each attempt
    failed. A group whose other hosts had been lost could not grow again."""
    with cluster(2, 1, [sys.executable, "-c", PROGRAM, str(tmp_path / "place")], how="each", timeout=200) as job:
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
