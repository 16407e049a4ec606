"""The backend over real links between network namespaces: a link is cut, slowed or mended, or a rank dies there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mpi_kinds import KINDS
from netns import cluster, needs_hosts, on_hosts
from ranks import span
from transports import require

from dist_prims.backend.multi_host import MultiHostSchedules

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
transport = dist.group.WORLD._get_backend(torch.device("cpu")).transport
sys.path.insert(0, os.environ["TESTS"])
from values import every_collective
every_collective()
say(f"right on {len(place.hosts)} hosts over {transport}")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sums_over_links_by_mpi(name: str) -> None:
    """Under mpirun MPI carries what is between the hosts."""
    kind = KINDS[name]
    if reason := kind.lacks():
        pytest.skip(reason)
    env = {**kind.environ, "TESTS": str(Path(__file__).parents[1] / "helpers")}
    python = str(kind.home / "bin" / "python")
    done = on_hosts(2, 2, PROGRAM + RIGHT, rate="1gbit", mpirun=True, env=env, python=python)
    assert done.returncode == 0, done.stderr
    assert f"4 ranks on 2 hosts by mpirun ({name}" in done.stderr
    assert done.stdout.count("right on 2 hosts over mpi\n") == 4


# What runs on each host: one process, which forks the ranks of each phase when the test asks for it.
PHASES = """
import os, pathlib, signal, sys, time, torch, torch.distributed as dist, dist_prims
from datetime import timedelta
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.errors import CommError
host, folder = int(os.environ["HOST"]), pathlib.Path(os.environ["FOLDER"])
sys.path.insert(0, os.environ["TESTS"])
from values import every_collective

def say(text): print(f"{phase} {rank}: {text}\\n", end="", flush=True)

def await_paths(*names):
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)

def measure():
    chosen, use = [], MultiHostSchedules.use
    MultiHostSchedules.use = lambda self, costs: chosen.append(costs["outer"]["beta"]) or use(self, costs)
    dist.new_group()
    dist.new_group()
    say(chosen)

def sums():
    every_collective()
    say(dist.group.WORLD._get_backend(torch.device("cpu")).transport)

def go_on(seconds, victim=None):
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    say("begins")
    try:
        while True:
            if rank == victim and (folder / "death").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            tensor = torch.arange(10_000, dtype=torch.float64) + rank
            dist.all_reduce(tensor)
            assert torch.equal(tensor, size * torch.arange(10_000) + size * (size - 1) / 2)
    except CommError as error:
        say(f"{type(error).__name__} {error}")
    (folder / f"{phase} {rank}").touch()
    dist.destroy_process_group()
    say("ends")

def stop():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    go_on(1)

for number, (phase, hosts, ranks, body) in enumerate([
    ("measures", 2, 1, measure),
    ("sums", 2, 2, sums),
    ("dies", 2, 2, lambda: go_on(100, victim=3)),
    ("stops", 3, 1, stop),
    ("vanishes", 3, 2, lambda: go_on(2)),
]):
    await_paths(phase)
    children = []
    for rank in range(ranks * host, ranks * (host + 1)) if host < hosts else ():
        if (child := os.fork()) == 0:
            size, method = ranks * hosts, f"tcp://host0:{29500 + number}"
            place = dist_prims.init("dist_prims", init_method=method, rank=rank, world_size=size, timeout=60)
            assert len(place.hosts) == hosts
            (folder / f"{phase} {rank} joined").touch()
            await_paths(*(f"{phase} {other} joined" for other in range(size)))
            body()
            os._exit(0)
        children.append(child)
    if phase == "stops" and host == 1:
        await_paths("stops 0", "stops 2")
        os.kill(children[0], signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=pytest.mark.slow)])
