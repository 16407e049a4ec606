"""A real SLURM for tests: munged, slurmctld and a slurmd on each host; the hosts are network namespaces (see netns.py).

    done = on_slurm(2, "srun --nodes 2 --ntasks-per-node 2 python program.py", folder)

The daemons have namespaces of their own: no port of the machine is taken, and the kernel ends them with the cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from netns import cluster

CONFIGURATION = """
ClusterName=box
SlurmctldHost=switch(10.0.0.254)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=host[0-{last}] CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
START = """
export SLURM_CONF={folder}/slurm.conf
cd {folder}
ip link set lo up  # by which the machine between the hosts reaches itself
munged --foreground --force --socket=munge.socket --key-file=munge.key --pid-file=munge.pid --log-file=munge.log \
    --seed-file=munge.seed >/dev/null 2>&1 &
until [ -S munge.socket ]; do sleep 0.05; done
slurmctld -D -i >/dev/null 2>&1 &
for ((host = 0; host <= {last}; host++)); do
    ssh host$host "SLURM_CONF=$SLURM_CONF slurmd -D -N host$host" >/dev/null 2>&1 &
done
until [ "$(sinfo --noheader --format=%D --states=idle 2>/dev/null)" = {hosts} ]; do sleep 0.2; done
{line}
"""  # the waits end with the cluster, at its timeout

_absent = [tool for tool in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if not shutil.which(tool)]
needs_slurm = pytest.mark.skipif(
    bool(_absent) or os.getuid() != 0,
    reason=f"no {', '.join(_absent) or 'root'}; as root: apt install slurmd slurmctld slurm-client munge",
)


def on_slurm(hosts: int, line: str, folder: Path, timeout: int = 100) -> CompletedProcess[str]:
    """Run a line of shell beside hosts whose SLURM is up; ``folder`` is the working directory."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    words = {"folder": folder, "last": hosts - 1, "hosts": hosts, "line": line, "user": "root", "cores": os.cpu_count()}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**words))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused, but such a host has none to be found
    (folder / "start.sh").write_text(START.format(**words))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(folder / "start.sh")]
    with cluster(hosts, 1, command, how="login", timeout=timeout, env={"PATH": path}) as job:
        return job.result()
