"""The start lines for several hosts, each run on two hosts of network namespaces with two or four ranks.

There is no Kubernetes and no ssh here: the variables of a pod are set by hand, and ``ssh`` enters the namespace of a
host. torchrun has the same options in a pod as by ssh. test_slurm.py has srun and sbatch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import needs_mpirun
from netns import SUM, cluster, needs_hosts

pytestmark = [needs_hosts, pytest.mark.slow]

SSH = """
for n in 0 1; do
    ssh host$n "cd $PWD && torchrun --nnodes 2 --nproc-per-node 2 --node-rank $n \
        --master-addr host0 --master-port 29500 program.py" &
done
wait
"""
HOSTFILE = "printf '%s\\n' host0:2 host1:2 >hosts; mpirun -f hosts -n 4 python program.py"
INDEXED = (
    "export JOB_COMPLETION_INDEX=$HOST MASTER_ADDR=host0 MASTER_PORT=29500 WORLD_SIZE=2; "
    "RANK=$JOB_COMPLETION_INDEX python program.py"
)


@pytest.mark.parametrize(
    ("line", "how", "ranks", "by"),
    [
        pytest.param(INDEXED, "each", 1, "environment variables", id="indexed job"),
        pytest.param(SSH, "login", 2, "torchrun", id="ssh"),
        pytest.param(HOSTFILE, "login", 2, "mpirun", marks=needs_mpirun, id="mpirun with a hostfile"),
    ],
)
def test_a_start_line(line: str, how: str, ranks: int, by: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SUM)
    command = ["bash", "-c", f"cd {tmp_path}; {line}"]
    with cluster(2, ranks, command, how=how, rate="1gbit") as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    size = 2 * ranks
    hosts = ((0, 1), (2, 3)) if ranks == 2 else ((0,), (1,))
    total = size * (size + 1) // 2
    wanted = [f"rank {rank} on host{rank // ranks}: {total}, {hosts}" for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == wanted, done.stderr
    assert f"{size} ranks on 2 hosts by {by}" in done.stderr
