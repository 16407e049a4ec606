"""Planted mistakes: tests/helpers/planting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import planting
import pytest
from planting.choice import KINDS, choose
from planting.cpp_mistakes import cpp_mistakes
from planting.mistake import Mistake, read_mistake
from planting.python_mistakes import python_mistakes

PYTHON = '''\
def first(total: int, size: int, root: int, rank: int, work: object) -> int:
    """Text: total - size."""
    if size < 1:
        raise ValueError(f"{total - size}")
    if rank == root:
        return total - size
    work.wait()
    check(work)
    return total + 1
'''
CPP = """\
int first(int total, int size, int root, int rank) {
    // total - size
    if (size < 1) throw std::invalid_argument(why);
    if (rank == root) return total - size;
    wait(size);
    check(size);
    return total + 1;
}
"""
TESTS = """\
from dist_prims.part.small import first
def test_two(): assert first(5, 2, 0, 0, None) == 3
def test_one(): assert first(5, 2, 0, 0, None)
def test_not_chosen(): assert False
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one package, one folder of csrc and one file of tests."""
    for name, text in {
        "dist_prims/part/small.py": PYTHON,
        "csrc/part/small.cpp": CPP,
        "csrc/tests/small_test.cpp": CPP,
        "test_small.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run("git init -q . && git add .", shell=True, cwd=tmp_path, check=True)
    return tmp_path


def diffs(project: Path, seed: int, count: int = 4) -> list[str]:
    mistakes = choose(project, count, seed, lambda file, line: True, lambda mistake: True)
    return [mistake.diff(project) for mistake in mistakes]


def test_the_seed_fixes_the_mistakes_and_each_part_gets_some(project: Path) -> None:
    assert diffs(project, 1) == diffs(project, 1)
    assert len({tuple(diffs(project, seed)) for seed in range(5)}) > 1
    files = [diff.splitlines()[1] for diff in diffs(project, 1)]
    assert sorted(files) == ["--- a/csrc/part/small.cpp"] * 2 + ["--- a/dist_prims/part/small.py"] * 2


def test_only_lines_of_tests_that_compile_are_chosen(project: Path) -> None:
    mistakes = choose(project, 99, 1, lambda file, line: line == 3, lambda mistake: mistake.file.endswith(".py"))
    assert {(mistake.file, mistake.edit.number) for mistake in mistakes} == {("dist_prims/part/small.py", 3)}


@pytest.mark.parametrize(("find", "text"), [(python_mistakes, PYTHON), (cpp_mistakes, CPP)])
def test_every_kind_is_found_in_code_and_none_in_text(find: object, text: str) -> None:
    edits = list(find(text))  # type: ignore[operator]
    assert {edit.kind for edit in edits} == set(KINDS)
    lines = text.splitlines()
    assert all("total - size" not in lines[edit.number - 1] or "return" in lines[edit.number - 1] for edit in edits)
    assert all(edit.text != lines[edit.number - 1] for edit in edits)


@pytest.mark.slow
def test_a_planted_mistake_is_caught_by_the_first_chosen_test_that_fails(project: Path) -> None:
    swapped = next(edit for edit in python_mistakes(PYTHON) if edit.number == 6)
    diff = project / "swapped.diff"
    diff.write_text(Mistake("dist_prims/part/small.py", swapped).diff(project))
    assert read_mistake(diff) == ("swapped operands", "dist_prims/part/small.py")
    chosen = project / "chosen.txt"
    chosen.write_text("test_small.py::test_one\ntest_small.py::test_two")
    environment = {**os.environ, "CHOSEN_TESTS": str(chosen), "PYTHONPATH": str(Path(planting.__file__).parent)}
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-p", "chosen_tests", "-p", "no:cacheprovider", "."]
    run = {"cwd": project, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    assert "2 passed" in subprocess.run(command, **run).stdout  # type: ignore[call-overload]
    subprocess.run(["git", "apply", str(diff)], cwd=project, check=True)
    said = subprocess.run(command, **run).stdout  # type: ignore[call-overload]
    assert "1 failed, 1 passed" in said, said
    assert chosen.with_suffix(".failed").read_text() == "test_small.py::test_two"
