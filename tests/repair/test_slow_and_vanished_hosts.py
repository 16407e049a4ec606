"""Hosts that are slow, and hosts that vanish while no rank waits for them: what the other ranks say, and when."""

from __future__ import annotations

import re
import sys

import pytest
from netns import cluster, needs_hosts

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(150)]

SECRET = {"DIST_PRIMS_SECRET": "x" * 32, "DIST_PRIMS_QUIET": "1"}
INIT = """
import os, sys, time, torch, torch.distributed as dist, dist_prims
rank = int(os.environ["HOST"])
os.environ.update(RANK=str(rank), WORLD_SIZE=os.environ["HOSTS"], MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
torch.set_num_threads(1)
"""

SUMS = """
dist_prims.init("dist_prims", timeout=20)
dist.all_reduce(torch.ones(250_000))
print("begins", flush=True)
while True:
    dist.all_reduce(torch.ones(1_000_000))
"""


def test_a_slow_host_is_reported_with_its_rate() -> None:
    """No rank printed anything, as long as the call did not fail. A rank on a fast host says nothing of another one."""
    with cluster(3, 1, [sys.executable, "-c", INIT + SUMS], how="each", rate="1gbit", timeout=100, env=SECRET) as job:
        job.wait_for("begins", 3)
        job.slow(2, "4mbit")
        job.wait_for("gets 0.", 2, stream="stderr")
        said = job.stderr.read_text()
    line = r"^dist_prims: rank {}: all_reduce\(SUM.* as call number \d+: \d+ s so far, the timeout is 20 s; {} .*rank$"
    assert re.search(line.format("[01]", r"rank 2 on host host2 gets 0\.\d\d MB/s"), said, re.MULTILINE), said
    assert not re.search(line.format("[01]", "rank [01] on"), said, re.MULTILINE), said
