"""Hosts that are slow, and hosts that vanish while no rank waits for them: what the other ranks say, and when."""

from __future__ import annotations

import re
import sys

import pytest
from netns import cluster, needs_hosts
from transports import require

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


# The timeout is longer than the test: an error comes from the probes alone. Rank 2 vanishes while rank 0 computes and
# rank 1 waits.
VANISHES = """
dist_prims.init("dist_prims", timeout=1000)
total = torch.ones(2)
dist.all_reduce(total)
if rank == 0:
    dist.isend(torch.ones(4_000_000), 2)
time.sleep(10)  # longer than the limit
if rank == 2:
    dist.recv(torch.empty(4_000_000), 0)
dist.all_reduce(total)
print("begins", flush=True)
if rank == 2:
    time.sleep(100)
time.sleep(10 if rank == 0 else 0)
try:
    dist.all_reduce(total)
except dist_prims.CommError as error:
    print(f"{rank}: {type(error).__name__} {error}", flush=True)
dist_prims.shrink(timeout=1000)
dist.all_reduce(total)
print(f"{rank}: ends as {dist.get_rank()} of {dist.get_world_size()}", flush=True)
"""


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_host_that_vanishes_while_ranks_compute_is_noticed_before_a_timeout(transport: str) -> None:
    """The next call noticed it, after its timeout. A rank that reads nothing for longer than the limit is not lost."""
    require(transport)
    env = {**SECRET, "DIST_PRIMS_KEEPALIVE": "6", "DIST_PRIMS_TRANSPORT": transport}
    with cluster(3, 1, [sys.executable, "-c", INIT + VANISHES], how="each", timeout=140, env=env) as job:
        job.wait_for("begins", 3)
        job.cut(2)
        job.wait_for("ends as", 2, timeout=90)
        said = job.stdout.read_text()
    for rank in range(2):
        words = rf"^{rank}: CommError rank {rank}: .*rank 2 on host host2 cannot be reached"
        assert re.search(words, said, re.MULTILINE), said
        assert f"{rank}: ends as {rank} of 2" in said, said


RECEIVES_FROM_ANY = """
dist_prims.init("dist_prims", timeout=1000)
dist.all_reduce(torch.ones(2))
print("begins", flush=True)
try:
    if rank == 0:
        dist.recv(torch.empty(2))
    time.sleep(100)
except dist_prims.CommError as error:
    print(f"{rank}: {type(error).__name__} {error}", flush=True)
"""


def test_a_receive_from_any_rank_does_not_call_a_rank_dead_that_cannot_be_reached() -> None:
    """Only a receive from a named rank told the two apart."""
    env = {**SECRET, "DIST_PRIMS_KEEPALIVE": "6", "DIST_PRIMS_TRANSPORT": "tcp"}
    command = [sys.executable, "-c", INIT + RECEIVES_FROM_ANY]
    with cluster(2, 1, command, how="each", timeout=140, env=env) as job:
        job.wait_for("begins", 2)
        job.cut(1)
        job.wait_for("0: CommError", timeout=60)
        said = job.stdout.read_text()
    assert "rank 1 on host host1 cannot be reached from rank 0" in said, said
