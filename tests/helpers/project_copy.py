"""A copy of the project with an environment of its own, in which a tool may change sources and libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["copy_project"]


def copy_project(source: Path, folder: Path) -> Path:
    """Make ``folder`` a copy of the working tree ``source``, uncommitted files included; return its Python.

    An earlier copy is updated. Files that git ignores stay, so that the next build compiles what has changed.
    """
    if not folder.exists():
        run("git", "clone", "--quiet", "--shared", "--no-checkout", str(source), str(folder))
    git = ("git", "-C", str(folder))
    run(*git, "fetch", "--quiet", str(source), "HEAD")
    run(*git, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
    run(*git, "clean", "--quiet", "--force", "-d")
    if changes := run("git", "-C", str(source), "diff", "--binary", "HEAD"):
        subprocess.run([*git, "apply"], input=changes, text=True, check=True)
    for name in run("git", "-C", str(source), "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, folder / name)
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        _copy_environment(folder)
    return python


def _copy_environment(folder: Path) -> None:
    """Copy the environment of this process by hard links. The new environment has the package and the
    interpreter of the copy."""
    old, new = Path(sys.prefix), folder / ".venv"
    shutil.rmtree(new, ignore_errors=True)
    run("cp", "-a", "--link", str(old), str(new))
    for editable in site_packages(folder).glob("__editable__*.pth"):
        editable.unlink()
    (site_packages(folder) / "project_copy.pth").write_text(f"{folder}\n")
    for script in (new / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and (content := script.read_bytes()).startswith(b"#!"):
            mode = script.stat().st_mode
            script.unlink()  # the file of the old environment stays as it is
            script.write_bytes(content.replace(bytes(old), bytes(new)))
            script.chmod(mode)


def site_packages(folder: Path) -> Path:
    return folder / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
