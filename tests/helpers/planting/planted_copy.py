"""A copy of a working tree in which one mistake at a time is planted, and its tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from project_copy import copy_project, site_packages

__all__ = ["PlantedCopy"]


class PlantedCopy:
    """The copy. It has the libraries of the tree, which must be compiled; a mistake in csrc compiles its own."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self._python = copy_project(tree, folder)
        (site_packages(folder) / "chosen_tests.py").write_text(Path(__file__).with_name("chosen_tests.py").read_text())
        self._libraries, self._kept = folder / "dist_prims" / "lib", tree / "dist_prims" / "lib"
        shutil.copytree(self._kept, self._libraries, dirs_exist_ok=True)
        (folder / "build").mkdir(exist_ok=True)

    def plant(self, diff: Path, file: str) -> str:
        """Apply a diff and compile what it changes; return the problem, if there is one."""
        if subprocess.run(
            ["git", "-C", str(self.folder), "apply", str(diff.absolute())], capture_output=True
        ).returncode:
            return "the diff does not apply"
        self._forget_bytecode(file)
        if file.startswith("csrc/") and not self._build():
            self.restore(diff, file)
            return "it does not compile"
        return ""

    def restore(self, diff: Path, file: str) -> None:
        command = ["git", "-C", str(self.folder), "apply", "--reverse", str(diff.absolute())]
        subprocess.run(command, check=True)
        self._forget_bytecode(file)
        if file.startswith("csrc/"):
            shutil.copytree(self._kept, self._libraries, dirs_exist_ok=True)

    def first_failure(self, tests: list[str], limit: float) -> str | None:
        """Run tests in this order.

        Return the first test that fails, "" if all pass, None if they take more than ``limit`` seconds.
        """
        chosen = self.folder / "build" / "chosen.txt"
        chosen.write_text("\n".join(tests))
        chosen.with_suffix(".failed").unlink(missing_ok=True)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        existing = [file for file in files if (self.folder / file).exists()]
        options = ["-q", "-x", "-p", "chosen_tests", "-p", "no:cacheprovider"]
        environment = {**os.environ, "CHOSEN_TESTS": str(chosen), "PATH": f"{self._python.parent}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        process = subprocess.Popen(
            [str(self._python), "-m", "pytest", *options, *existing],
            cwd=self.folder,
            env=environment,
            stdout=(self.folder / "build" / "chosen.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if chosen.with_suffix(".failed").exists():
            return chosen.with_suffix(".failed").read_text()
        if status is None:
            return None
        return f"the start of the tests (status {status})" if status else ""

    def _build(self) -> bool:
        command = [str(self._python), "setup.py", "-q", "build_ext", "--inplace", "--build-temp=build/objects"]
        return subprocess.run(command, cwd=self.folder, stdout=subprocess.DEVNULL).returncode == 0

    def _forget_bytecode(self, file: str) -> None:
        """Python would take compiled code whose source has the same size and second."""
        path = self.folder / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
