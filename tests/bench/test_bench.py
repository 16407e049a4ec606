"""The benchmark measures what it says, and counts what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch.distributed as dist
from netns import cluster, needs_hosts

import dist_prims
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.bench.__main__ import main
from dist_prims.bench.arguments import sizes
from dist_prims.bench.cases import CASES, Buffers
from dist_prims.bench.measure import Contender, Line, Ticks, measure
from dist_prims.bench.memory import chunk_bytes, extra_bytes
from dist_prims.schedules import algorithms
from dist_prims.schedules.topology import Topology


def test_sizes() -> None:
    assert sizes("8,64K,1M,1G") == [8, 65536, 1 << 20, 1 << 30]
    assert sizes("1K:9K") == [1024, 2048, 4096, 8192]
    assert sizes("8:1K/8") == [8, 64, 512]
    assert sizes("8:8") == [8]


@pytest.mark.parametrize("text", ["0:8", "8:64/1", "8:64/0", "1M:8", "8:64/x", "8X", "", "-8"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write"):
        sizes(text)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    line = Line("all_reduce", "x", 8_000_000, 2_000_000, "float32", "sum", seconds=[0.004, 0.002, 0.001])
    assert line.median == 0.002
    assert line.bandwidth() == pytest.approx(4.0)
    factors = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1, "all_to_all": 0.75}
    for collective, factor in factors.items():
        assert line.bandwidth(CASES[collective].bus(4)) == pytest.approx(4 * factor)


def test_every_collective_and_algorithm_is_right() -> None:
    def body() -> dict[str, list[Line]]:
        return {each: measure(each, 96 * 1024, algorithms(each), iterations=2, warmup=1) for each in CASES}

    for found in dist_prims.spawn(body, 3, timeout=100):
        for collective, lines in found.items():
            assert [line.contender for line in lines] == ["dist_prims", *algorithms(collective)], collective
            assert [line.wrong for line in lines] == [0] * len(lines), collective
            assert all(len(line.seconds) == 2 and min(line.seconds) > 0 for line in lines), collective
            assert lines[0].ratio == 1.0


def test_the_cores_work_while_a_process_computes() -> None:
    before, end = Ticks.since_the_start(), time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass
    ticks = Ticks.since_the_start().since(before)
    assert 0 < ticks.working <= ticks.passed


def test_long_runs_tell_how_busy_the_cores_were() -> None:
    def body() -> float | None:
        wait = lambda buffers: {"wait": Contender(lambda _: time.sleep(0.2), buffers, checked=False)}  # noqa: E731
        return measure("all_reduce", 96 * 1024, [], iterations=2, warmup=0, more=wait)[1].busy

    first, second = dist_prims.spawn(body, 2, timeout=60)
    assert first is not None
    assert 0 <= first == second <= 1


def test_what_is_wrong_is_counted() -> None:
    def body() -> int:
        return measure("all_reduce", 400, [], iterations=2, more=lambda b: {"lazy": Contender(_lazy, b)})[1].wrong

    assert dist_prims.spawn(body, 2, timeout=60) == [4, 4]  # an element on two ranks, twice


def test_a_ring_takes_at_most_two_chunks_of_memory() -> None:
    def body() -> float:
        return extra_bytes("all_reduce", "ring", 1 << 20) / chunk_bytes("all_reduce", "ring", 1 << 20)

    assert 0.9 < dist_prims.spawn(body, 4, backend="gloo", timeout=60)[0] <= 2


def _lazy(buffers: Buffers, **_: object) -> None:
    dist.all_reduce(buffers.input[:-1])


def test_a_wrong_element_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--ranks", "2", "--sizes", "96K", "--iterations", "2", "--algorithms", "ring", "--backends", ""]
    assert main(command) == 0
    assert "# wrong elements: 0" in capfd.readouterr().out
    monkeypatch.setitem(CASES, "all_reduce", dataclasses.replace(CASES["all_reduce"], call=_lazy))
    assert main(command) == 1
    assert "# wrong elements: 4" in capfd.readouterr().out  # an element on two ranks, twice


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = ["--ranks", "2", "--sizes", "8,1K", "--iterations", "2"]
    start += ["--algorithms", "ring,direct", "--json", str(tmp_path / "all.json"), "--plot", str(tmp_path / "all.svg")]
    assert main(start) == 0
    out = capfd.readouterr().out
    assert "#wrong" in out
    assert "# wrong elements: 0" in out
    assert "hosts 1" in out
    assert "vs dist_prims" in out
    assert sum(line.split()[4:6] == ["-1", "ring"] for line in out.splitlines()) == 2
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["environment"]["ranks"] == 2
    assert [line["contender"] for line in found["lines"]] == ["dist_prims", "gloo", "ring", "direct"] * 2
    assert xml.etree.ElementTree.parse(tmp_path / "all.svg")


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--sizes", "8X"])
    assert "'8X' is not a size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--dtype", "float33"])
    assert "'float33' is not a torch dtype" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--algorithms", "rign", "--ranks", "1"])
    assert "did you mean 'ring'" in capsys.readouterr().err


@pytest.mark.slow
def test_calibrate_without_another_host(tmp_path: Path) -> None:
    """What cannot be measured stays as it is assumed, and one rank alone measures nothing."""
    file = tmp_path / "found.json"
    command = ["-m", "dist_prims.bench", "calibrate", "--rounds", "0", "--output", str(file)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *command]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["outer"] == ASSUMED["outer"]
    assert 0 <= found["inner"]["alpha"] != ASSUMED["inner"]["alpha"]  # 0 on a busy machine
    assert Topology.measured((3, 3), found).congestion == 0
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
    assert alone.returncode == 2
    assert "start it with 2 or more" in alone.stderr


SMALL_PIPELINE = ["pipeline", "--model", "resnet18", "--image", "32", "--batch", "4", "--rounds", "1"]


@pytest.mark.slow
def test_pipelines_beside_what_they_could_reach(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status says that losses and gradients are the unsplit model's, torch's own pipelines included."""
    options = ["--microbatches", "2", "--schedules", "zb_h1,interleaved_1f1b", "--pictures", str(tmp_path)]
    assert main([*SMALL_PIPELINE, *options]) == 0
    out = capfd.readouterr().out
    names = [line.split("  ")[0] for line in out.splitlines() if not line.startswith("#")]
    assert names == ["alone", "model_parallel", "zb_h1", "interleaved_1f1b", "torch gpipe", "torch 1f1b"]
    assert out.endswith("# losses and gradients agree with the unsplit model's\n")
    assert xml.etree.ElementTree.parse(tmp_path / "zb_h1.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_pipelines_by_their_number_of_micro_batches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL_PIPELINE, "--sweep", "1,2", "--pictures", str(tmp_path)]) == 0
    assert "2 micro-batches of 2: images a second: one rank alone" in capfd.readouterr().out
    assert xml.etree.ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["1", "2"])
def test_times_of_repairs(hosts: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The victims are ranks 0 and 1; the survivors check their sum."""
    assert main(["repair", "--ranks", "3", "--hosts", hosts, "--rounds", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"# 3 ranks, {hosts} hosts, 2 rounds: milliseconds after SIGKILL"
    medians = [float(line.split("median")[1].split()[0]) for line in lines[1:]]
    assert 0 < medians[0] < medians[1] <= medians[2]


@needs_hosts
@pytest.mark.slow
def test_times_of_repairs_between_namespaces() -> None:
    """A process on each host starts the ranks of the host, so that torchrun does not see the deaths."""
    command = [sys.executable, "-m", "dist_prims.bench", "repair", "--ranks", "3", "--rounds", "2"]
    with cluster(2, 1, command, rate="1gbit", timeout=100) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# 3 ranks, 2 hosts, 2 rounds: milliseconds after SIGKILL\n")
    assert done.stdout.count("median") == 3
