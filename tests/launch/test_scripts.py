"""The scripts of launch_scripts/, run as their comments say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launching import ROOT, SUM, clean, needs_mpirun
from launching import run as run_to_its_end

SCRIPTS = sorted(ROOT.glob("launch_scripts/*.sh")) + sorted(ROOT.glob("launch_scripts/*.sbatch"))


def run(*command: str, **environ: str) -> CompletedProcess[str]:
    return run_to_its_end(list(command), clean(**environ), timeout=110)  # a script may build the package first


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_what_it_is_for(script: Path) -> None:
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#!")]
    assert lines[0].startswith("# "), script


@needs_mpirun
def test_mpirun() -> None:
    done = run("launch_scripts/mpirun.sh", "-n", "2", "python", "-c", SUM)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank . of 2: 3", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


@pytest.mark.slow
def test_torchrun_with_a_restart(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    fails_at_first = "import os\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
    program.write_text(fails_at_first + SUM)  # test_launch.py has a failure after both have met
    done = run("launch_scripts/torchrun.sh", str(program), RANKS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 1 of 2: 3") == 1


@pytest.mark.slow
def test_slurm_with_its_variables_simulated(tmp_path: Path) -> None:
    """No SLURM here: a script in srun's place starts two ranks with the variables that srun sets."""
    fake = tmp_path / "srun"
    fake.write_text(
        "#!/usr/bin/env bash\nset -e\nwhile [[ $1 == --* ]]; do shift; done\n"
        "export SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NODELIST=here\n"
        'SLURM_PROCID=1 "$@" &\nSLURM_PROCID=0 "$@"\nwait $!\n'
    )
    fake.chmod(0o755)
    (tmp_path / "program.py").write_text(SUM)
    path = f"{tmp_path}:{clean()['PATH']}"
    done = run("launch_scripts/slurm.sbatch", str(tmp_path / "program.py"), PATH=path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank . of 2: 3", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]
    assert "2 ranks on 1 host by srun" in done.stderr
