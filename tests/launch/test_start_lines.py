"""The start lines of the README for several hosts, each run on two hosts of network namespaces with four ranks.

There is no SLURM, no Kubernetes and no ssh here: a script in srun's place sets the variables that srun sets, the
variables of a pod are set by hand, and ``ssh`` enters the namespace of a host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import ROOT, needs_mpirun
from netns import SUM, cluster, needs_hosts

pytestmark = [needs_hosts, pytest.mark.slow]

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    [[ $1 == *=* ]] || shift
    shift
done
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST="host[0-1]"
ssh host0 "SLURM_PROCID=0 ${*@Q} & SLURM_PROCID=1 ${*@Q} & wait" &
ssh host1 "SLURM_PROCID=2 ${*@Q} & SLURM_PROCID=3 ${*@Q} & wait" &
wait
"""
SSH = """
for n in 0 1; do
    ssh host$n "cd $PWD && torchrun --nnodes 2 --nproc-per-node 2 --node-rank $n \
        --master-addr host0 --master-port 29500 program.py" &
done
wait
"""
POD = "export JOB_COMPLETION_INDEX=$HOST MASTER_ADDR=host0 MASTER_PORT=29500; "
HOSTFILE = "printf '%s\\n' host0:2 host1:2 >hosts; mpirun -f hosts -n 4 python program.py"
SBATCH = f"PYTHON={sys.executable} {ROOT}/launch_scripts/slurm.sbatch program.py"
INDEXED = POD + "export WORLD_SIZE=2; RANK=$JOB_COMPLETION_INDEX python program.py"
SEVERAL_A_POD = (
    POD + "torchrun --nnodes 2 --nproc-per-node 2 --node-rank $JOB_COMPLETION_INDEX "
    "--master-addr $MASTER_ADDR --master-port $MASTER_PORT program.py"
)


@pytest.mark.parametrize(
    ("line", "how", "ranks", "by"),
    [
        pytest.param("srun --nodes 2 --ntasks-per-node 2 python program.py", "login", 2, "srun", id="srun"),
        pytest.param(SBATCH, "login", 2, "srun", id="sbatch"),
        pytest.param(INDEXED, "each", 1, "environment variables", id="indexed job"),
        pytest.param(SEVERAL_A_POD, "each", 2, "torchrun", id="indexed job with torchrun"),
        pytest.param(SSH, "login", 2, "torchrun", id="ssh"),
        pytest.param(HOSTFILE, "login", 2, "mpirun", marks=needs_mpirun, id="mpirun with a hostfile"),
    ],
)
def test_a_start_line(line: str, how: str, ranks: int, by: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SUM)
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", f"cd {tmp_path}; {line}"]
    with cluster(2, ranks, command, how=how, rate="1gbit", env={"PATH": path}) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    size = 2 * ranks
    hosts = ((0, 1), (2, 3)) if ranks == 2 else ((0,), (1,))
    total = size * (size + 1) // 2
    wanted = [f"rank {rank} on host{rank // ranks}: {total}, {hosts}" for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == wanted, done.stderr
    assert f"{size} ranks on 2 hosts by {by}" in done.stderr
