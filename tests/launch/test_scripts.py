"""The scripts of launch_scripts/, run as their comments say."""

from __future__ import annotations

import re
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
def test_torchrun_restarts_the_ranks_after_a_crash(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SUM + "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(place.rank)\n")
    done = run("launch_scripts/torchrun.sh", str(program), RANKS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 1 of 2: 3") == 2, "both attempts met"
