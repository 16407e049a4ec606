"""The main job, run as a user runs it: under mpirun, under torchrun, and alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--no-python"]
STARTS = {
    "alone": [sys.executable],
    "mpirun": [str(BIN / "mpirun"), "-n", "4", sys.executable],
    "mpirun on 2 ranks": [str(BIN / "mpirun"), "-n", "2", sys.executable],
    "torchrun": [*TORCHRUN, sys.executable],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "start",
    ["mpirun on 2 ranks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpirun", "alone", "torchrun"))],
)
def test_the_demo_checks_itself(start: str, tmp_path: Path) -> None:
    if shutil.which(STARTS[start][0]) is None:
        pytest.skip("no mpirun beside this Python; pip install mpich mpi4py")
    command = [*STARTS[start], "-m", "dist_prims.demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    assert "All 17 checks held" in done.stdout
    assert done.stdout.count("Ring all-reduce") == 1, "rank 0 alone speaks"
    for name in ("ring.svg", "loss.svg", "pipeline.svg"):
        assert xml.etree.ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
        assert str(tmp_path / name) in done.stdout


def test_a_check_that_fails_is_told_with_its_ranks() -> None:
    program = """
import dist_prims, sys, torch.distributed as dist
from dist_prims._console import Console
def body():
    console = Console()
    console.check(True, "this holds")
    console.check(dist.get_rank() != 1, "this does not")
    return console.held, console.failed
print(dist_prims.spawn(body, 3, timeout=60))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "✓ this holds" in done.stdout
    assert "✗ this does not: not on ranks [1]" in done.stdout
    assert "[(1, 1), (1, 1), (1, 1)]" in done.stdout
