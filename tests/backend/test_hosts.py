"""The backend over real links between network namespaces: a link is cut, slowed or mended, or a rank dies there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import require
from mpi_kinds import KINDS
from netns import cluster, needs_hosts, on_hosts

pytestmark = needs_hosts

PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, dist_prims
from dist_prims.errors import CommError
place = dist_prims.init("dist_prims", timeout=float(os.environ.get("LIMIT", "30")))
rank, size = dist.get_rank(), dist.get_world_size()
def say(text): print(f"{rank}: {text}\\n", end="", flush=True)
def check(count):
    tensor = torch.arange(count, dtype=torch.float64) + rank
    dist.all_reduce(tensor)
    assert torch.equal(tensor, size * torch.arange(count, dtype=torch.float64) + size * (size - 1) / 2), count
"""

RIGHT = """
for count in (0, 1, 1000, 300_000):
    check(count)
dist.barrier()
engine = dist.group.WORLD._get_backend(torch.device("cpu")).engine
sys.path.insert(0, os.environ["TESTS"])
from values import everything
everything(size)
say(f"right on {len(place.hosts)} hosts over {engine}")
dist.destroy_process_group()
"""

FAULT = """
check(10_000)
say("begins")
began = time.monotonic()
try:
    while True:
        if os.environ.get("DIES") == str(rank) and time.monotonic() - began > 0.5:
            os.kill(os.getpid(), signal.Signals[os.environ.get("BY", "SIGKILL")])
        check(10_000)
except CommError as error:
    say(f"after {time.monotonic() - began:.1f} s {type(error).__name__} {error}")
dist.destroy_process_group()
say("ends")
"""


WITHOUT_MPI = ["tcp", pytest.param("ucx", marks=pytest.mark.slow)]


def over(engine: str, limit: str, **more: str) -> dict[str, str]:
    """The environment of a fault program whose group has this engine and this timeout in seconds."""
    require(engine)
    return {"DIST_PRIMS_ENGINE": engine, "LIMIT": limit, **more}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "fault.py"
    path.write_text(PROGRAM + FAULT)
    return path


