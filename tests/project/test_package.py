"""The package as others meet it: what importing costs, what is read at start, and a wheel in another environment."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from values import equal, noise

import dist_prims
from dist_prims.backend.tuning import ONE_SHOT_BYTES, TUNING, tuned
from dist_prims.errors import MismatchError

ROOT = Path(__file__).parents[2]


def run(*command: str, timeout: float = 100, cwd: Path | None = None, **environ: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_torch_makes_the_name_known_and_loads_nothing() -> None:
    program = """
import sys, torch
assert "dist_prims" in torch.distributed.Backend.backend_list
print(sorted(name for name in sys.modules if name.startswith("dist_prims")))
"""
    assert run(sys.executable, "-c", program) == "['dist_prims', 'dist_prims.autoload', 'dist_prims.torch_compat']\n"


def test_importing_the_package_starts_no_thread() -> None:
    program = """
import os, torch, dist_prims
before = len(os.listdir("/proc/self/task"))
import dist_prims.backend
dist_prims.empty(10)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run(sys.executable, "-c", program) == "0\n"


def test_packages_are_attributes_and_torch_is_imported_only_by_those_that_need_it() -> None:
    program = """
import sys, dist_prims
print(dist_prims.schedules.__name__, "torch" in sys.modules, dist_prims.training.__name__, "torch" in sys.modules)
"""
    assert run(sys.executable, "-c", program) == "dist_prims.schedules False dist_prims.training True\n"


def test_the_names_for_type_checkers_are_those_that_are_imported() -> None:
    tree = ast.parse((ROOT / "dist_prims/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        each.names[0].name: (each.module or "").split(".")[0] for each in block.body if isinstance(each, ast.ImportFrom)
    }
    assert typed == dist_prims._HOME


def test_what_was_measured_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_PRIMS_TUNING", str(tmp_path / "there" / "tuning.json"))
    TUNING.write({"one_shot_bytes": {"2": 4096, "3": 0}})
    assert (tuned(2), tuned(3), tuned(4)) == (4096, 0, ONE_SHOT_BYTES)

    def body() -> None:
        rank = dist.get_rank()
        one = dist.new_group(pg_options=dist_prims.BackendOptions(one_shot_bytes=1 << 20))
        for count in (1, 1000, 100_000):
            found = [noise(rank, torch.float32, count) for _ in range(2)]
            dist.all_reduce(found[0])
            dist.all_reduce(found[1], group=one)
            equal(*found, count)
        with pytest.raises(MismatchError, match=r"by one shot to 0, slot 1048576.*by one shot to [12], slot 1048576"):
            dist.new_group(pg_options=dist_prims.BackendOptions(one_shot_bytes=rank))

    dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tuning_writes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    said = run(sys.executable, "-m", "dist_prims", "tune", "--ranks", "2", timeout=300, DIST_PRIMS_TUNING=str(file))
    assert "2 ranks: one shot up to" in said
    assert '"2": ' in file.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_of_the_source_distribution_works_in_another_environment(tmp_path: Path) -> None:
    """Built as pip does it: sources, wheel, environment. Then ranks run there, and mypy knows the types."""
    source = tmp_path / "source"
    run("git", "clone", "--quiet", str(ROOT), str(source))
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = run("git", "ls-files", cwd=source).split()
    assert not {name for name in tracked if not name.startswith(".")} - names
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(archive)]
    run(sys.executable, "-m", "pip", *build, timeout=900)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "torch_of_the_tests.pth").write_text("\n".join(here) + "\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = run(str(python), str(program))
    assert said.startswith("[6.0, 6.0]")
    assert str(site) in said
    check_types(python, tmp_path)


PROGRAM = """
import torch, dist_prims
from dist_prims.backend.torch_adapter import load
def body():
    tensor = torch.ones(3)
    torch.distributed.all_reduce(tensor)
    return tensor.sum().item()
print(dist_prims.spawn(body, 2, backend='dist_prims', timeout=60), load().file)
"""
TYPED_PROGRAM = """
import torch
import dist_prims

place = dist_prims.init("dist_prims")
dist_prims.all_reduce(torch.ones(3), algorithm="ring", segment_bytes=1 << 20)
averager = dist_prims.GradientAverager(torch.nn.Linear(2, 1))
reveal_type(dist_prims.all_reduce_(torch.ones(3)))
dist_prims.all_reduce(torch.ones(3), algorithm=3)
"""


def check_types(python: Path, folder: Path) -> None:
    """mypy once called every name of the package Any: no py.typed was shipped."""
    program = folder / "typed.py"
    program.write_text(TYPED_PROGRAM)
    options = ["--strict", "--cache-dir", str(folder / "cache"), "--python-executable", str(python)]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=folder)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert 'Revealed type is "torch._tensor.Tensor"' in done.stdout, done.stdout
    assert len(errors) == 1, done.stdout
    assert 'Argument "algorithm" to "all_reduce" has incompatible type "int"' in errors[0]