def test_a_rank_or_host_that_fails_is_named_by_all_others(transport: str, tmp_path: Path) -> None:
    """And on the same hosts before that: a group measures its link, a later one uses that, and sums are right.

    A limit of a second or two begins when all ranks have joined: on a busy machine a rank that was joining was late.
    """
    require(transport)
    program = tmp_path / "phases.py"
    program.write_text(PHASES)
    env = {
        "DIST_PRIMS_TRANSPORT": transport,
        "FOLDER": str(tmp_path),
        "TESTS": str(Path(__file__).parents[1] / "helpers"),
    }
    with cluster(3, 2, [sys.executable, str(program)], how="each", rate="100mbit", timeout=200, env=env) as job:

        def begin(phase: str) -> None:
            (tmp_path / phase).touch()

        def said(phase: str, words: str, times: int) -> dict[str, str]:
            """What the ranks have said last in this phase, when so many have said these words."""
            job.wait_for(f": {words}", times)
            return last(phase)

        def last(phase: str) -> dict[str, str]:
            return dict(re.findall(rf"^{phase} (\d): (?!ends)(.*)$", job.stdout.read_text(), re.MULTILINE))

        begin("measures")
        betas = said("measures", "[", 2)
        if transport == "tcp":  # the first group has measured
            assert betas == dict.fromkeys("01", "[8.5e-08, 8.5e-08]")
        for host in range(3):
            job.slow(host, "1gbit")
        begin("sums")
        assert said("sums", transport, 4) == dict.fromkeys("0123", transport)

        begin("dies")
        said("dies", "begins", 4)
        job.slow(1, "20mbit")  # which only takes longer
        time.sleep(0.5)
        begin("death")
        for rank, text in said("dies", "PeerDiedError", 3).items():
            expected = "begins" if rank == "3" else f"PeerDiedError rank {rank}: rank 3 on host host1"
            assert text.startswith(expected), (rank, text)
        job.slow(1, "1gbit")

        begin("stops")  # the kernel still acknowledges what is sent to the stopped rank; only the timeout tells
        for rank, text in said("stops", "CommTimeoutError", 2).items():
            assert text.startswith(f"CommTimeoutError rank {rank}: rank 1 on host host1 has not replied in time"), text

        begin("vanishes")
        said("vanishes", "begins", 4 + 2 + 6)
        time.sleep(0.3)
        job.cut(2)  # no rank gets a reset, so all wait until time is up
        for rank in "012345":  # not by a number of ends: a rank of the phase before may end late
            job.wait_for(f"vanishes {rank}: ends")
        found = last("vanishes")
    for rank in "0123":
        assert re.search(r"rank [45] on host host2", found[rank]), found
    for rank in "45":
        assert re.search(r"rank [0-3] on host host[01]", found[rank]), found


@pytest.mark.slow
def test_bench_hosts_compares_with_gloo_and_with_a_stream(tmp_path: Path) -> None:
    require("ucx")
    file = tmp_path / "lines.json"
    command = [sys.executable, "-m", "dist_prims.bench", "hosts", "--sizes", "64,128K", "--iterations", "1"]
    few = ["--collectives", "all_reduce,broadcast,all_to_all,barrier"]
    with cluster(2, 2, [*command, *few, "--transports", "tcp,ucx", "--json", str(file)]) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert "Wrong elements: 0" in done.stdout
    assert len(re.findall(r"^\| \w+ \| (?:64 B|128 KB) \|", done.stdout, re.MULTILINE)) == 2 * 3 + 1  # one of barrier
    found = json.loads(file.read_text())["lines"]
    ours = {f"dist_prims over {transport}" for transport in ("tcp", "ucx")}
    assert {line["contender"] for line in found} == {"gloo", "stream", *ours}


@pytest.mark.slow
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


def test_a_calibration_is_used_instead_of_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> list[float]:
        chosen, use = [], MultiHostSchedules.use

        def record(self: MultiHostSchedules, costs: Any) -> None:
            chosen.append(costs["outer"]["beta"])
            use(self, costs)

        MultiHostSchedules.use = record  # type: ignore[method-assign]
        for _ in range(2):
            dist.new_group()
        return chosen

    calibration = {"inner": {"alpha": 1e-6, "beta": 1e-10}, "outer": {"alpha": 1e-5, "beta": 3e-9}}
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    monkeypatch.setenv("DIST_PRIMS_CALIBRATION", str(tmp_path / "calibration.json"))
    assert span("a b", body) == [[3e-9, 3e-9]] * 2
