"""The C++ core without torch: all cases of csrc/tests with the built library, under the sanitizers, and on arm64.

A case that fails is named by the program, which runs it alone too: ``core_test NAME``. The sources are compiled as one,
because their headers take most of the compiler's time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from sanitized import build_core

from dist_prims.backend import compile_native, ucx_library
from dist_prims.backend.compile_native import UCX
from dist_prims.backend.native_libraries import LIBRARIES

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = sorted((CSRC / "tests").glob("*.cpp"))
CASES_OF = {source.stem: re.findall(r"^CASE\((\w+)\)", source.read_text(), re.MULTILINE) for source in SOURCES}
CASES = [name for names in CASES_OF.values() for name in names]
COMPILER = os.environ.get("CXX", "c++")
ARM64_COMPILER, ARM64_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def built(libraries: Path, *flags: str, compiler: str = COMPILER) -> Path:
    """The program of the cases, not optimized, linked to the core in the folder ``libraries``.

    It is compiled again where a source, a header or the command has changed.
    """
    options = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    link = [f"-L{libraries}", "-ldist_prims_core", f"-Wl,-rpath,{libraries}"]
    digest = hashlib.sha256(repr([compiler, *options, *link]).encode())
    for each in [*sorted(CSRC.rglob("*.h")), *SOURCES]:
        digest.update(each.read_bytes())
    folder = CSRC.parent / "build" / "core_test"
    folder.mkdir(parents=True, exist_ok=True)
    program, source = folder / digest.hexdigest()[:16], folder / f"{digest.hexdigest()[:16]}.cpp"
    with FileLock(f"{program}.lock", timeout=1000):  # compiled once for all workers of pytest-xdist
        if not program.exists():
            source.write_text("".join(f'#include "{each}"\n' for each in SOURCES))
            command = [compiler, *options, str(source), *link, "-o", f"{program}.new"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
            assert done.returncode == 0, done.stderr
            Path(f"{program}.new").rename(program)
    return program


@functools.cache
def ucx() -> dict[str, Any]:
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


def run(*command: str | Path, timeout: float = 300, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def program() -> Path:
    return built(LIBRARIES)


@pytest.mark.timeout(1200)
def test_all_cases(program: Path) -> None:
    names = run(program, "--list", **ucx()).split()
    assert len(set(names)) == len(names)
    left_out = {"the_same_on_every_instruction_set"}  # of x86-64
    if not ucx():
        left_out |= {name for name in CASES if name.startswith("ucx_")}
    assert {*names} <= {*CASES} <= {*names} | left_out
    unknown = subprocess.run([str(program), "no_such_case"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "no case is named no_such_case" in unknown.stderr
    run(program, **ucx())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", compile_native.SANITIZERS)
def test_all_cases_under_a_sanitizer(sanitizer: str) -> None:
    program = built(build_core(sanitizer), *compile_native.SANITIZERS[sanitizer])
    run(program, timeout=1000, UBSAN_OPTIONS="print_stacktrace=1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (shutil.which(ARM64_COMPILER) and shutil.which(ARM64_EMULATOR)),
    reason="no cross compiler or emulator for arm64 (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
)
def test_all_cases_on_emulated_arm64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator does not reorder accesses to memory: for that see test_memory_order.py.

    Arenas took pages of 4 KB for granted. Where a page has 64 KB, withdrawn tensors lost their data.
    """
    folder = CSRC.parent / "build" / "arm64"
    monkeypatch.setenv("CXX", ARM64_COMPILER)
    compile_native.build([compile_native.core(CSRC)], folder, folder / "objects")
    program = built(folder, compiler=ARM64_COMPILER)
    emulator = (ARM64_EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    # The emulator refuses a filter of system calls, and the kernel cannot execute the program of the second case. In
    # the third, 66 ranks reply within a second: the emulator is too slow for that beside other load.
    left_out = {
        "ends_are_seen_without_pidfd",
        "a_slow_call_of_many_short_waits_is_reported",
        "many_ranks_learn_of_a_failure_over_few_connections",
    }
    names = {*run(*emulator, program, "--list").split()}
    assert left_out < names
    run(*emulator, program, *names - left_out)
    run(*emulator, "-p", "65536", program, *CASES_OF["shared_tensor_test"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_connections_of_other_processes_are_refused_many_times(program: Path) -> None:
    run(program, "rendezvous_rejects_garbage", DIST_PRIMS_TEST_HELLOS="200000")
    run(program, "tcp_rejects_other_processes", DIST_PRIMS_TEST_HELLOS="50000")  # a million takes 260 s
