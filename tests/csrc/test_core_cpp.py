"""The C++ core without torch: each case of csrc/tests with the built library, and all of them under the sanitizers."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sanitized import build_core

from dist_prims.backend import compile_native, ucx_library
from dist_prims.backend.compile_native import UCX
from dist_prims.backend.torch_adapter import LIBRARIES

CSRC = Path(__file__).parents[2] / "csrc"
TESTS = list((CSRC / "tests").glob("*.cpp"))
CASES = sorted(name for source in TESTS for name in re.findall(r"^CASE\((\w+)\)", source.read_text(), re.MULTILINE))
COMPILER = os.environ.get("CXX", "c++")


def build(program: Path, libraries: Path, *flags: str) -> None:
    """Compile the cases, and link them to the core in the folder ``libraries``. The compiler takes most of the time, so
    they are not optimized."""
    common = [COMPILER, "-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    objects = {source: program.with_name(f"{source.stem}.o") for source in TESTS}

    def compile_one(source: Path) -> None:
        command([*common, "-c", str(source), "-o", str(objects[source])])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, TESTS))
    link = [f"-L{libraries}", "-ldist_prims_core", f"-Wl,-rpath,{libraries}", "-o", str(program)]
    command([*common, *map(str, objects.values()), *link])


def command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr


@functools.cache
def ucx() -> dict[str, str]:
    """The variables that ucx_test.cpp needs; none where there is no UCX."""
    if ucx_library.unusable_reason():
        return {}
    return {
        "DIST_PRIMS_TEST_UCX": str(LIBRARIES / UCX),
        "DIST_PRIMS_TEST_LIBUCP": next(
            (str(folder / ucx_library._LIBUCP) for folder in ucx_library._folders() if folder.exists()),
            ucx_library._LIBUCP,
        ),
        **ucx_library._WHILE_LOADING,
        **ucx_library._WITHOUT_RDMA,
    }


def run(program: Path, *arguments: str, timeout: float = 300, **environment: str) -> str:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=timeout, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program of the built core, compiled once for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    program = folder / "core_test"
    with (folder / "core_test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            build(program, LIBRARIES)
    return program


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_case(program: Path, case: str) -> None:
    environment = ucx() if case.startswith("ucx_") else {}
    if case not in run(program, "--list", **environment).split():
        pytest.skip(ucx_library.unusable_reason() or "not compiled for this processor")
    run(program, case, **environment)


@pytest.mark.timeout(1200)
def test_names_of_cases(program: Path) -> None:
    names = run(program, "--list").split()
    assert len(set(names)) == len(names)
    assert set(names) <= set(CASES)
    unknown = subprocess.run([str(program), "no_such_case"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "no case is named no_such_case" in unknown.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", compile_native.SANITIZERS)
def test_all_cases_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    libraries = build_core(sanitizer)
    build(tmp_path / "core_test", libraries, *compile_native.SANITIZERS[sanitizer])
    run(tmp_path / "core_test", timeout=1000, UBSAN_OPTIONS="print_stacktrace=1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rendezvous_rejects_much_garbage(program: Path) -> None:
    run(program, "rendezvous_rejects_garbage", timeout=1000, DIST_PRIMS_TEST_HELLOS="200000")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tcp_rejects_other_processes_many_times(program: Path) -> None:
    run(program, "tcp_rejects_other_processes", timeout=1000, DIST_PRIMS_TEST_HELLOS="50000")  # a million takes 260 s
