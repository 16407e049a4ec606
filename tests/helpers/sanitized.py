"""The native libraries, built under a sanitizer in a folder that git ignores.

The next build compiles what has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dist_prims.backend import compile_native

__all__ = ["build_all", "build_core"]

ROOT = Path(__file__).parents[2]


def build_all(sanitizer: str) -> Path:
    """Build the core and the adapter; return the folder of the libraries."""
    folder = ROOT / "build" / f"sanitized-{sanitizer}"
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}/lib", f"--build-temp={folder}"]
    with _locked(folder):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "DIST_PRIMS_SANITIZE": sanitizer},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return folder / "lib/dist_prims/lib"


def build_core(sanitizer: str) -> Path:
    """Build the core; return the folder of the library. In the root of the project the objects are those of
    :func:`build_all`."""
    folder = ROOT / "build" / f"sanitized-{sanitizer}"
    libraries = folder / "lib/dist_prims/lib"
    core = compile_native.core(Path(os.path.relpath(ROOT / "csrc")))
    with _locked(folder):
        compile_native.build([core], libraries, folder, sanitizer=sanitizer)
    return libraries


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let the workers of pytest-xdist build one after another."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