SOME_SLOW = ["tcp", "ucx", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gloo", "mpi"))]


@pytest.mark.parametrize("engine", SOME_SLOW)
def test_sums_over_links(engine: str) -> None:
    """Under mpirun MPI carries what is between the hosts, and otherwise TCP, unless the environment names another."""
    require(engine)
    env = {"TESTS": str(Path(__file__).parents[1] / "helpers")}
    env |= {"DIST_PRIMS_ENGINE": engine} if engine in ("gloo", "ucx") else {}
    done = on_hosts(2, 2, PROGRAM + RIGHT, rate="1gbit", mpirun=engine == "mpi", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"right on 2 hosts over {engine}\n") == 4


@pytest.mark.slow
def test_sums_over_links_by_open_mpi() -> None:
    kind = KINDS["Open MPI"]
    if reason := kind.lacks():
        pytest.skip(reason)
    env = {**kind.environ, "TESTS": str(Path(__file__).parents[1] / "helpers")}
    python = str(kind.home / "bin" / "python")
    done = on_hosts(2, 2, PROGRAM + RIGHT, rate="1gbit", mpirun=True, env=env, python=python)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 hosts by mpirun (Open MPI" in done.stderr
    assert done.stdout.count("right on 2 hosts over mpi\n") == 4


@pytest.mark.parametrize("engine", WITHOUT_MPI)
def test_a_host_that_vanishes_is_named_by_all(program: Path, engine: str) -> None:
    """Its link goes down: nobody gets a reset, so all wait until time is up, and no longer."""
    with cluster(3, 2, [sys.executable, str(program)], rate="1gbit", timeout=60, env=over(engine, "4")) as job:
        job.wait_for("begins", 6)
        time.sleep(0.5)
        job.cut(2)
        job.wait_for("ends", 6, timeout=30)
        said = job.stdout.read_text()
    found = dict(re.findall(r"^(\d): after [\d.]+ s (.*)$", said, re.MULTILINE))
    assert sorted(found) == list("012345")
    for rank in "0123":
        assert re.search(r"rank [45] on host host2", found[rank]), found[rank]
    for rank in "45":
        assert re.search(r"rank [0-3] on host host[01]", found[rank]), found[rank]
    waited = [float(seconds) for seconds in re.findall(r"after ([\d.]+) s", said)]
    assert max(waited) < 15


@pytest.mark.parametrize("engine", WITHOUT_MPI)
def test_a_stopped_rank_is_named_by_all(program: Path, engine: str) -> None:
    """Its kernel still acknowledges what is sent to it; only the timeout tells."""
    env = over(engine, "3", DIES="1", BY="SIGSTOP")
    with cluster(3, 1, [sys.executable, str(program)], env=env) as job:
        job.wait_for("ends", 2, timeout=40)
        said = job.stdout.read_text()
    found = dict(re.findall(r"^(\d): after [\d.]+ s (.*)$", said, re.MULTILINE))
    assert sorted(found) == ["0", "2"]
    for text in found.values():
        assert re.match(r"CommTimeoutError rank \d: rank 1 on host host1 has not replied in time", text), text


@pytest.mark.parametrize("engine", WITHOUT_MPI)
def test_a_link_that_slows_down_only_takes_longer(program: Path, engine: str) -> None:
    env = over(engine, "20", DIES="1")
    with cluster(2, 1, [sys.executable, str(program)], rate="1gbit", env=env) as job:
        job.wait_for("begins", 2)
        job.slow(1, "20mbit")
        done = job.result()
    assert re.search(
        r"^0: after [\d.]+ s PeerDiedError rank 0: rank 1 on host host1 is gone", done.stdout, re.MULTILINE
    )


@pytest.mark.parametrize("engine", WITHOUT_MPI)
def test_a_death_is_named_on_all_hosts(program: Path, engine: str) -> None:
    with cluster(2, 2, [sys.executable, str(program)], env=over(engine, "20", DIES="3")) as job:
        done = job.result()
    found = dict(re.findall(r"^(\d): after [\d.]+ s (.*)$", done.stdout, re.MULTILINE))
    assert {"0", "1"} <= found.keys()  # torchrun ends rank 2 as soon as it sees that its neighbour has died
    seconds = [float(each) for each in re.findall(r"after ([\d.]+) s", done.stdout)]
    assert max(seconds) < 5  # half a second of it passes before the death
    # torchrun then ends rank 2, too: on a busy machine before a rank has looked round for who was first
    assert all(re.match(r"PeerDiedError.* rank [23] on host host1", text) for text in found.values()), found


@pytest.mark.parametrize("engine", ["gloo", pytest.param("ucx", marks=pytest.mark.slow)])
def test_bench_hosts_compares_with_gloo_and_with_a_stream(tmp_path: Path, engine: str) -> None:
    require(engine)
    file = tmp_path / "lines.json"
    command = [sys.executable, "-m", "dist_prims.bench", "hosts", "--sizes", "64,128K", "--iterations", "1"]
    few = ["--collectives", "all_reduce,broadcast,all_to_all,barrier"]
    with cluster(2, 2, [*command, *few, "--engines", f"tcp,{engine}", "--json", str(file)]) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert "Wrong elements: 0" in done.stdout
    assert len(re.findall(r"^\| \w+ \| (?:64 B|128 KB) \|", done.stdout, re.MULTILINE)) == 2 * 3 + 1  # one of barrier
    found = json.loads(file.read_text())["lines"]
    ours = {"dist_prims over tcp", f"dist_prims over {engine}"}
    assert {line["contender"] for line in found} == {"gloo", "stream", *ours}


def test_bench_hosts_on_one_host_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dist_prims.bench", "hosts"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "netns-hosts.sh" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_calibrate_and_predict(tmp_path: Path) -> None:
    """The figures are read by groups that are made afterwards."""
    file = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "dist_prims.bench", "calibrate", "--sizes", "64K,4M", "--rounds", "2"]
    with cluster(2, 2, [*command, "--output", str(file)], rate="1gbit", timeout=250) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert re.search(r"# median error [\d.]+% over \d+", done.stdout)  # how large depends on the load of the machine
    text = "backend = dist.group.WORLD._get_backend(torch.device('cpu'))\nsay(backend.algorithm(1 << 24))\n"
    done = on_hosts(2, 2, PROGRAM + text, env={"DIST_PRIMS_CALIBRATION": str(file)})
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"^\d: (.*)$", done.stdout, re.MULTILINE))) == 1


COSTS = """
import json, os, dist_prims, torch.distributed as dist
from dist_prims.backend import create
chosen = []
make = create.MultiHostSchedules.use
create.MultiHostSchedules.use = lambda self, costs: chosen.append(costs["outer"]["beta"]) or make(self, costs)
dist_prims.init("dist_prims", timeout=60)
dist.new_group()
print(json.dumps(chosen), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("rate", "betas"),
    [("100mbit", [1e-9, 85e-9, 85e-9]), pytest.param("1gbit", [1e-9, 8.5e-9, 8.5e-9], marks=pytest.mark.slow)],
)
def test_a_group_measures_its_link_and_a_later_one_uses_that(rate: str, betas: list[float]) -> None:
    done = on_hosts(2, 1, COSTS, rate=rate)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [betas] * 2


def test_a_calibration_is_used_instead_of_a_measurement(tmp_path: Path) -> None:
    measured = tmp_path / "calibration.json"
    measured.write_text(json.dumps({"inner": {"alpha": 1e-6, "beta": 1e-10}, "outer": {"alpha": 1e-5, "beta": 3e-9}}))
    done = on_hosts(2, 1, COSTS, rate="100mbit", env={"DIST_PRIMS_CALIBRATION": str(measured)})
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[3e-9, 3e-9]] * 2
