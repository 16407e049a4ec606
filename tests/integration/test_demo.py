"""The demo: a short one alone; the whole one under mpirun."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import MPIRUN, needs_mpirun
from torch.utils.data import TensorDataset

import dist_prims
from dist_prims._console import Console
from dist_prims.datasets import digits
from dist_prims.demo import __main__ as demo
from dist_prims.demo import pipeline, train


def check_output(text: str, folder: Path) -> None:
    assert "✗" not in text
    assert "All 17 checks held" in text
    assert text.count("Ring all-reduce") == 1, "rank 0 alone speaks"
    for name in ("ring.svg", "loss.svg", "pipeline.svg"):
        assert xml.etree.ElementTree.parse(folder / name).getroot().tag.endswith("svg")
        assert str(folder / name) in text


def test_a_short_demo_alone_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start without a launcher, with few images and epochs: what is learned of them is not enough for the goal."""
    for module in (train, pipeline):
        monkeypatch.setattr(module, "digits", lambda: TensorDataset(*digits()[:320]))
        monkeypatch.setattr(module, "_EPOCHS", 1)
        monkeypatch.setattr(module, "_GOAL", 0)
    monkeypatch.setattr(demo, "_RANKS_ALONE", 2)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == 0
    check_output(capsys.readouterr().out, tmp_path)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_checks_itself(tmp_path: Path) -> None:
    command = [str(MPIRUN), "-n", "4", sys.executable, "-m", "dist_prims.demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_output(done.stdout, tmp_path)


def test_a_check_that_fails_names_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> tuple[int, int]:
        console = Console()
        console.check(True, "this holds")
        console.check(dist.get_rank() != 1, "this does not")
        return console.held, console.failed

    assert dist_prims.spawn(body, 3, timeout=60) == [(1, 1)] * 3
    out = capsys.readouterr().out
    assert "✓ this holds" in out
    assert "✗ this does not: not on ranks [1]" in out
