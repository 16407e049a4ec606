"""The fuzz of the backend (fuzz_backend.py): with the ordinary libraries, and with those built under each sanitizer.

The adapter to torch takes minutes to build; the short form has only the core under AddressSanitizer.
ThreadSanitizer has to see both, because each synchronizes threads of the other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitized import build_all, build_core

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests/helpers"
COMPILER = os.environ.get("CXX", "c++")

LIBRARIES = {"address": ["libasan.so", "libstdc++.so.6"], "thread": ["libtsan.so"]}  # ASAN looks up what throws
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=2", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": f"suppressions={HELPERS}/fuzzing/thread.supp:die_after_fork=0:history_size=4"},
}

# Faults of a user's program that only an instrumented extension can see: proof that the sanitizer works.
ALONE = """
import threading, torch, torch.distributed as dist, dist_prims
dist.init_process_group("dist_prims", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(10_000)
"""
PLANTED = {
    "address": """
tensor.untyped_storage().resize_(8)
dist_prims.all_reduce(tensor)
""",
    "thread": """
def call(group):
    for _ in range(100):
        dist_prims.all_reduce(tensor, group=group)
threads = [threading.Thread(target=call, args=(dist.new_group([0]),)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
}
REPORT = re.compile(r"WARNING: ThreadSanitizer|AddressSanitizer:|runtime error:")
REPORTED = {"address": "AddressSanitizer: heap-buffer-overflow", "thread": "ThreadSanitizer: data race"}


def run(command: list[str], limit: float, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program; when it takes too long, show what it has written."""
    try:
        return subprocess.run(
            command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        texts = [each if isinstance(each, str) else (each or b"").decode() for each in (error.stdout, error.stderr)]
        raise AssertionError(f"no end after {limit:g} s: {command}\n{''.join(texts)[-20_000:]}") from None


def fuzz(python: list[str], seed: int, seconds: float, limit: float, **environment: str) -> str:
    """The output of the fuzz, which starts rounds for so many seconds."""
    program = [str(HELPERS / "fuzz_backend.py"), f"--seed={seed}", "--rounds=1000", f"--seconds={seconds:g}"]
    done = run([*python, *program], limit, HELPERS, **environment)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    assert not REPORT.search(done.stderr), done.stderr[-20_000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_fuzz(seed: int) -> None:
    output = fuzz([sys.executable], seed, seconds=8 if seed else 3, limit=280)
    assert output.splitlines()[-1].endswith(" 0 failed")


def library(name: str) -> str:
    """The path of a library of the compiler's."""
    found = run([COMPILER, f"-print-file-name={name}"], 60, ROOT).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{COMPILER} has no {name}: this test needs the sanitizers of GCC")
    return found


def without_random_addresses() -> list[str]:
    """The prefix of a command for ThreadSanitizer, which ends where the kernel randomizes addresses much."""
    setarch = shutil.which("setarch")
    prefix = [setarch, "-R"] if setarch else []
    return prefix if prefix and run([*prefix, "true"], 60, ROOT).returncode == 0 else []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sanitizer", "part", "seconds"),
    [
        pytest.param("address", "core", 8, marks=pytest.mark.slow),
        pytest.param("address", "core and adapter", 25, marks=pytest.mark.long(minutes=4)),
        pytest.param("thread", "core and adapter", 25, marks=pytest.mark.long(minutes=2)),
    ],
)
def test_the_fuzz_under_a_sanitizer(sanitizer: str, part: str, seconds: float, tmp_path: Path) -> None:
    environment = {
        "LD_PRELOAD": ":".join(library(name) for name in LIBRARIES[sanitizer]),
        "PYTHONPATH": str(tmp_path),
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees the objects of Python
        "OMP_NUM_THREADS": "1",
        **OPTIONS[sanitizer],
    }
    package = tmp_path / "dist_prims"
    shutil.copytree(ROOT / "dist_prims", package, ignore=shutil.ignore_patterns("__pycache__"))
    built = build_core(sanitizer) if part == "core" else build_all(sanitizer)
    shutil.copytree(built, package / "lib", dirs_exist_ok=True)
    python = [*(without_random_addresses() if sanitizer == "thread" else []), sys.executable]
    planted = run([*python, "-c", ALONE + PLANTED[sanitizer]], 300, tmp_path, **environment)
    assert REPORTED[sanitizer] in planted.stderr, planted.stderr
    output = fuzz(python, 2, seconds=seconds, limit=600, **environment)
    assert f"extension {tmp_path}" in output.splitlines()[0]
    assert output.splitlines()[-1].endswith(" 0 failed")
