"""The C++ core by itself, plain and under the sanitizers, without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = [str(source) for folder in ("common", "shm", "net", "tests") for source in (CSRC / folder).glob("*.cpp")]
COMPILER = os.environ.get("CXX", "c++")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "sanitizer",
    ["none", pytest.param("thread", marks=pytest.mark.slow), pytest.param("address,undefined", marks=pytest.mark.slow)],
)
def test_the_core(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "core_test"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += ["-g", f"-fsanitize={sanitizer}"] if sanitizer != "none" else []
    built = subprocess.run(
        [COMPILER, *flags, *SOURCES, "-o", str(program)], capture_output=True, text=True, timeout=1000
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_strangers(tmp_path: Path) -> None:
    program = tmp_path / "core_test"
    subprocess.run([COMPILER, "-std=c++20", "-O1", "-pthread", *SOURCES, "-o", str(program)], check=True, timeout=200)
    done = subprocess.run([str(program), "1000000"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
