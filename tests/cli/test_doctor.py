"""``python -m dist_prims doctor``: what it finds here, and what it concludes from the variables of a launcher."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from launching import LAUNCHER_VARIABLES, TORCH

from dist_prims.cli.doctor import _bytes, report
from tests.rendezvous.test_detect_launcher import SLURM


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(LAUNCHER_VARIABLES.search, list(os.environ)):
        monkeypatch.delenv(name)


def test_the_doctor_reports_what_is_here() -> None:
    text = report()
    names = ("dist_prims", "Python", "launcher", "rank", "host", "hosts", "gloo", "NCCL", "MPI", "UCX", "shared memory")
    for name in (
        *names,
        "cores",
        "memory",
        "/dev/shm",
        "open files",
        "locked memory",
        "interfaces",
        "addresses",
        "ports",
        "sockets",
    ):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert "no launcher" in text


def test_a_thousand_units_of_memory_have_no_exponent() -> None:
    """A node of 1010 MiB had 1.01e+03 MiB."""
    assert [_bytes(1010 << 20), _bytes(1010 << 30), _bytes(1 << 16)] == ["1010 MiB", "1010 GiB", "0.0625 MiB"]


def test_the_doctor_lists_the_numa_nodes_and_the_nodes_of_this_process() -> None:
    folders = [*Path("/sys/devices/system/node").glob("node[0-9]*")]
    if not folders:
        pytest.skip("this system does not show its NUMA nodes")
    (row,) = re.findall(r"^NUMA nodes +(.*); this process gets shared memory of node (.*)$", report(), re.MULTILINE)
    nodes = re.findall(r"(\d+) \(cores ([\d,-]*), ([\d.]+) ([GM])iB\)", row[0])
    assert {f"node{node}" for node, *_ in nodes} == {folder.name for folder in folders}
    # Not the memory of the system: a virtual machine that gains memory while it runs adds it to no node.
    for node, _, amount, unit in nodes:
        text = Path(f"/sys/devices/system/node/node{node}/meminfo").read_text()
        (kilobytes,) = re.findall(r"MemTotal: +(\d+) kB", text)
        assert float(amount) * 1024 ** "MG".index(unit) == pytest.approx(int(kilobytes) / 1024, rel=0.02)
    own = {next(Path(f"/sys/devices/system/cpu/cpu{core}").glob("node*")).name for core in os.sched_getaffinity(0)}
    assert {f"node{node}" for node in row[1].split(" or ")} == own


@pytest.mark.parametrize(
    ("environ", "row", "words"),
    [
        (SLURM, "hosts", "n08, n09$"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "2"}, "hosts", "2 of 4 ranks are on this host$"),
        (TORCH, "hosts", "known after the rendezvous of the ranks$"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "0"}, "hosts", "known after the rendezvous of the ranks$"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "two", "PMI_LOCAL_SIZE": "2"}, "hosts", "2 of 4 ranks are on this host$"),
        ({}, "authentication", "one rank needs none; spawn provides a secret"),
        (TORCH, "authentication", "none: the ranks are not authenticated; give all ranks the same DIST_PRIMS_SECRET"),
        (
            {**TORCH, "MASTER_ADDR": "localhost"},
            "authentication",
            "by a file of this user, since the ranks are on one host",
        ),
        ({**TORCH, "DIST_PRIMS_SECRET": "0123456789abcdef"}, "authentication", "by DIST_PRIMS_SECRET"),
        ({**TORCH, "DIST_PRIMS_SECRET": "0123"}, "authentication", "fails: DIST_PRIMS_SECRET has 4 characters"),
        (
            {"DIST_PRIMS_PORTS": "20500-20501"},
            "ports",
            "DIST_PRIMS_PORTS=20500-20501, of which 2 are free on this host",
        ),
        ({"DIST_PRIMS_PORTS": "20500"}, "ports", "fails: DIST_PRIMS_PORTS='20500': give the first and the last port"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "3"},
            "authentication",
            "by a secret that rank 0 sends over PMI",
        ),
    ],
)
def test_the_doctor_knows_what_the_launcher_says(
    environ: dict[str, str], row: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name, value in {**environ, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert re.search(rf"^{row} +{words}", report(), re.MULTILINE)
