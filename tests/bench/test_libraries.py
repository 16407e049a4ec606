"""The comparison with other libraries: everything but the libraries, which need a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "docs/benchmarks/libraries.py"), "--rounds", "1", "--seconds", "60"]
sys.path.insert(0, str(ROOT / "docs/benchmarks"))

import libraries  # noqa: E402
from launching import MPIRUN, clean, needs_mpirun, run  # noqa: E402


def test_commands_have_a_deadline() -> None:
    with pytest.raises(libraries.Failed, match=r"not done in 0.3 s; almost"):
        libraries.run([["sh", "-c", "echo almost; sleep 30 & sleep 30"]], 0.3, [dict(os.environ)])


def test_a_command_that_fails_ends_the_others() -> None:
    failing = [sys.executable, "-c", "raise ValueError('why')"]
    with pytest.raises(libraries.Failed, match="ValueError: why"):
        libraries.run([failing, ["sleep", "100"]], 90, [dict(os.environ)] * 2)
    with pytest.raises(libraries.Failed, match="no-such-command"):
        libraries.run([["no-such-command"]], 5, [dict(os.environ)])


def test_sizes_that_all_ranks_have_measured_count(tmp_path: Path) -> None:
    """A rank may be killed while it writes a line."""
    line = json.dumps({"nbytes": 8, "seconds": [1.0, 2.0], "wrong": 1})
    (tmp_path / "0").write_text(f"{line}\n{line.replace('8', '16')}\n")
    (tmp_path / "1").write_text(f"{line.replace('1.0', '3.0')}\n{line[:9]}")
    assert libraries.slowest([tmp_path / "0", tmp_path / "1"]) == [{"nbytes": 8, "seconds": [3.0, 2.0], "wrong": 2}]
    assert libraries.slowest([tmp_path / "0", tmp_path / "missing"]) == []


def test_threads_of_a_rank_are_set_and_count_as_users_of_cores(tmp_path: Path) -> None:
    oneccl, impi = libraries.LIBRARIES["oneccl"], libraries.LIBRARIES["impi"]
    one, many = (libraries._environment(oneccl, tmp_path, 1, threads) for threads in (1, libraries.CORES + 1))
    assert (one["OMP_NUM_THREADS"], one["CCL_WORKER_OFFLOAD"]) == ("1", "0")
    assert many["OMP_NUM_THREADS"] == many["CCL_WORKER_COUNT"] == str(libraries.CORES + 1)
    assert (many["CCL_WORKER_OFFLOAD"], many["CCL_YIELD"]) == ("1", "sched_yield")
    assert "CCL_YIELD" not in one
    alone = libraries._environment(impi, tmp_path, 1, libraries.CORES + 1)  # which has no threads
    assert "I_MPI_THREAD_YIELD" not in alone


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mpich").mkdir()
    (tmp_path / "mpich/kept").touch()
    assert libraries.main(["--only", "mpich", "--build", "--cache", str(tmp_path)]) == 0
    assert (tmp_path / "mpich/kept").exists()


@pytest.mark.slow
def test_one_command_repeats_the_runs_of_the_page(tmp_path: Path) -> None:
    command = [str(ROOT / "launch_scripts/benchmarks.sh"), "--short", str(tmp_path), "libraries"]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    text = (tmp_path / "runs.md").read_text()
    assert all(f"\n- {fact}: " in text for fact in ("date", "commit", "machine", "versions"))
    assert "status 0)\n" in text
    assert "wrong elements: 0" in text
    assert (tmp_path / "libraries.svg").read_text().startswith("<svg")
    assert subprocess.run([*command, "nothing"], capture_output=True, timeout=60).returncode == 2


@pytest.mark.slow
def test_contenders_of_this_environment(tmp_path: Path) -> None:
    command = [
        *PROGRAM,
        "--only",
        "gloo",
        "dist_prims",
        "direct",
        "zero_copy",
        "mpich",
        "--sizes",
        "8,256K",
        "--threads",
        "2",
        "--cache",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks of 2 threads" in done.stdout
    assert "wrong elements: 0" in done.stdout
    assert "mpich: no environment; --build creates it" in done.stdout
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {(line["contender"], line["nbytes"]) for line in lines} == {
        (name, nbytes) for name in ("gloo", "dist_prims", "direct", "zero_copy") for nbytes in (8, 256 << 10)
    }
    assert all(0 < seconds < 10 for line in lines for seconds in line["seconds"])


@pytest.mark.slow
@needs_mpirun
def test_every_call_runs_beside_mpi() -> None:
    collectives = ["barrier", "broadcast:8", "all_reduce:8", "all_gather:1K", "reduce_scatter:8", "all_to_all:256K"]
    program = [sys.executable, str(ROOT / "docs/benchmarks/beside_mpi.py"), "--blocks", "2", "--calls", "2"]
    done = run([str(MPIRUN), "-n", "3", *program, *collectives, "ping_pong:8"], clean(), timeout=100)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == [*collectives, "ping_pong:8"], done.stderr
    assert all(line["dist_prims"] > 0 and line["mpi"] > 0 for line in lines)
    assert "'scan' is none of barrier" in run([str(MPIRUN), "-n", "1", *program, "scan"], clean()).stderr
