"""Ranks under a real SLURM, started by srun and sbatch: nothing but SLURM's variables says where they meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT
from netns import SUM, needs_hosts
from slurm import needs_slurm, on_slurm

pytestmark = [needs_hosts, needs_slurm]

BY_TORCH = """
import socket, torch, torch.distributed as dist
dist.init_process_group("dist_prims")
rank, total = dist.get_rank(), torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {rank} on {socket.gethostname()}: {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def lines(hosts: int, ranks: int, more: str = "") -> list[str]:
    size = hosts * ranks
    return [f"rank {rank} on host{rank // ranks}: {size * (size + 1) // 2}{more}" for rank in range(size)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_srun_and_sbatch(tmp_path: Path) -> None:
    """Where a batch script does not call srun, its program is alone."""
    (tmp_path / "program.py").write_text(SUM)
    (tmp_path / "by_torch.py").write_text(BY_TORCH)
    (tmp_path / "alone.sh").write_text("#!/bin/bash\npython program.py\n")
    srun = "srun --overcommit --nodes 2 --ntasks-per-node 2 python"
    batch = "sbatch --nodes 2 --ntasks-per-node 2 --cpus-per-task 1 --overcommit --output"
    batches = f"{batch} one alone.sh && {batch} four {ROOT}/launch_scripts/slurm.sbatch program.py"
    wait = 'until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done'  # sbatch --wait looks every ten seconds
    one_host = "srun --overcommit --nodes 1 --ntasks 2 python program.py"
    by_torch = "srun --overcommit --nodes 2 --ntasks-per-node 1 python by_torch.py"
    line = f"{one_host} && {srun} program.py && {by_torch} && {batches} && {wait}"
    done = on_slurm(2, line, tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 host by srun, dist_prims over loopback" in done.stderr
    assert "4 ranks on 2 hosts by srun, dist_prims over eth0" in done.stderr
    by_init = lines(2, 2, ", ((0, 1), (2, 3))")
    assert ranks(done.stdout) == sorted([*lines(1, 2, ", ((0, 1),)"), *by_init, *lines(2, 1)])
    assert "rank 0 on host0: 1, ((0,),)\n" in (tmp_path / "one").read_text()
    assert ranks((tmp_path / "four").read_text()) == by_init


def ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("rank"))
