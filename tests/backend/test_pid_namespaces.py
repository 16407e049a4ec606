"""Ranks of one host in PID namespaces of their own, as containers of one pod: pids mean nothing between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import clean

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
JOIN = """
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
"""


def _missing() -> str:
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "there is no unshare; install util-linux"
    return "" if tried.returncode == 0 else f"no PID namespace may be made here: {tried.stderr.strip()}"


_reason = _missing()
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)


def run_namespaces(folder: Path, program: str, commands: list[str]) -> list[str]:
    """What each of two ranks prints; a command, of the shell that is process 1 of its namespace, runs "$@"."""
    (folder / "program.py").write_text(JOIN + program)
    ranks = []
    for rank, command in enumerate(commands):
        program_of_rank = [sys.executable, str(folder / "program.py"), str(folder / "meeting"), str(rank)]
        shell = [*UNSHARE, "sh", "-c", command, "sh", *program_of_rank]
        ranks.append(subprocess.Popen(shell, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        return [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(20)


def test_a_death_is_seen(tmp_path: Path) -> None:
    program = """
if rank == 1:
    os._exit(9)
began = time.monotonic()
try:
    dist.all_reduce(torch.ones(4))
except PeerDiedError as error:
    assert time.monotonic() - began < 25
    print(error)
os._exit(0)
"""
    survivor, _ = run_namespaces(tmp_path, program, ['exec "$@"'] * 2)
    assert "rank 0: rank 1 has died in all_reduce" in survivor  # no pid is told: it would be that of another process


def test_the_end_of_another_process_is_not_taken_for_a_death(tmp_path: Path) -> None:
    """Rank 1 is process 2 of its namespace, and process 2 of the namespace of rank 0 ends."""
    program = """
if rank == 0:
    assert os.getpid() != 2
    os.kill(2, signal.SIGKILL)
else:
    assert os.getpid() == 2
    time.sleep(2)
total = torch.ones(4)
dist.all_reduce(total)
print("sum", total.tolist())
"""
    for output in run_namespaces(tmp_path, program, ['sleep 1000 & exec "$@"', '"$@"; true']):
        assert output == "sum [2.0, 2.0, 2.0, 2.0]\n", output
