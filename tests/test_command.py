"""``python -m dist_prims`` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dist_prims.__main__ import main

RIGHT = """
from dist_prims.schedules import Step, algorithm

@algorithm("all_reduce", name="mine", chunks=1)
def star(size):
    for rank in range(1, size):
        yield Step(src=rank, dst=0, chunk=0, reduce=True)
    for rank in range(1, size):
        yield Step(src=0, dst=rank, chunk=0)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "dist_prims", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ring.svg"
    assert main(["show", "all_reduce", "ring", "--size", "3", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "all_reduce ring: 3 ranks, 3 chunks, 4 steps\nstep 1   0 -0-> 1 +   1 -1-> 2 +   2 -2-> 0 +\n" in out
    assert "adds       (r0+r1)+r2   (chunk 0 on rank 0)" in out
    assert "sent       1.33 1.33 1.33" in out
    assert "</svg>" in picture.read_text()
    assert main(["show", "broadcast", "binomial", "--size", "4", "--root", "2"]) == 0
    assert "root 2" in capsys.readouterr().out
    assert main(["show", "all_reduce", "hierarchical", "--size", "4", "-p", "hosts=3,1", "-p", "inner=direct"]) == 0
    assert "hosts (3, 1), inner direct" in capsys.readouterr().out


def test_showing_waits_for_no_torch() -> None:
    code = "import sys; from dist_prims.__main__ import main; main(['show', 'scan', 'recursive_doubling'])\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_prove_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    done = command("prove", str(file))
    assert (done.returncode, done.stdout) == (0, "✓ all_reduce mine: 34 schedules of 1 to 64 ranks\n")
    file.write_text(
        RIGHT.replace("range(1, size):\n        yield Step(src=rank", "range(2, size):\n        yield Step(src=rank")
    )
    done = command("prove", str(file))
    assert done.returncode == 1
    assert "✗ all_reduce mine, 2 ranks: at the end rank 0, chunk 0: r1 is missing" in done.stdout
    file.write_text("")
    assert "registers no algorithm" in command("prove", str(file)).stderr


def test_prove_the_registry() -> None:
    done = command("prove")
    assert done.returncode == 0, done.stdout
    assert "✗" not in done.stdout
    assert "✓ all_reduce swing" in done.stdout


def test_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "all_gather"]) == 0
    assert "bruck" in capsys.readouterr().out
    assert main(["algorithms", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| collective |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "all_reduce", "rign"], "did you mean 'ring'?"),
        (["show", "all_reduce", "ring", "-p", "speed"], "'speed' is no parameter; write name=value"),
        (["show", "all_reduce", "ring", "--size", "0"], "size"),
        (["show", "all_reduce", "hierarchical", "--size", "4", "-p", "hosts=3,3"], "add up to 4"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], words: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
