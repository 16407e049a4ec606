"""Ranks of one host in PID namespaces of their own, as containers of one pod: pids mean nothing between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import clean

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, dist_prims
from datetime import timedelta
from dist_prims.errors import PeerDiedError
meeting, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group(
    "dist_prims", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
assert not dist.group.WORLD._get_backend(torch.device("cpu")).spans_hosts
for tensor in (torch.ones(200_000), dist_prims.empty(200_000).fill_(1)):
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
dist.barrier()
if rank == 0:
    assert os.getpid() != 2
    os.kill(2, signal.SIGKILL)
else:
    assert os.getpid() == 2
    time.sleep(0.5)
total = torch.ones(4)
dist.all_reduce(total)
print("sum", total.tolist(), flush=True)
if rank == 1:
    os._exit(9)
began = time.monotonic()
try:
    dist.all_reduce(torch.ones(4))
except PeerDiedError as error:
    assert time.monotonic() - began < 25
    print(error, flush=True)
os._exit(0)
"""


def _missing() -> str:
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "there is no unshare; install util-linux"
    return "" if tried.returncode == 0 else f"no PID namespace may be made here: {tried.stderr.strip()}"


_reason = _missing()
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)


@pytest.mark.slow
def test_only_the_end_of_a_rank_is_taken_for_its_death(tmp_path: Path) -> None:
    """Rank 1 is process 2 of its namespace, and process 2 of the namespace of rank 0 ends before it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = []
    for rank, command in enumerate(['sleep 1000 & exec "$@"', '"$@"; true']):  # of the shell that is process 1
        program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "meeting"), str(rank)]
        shell = [*UNSHARE, "sh", "-c", command, "sh", *program]
        ranks.append(subprocess.Popen(shell, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        first, second = [each.communicate(timeout=100)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait(20)
    assert second == "sum [2.0, 2.0, 2.0, 2.0]\n"
    # The error contains no pid, which would be that of another process.
    assert first.startswith(second + "rank 0: rank 1 has died in all_reduce"), first
