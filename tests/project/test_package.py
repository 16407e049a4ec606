"""The package as others meet it: what importing costs, what is read at start, and a wheel in another environment."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from values import equal, noise

import dist_prims
from dist_prims.backend.compile_native import CORE, mpi_file
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
    """Registering once more changes nothing."""
    program = """
import sys, torch
assert "dist_prims" in torch.distributed.Backend.backend_list
print(sorted(name for name in sys.modules if name.startswith("dist_prims")))

from dist_prims.autoload import register
from dist_prims.torch_compat import rendezvous_handlers
register()
before = dict(rendezvous_handlers()), dict(torch.distributed.Backend.default_device_backend_map)
register()
print(before == (rendezvous_handlers(), torch.distributed.Backend.default_device_backend_map))
"""
    loaded, is_same = run(sys.executable, "-c", program).splitlines()
    names = ["", ".autoload", ".backend_name", ".stand_in", ".torch_compat"]
    assert loaded == str([f"dist_prims{name}" for name in names])
    assert is_same == "True"


def test_torch_finds_the_backend_when_the_name_is_used(tmp_path: Path) -> None:
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("this torch has no entry point torch.distributed.backends")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser of TOML")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    information = tmp_path / "dist_prims-0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: dist_prims\nVersion: 0.0\n")
    group = "torch.distributed.backends"
    lines = "".join(f"{name} = {target}\n" for name, target in points[group].items())
    (information / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    program = """
import sys, torch
assert "dist_prims" not in torch.distributed.Backend.backend_list
assert not any(name.startswith("dist_prims") for name in sys.modules)
torch.distributed.init_process_group("dist_prims", store=torch.distributed.HashStore(), rank=0, world_size=1)
print(torch.distributed.get_backend())
"""
    environ: dict[str, Any] = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert run(sys.executable, "-c", program, cwd=tmp_path, **environ) == "dist_prims\n"


def test_the_versions_of_python_that_are_declared_were_run() -> None:
    """And the oldest of them is what the package requires."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    table = (ROOT / "docs/installation.md").read_text().partition("## What was run where")[2]
    run_rows = re.findall(r"^\| (3\.\d+) \| .*\d+ passed", table, re.MULTILINE)
    assert declared == sorted(set(run_rows), key=lambda version: int(version[2:]))
    assert f'requires-python = ">={declared[0]}"' in text


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {dist_prims.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_packages_import_torch_only_if_they_need_it_and_start_no_thread() -> None:
    program = """
import os, sys, dist_prims
import dist_prims.schedules.pipelines
print(dist_prims.schedules.__name__, "torch" in sys.modules)
import torch
before = len(os.listdir("/proc/self/task"))
print(dist_prims.training.__name__)
import dist_prims.backend
dist_prims.empty(10)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run(sys.executable, "-c", program) == "dist_prims.schedules False\ndist_prims.training\n0\n"


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
            equal(found[0], found[1], count)
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
def test_a_wheel_of_the_source_distribution_works_without_compiler(tmp_path: Path) -> None:
    """Built as pip does it: sources, wheel, environment. There ranks run with no compiler, and mypy knows the types.

    A source distribution once lacked the sources for MPI if it was made where no mpicc was.
    """
    source = tmp_path / "source"
    run("git", "clone", "--quiet", str(ROOT), str(source))
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = run("git", "ls-files", cwd=source).split()
    assert not {name for name in tracked if not name.startswith(".")} - names
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # the last -O holds; optimizing takes two fifths of the time
    compiler.chmod(0o755)
    python, site = installed(str(archive), tmp_path, CXX=str(compiler))
    (site / "torch_of_the_tests.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    libraries = {str(each.relative_to(site / "dist_prims/lib")) for each in site.glob("dist_prims/lib/**/*.so")}
    assert {CORE, mpi_file("mpich")} <= libraries
    (tmp_path / "program.py").write_text(DDP_PROGRAM)
    bare: dict[str, Any] = {"PATH": str(python.parent), "CXX": "/no/compiler", "PYTHONPATH": ""}
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert sorted(run(*torchrun, "program.py", cwd=tmp_path, **bare).split()) == ["0:1.5", "1:1.5"]
    said = run(str(python), "-m", "dist_prims", "doctor", cwd=tmp_path, **bare)
    assert f"yes, by the adapter {site}/dist_prims/lib/torch" in said
    check_types(python, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_pure_wheel_needs_neither_torch_nor_posix(tmp_path: Path) -> None:
    """The wheel for macOS and Windows: what they lack of Python's modules is blocked here."""
    python, site = installed(str(ROOT), tmp_path, DIST_PRIMS_PURE="1")
    assert "py3-none-any.whl" in next(tmp_path.glob("*.whl")).name
    assert not list(site.glob("dist_prims/**/*.so"))
    numpy = Path(np.__file__).parents[1]
    (site / "numpy").symlink_to(numpy / "numpy")
    (site / "numpy.libs").symlink_to(numpy / "numpy.libs")
    (site / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(['fcntl', 'resource', 'pwd', 'grp']))\n"
    )
    here: dict[str, Any] = {"cwd": tmp_path, "PYTHONPATH": ""}
    assert "all_reduce" in run(str(python), "-m", "dist_prims", "algorithms", **here)
    run(str(python), "-m", "dist_prims", "show", "all_reduce", "ring", "--size", "4", "--svg", "ring.svg", **here)
    assert (tmp_path / "ring.svg").stat().st_size > 1000
    proved = run(str(python), "-m", "dist_prims", "prove", "--sizes", "1-4", **here)
    assert "ring" in proved
    command = [str(python), "-c", "import dist_prims; dist_prims.empty(3)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "ModuleNotFoundError: dist_prims.empty needs torch 2.11 or later: pip install torch" in done.stderr
    metadata = next(site.glob("dist_prims-*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: torch>=2.11" not in metadata.replace('Requires-Dist: torch>=2.11; extra == "torch"', "")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_build_needs_neither_torch_nor_a_compiler(tmp_path: Path) -> None:
    """What needs no library works then, and the rest says in a line what is missing."""
    run("git", "clone", "--quiet", str(ROOT), str(tmp_path / "source"))  # without what earlier builds left in build/
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(tmp_path / "source")]
    none = {"CXX": "/no/compiler"}
    done = subprocess.run(pip, capture_output=True, text=True, timeout=350, check=False, env={**os.environ, **none})
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip reaches no registry")
    assert done.returncode == 0, done.stderr
    python, site = installed_wheel(tmp_path)
    assert "-py3-none-linux_" in next(tmp_path.glob("*.whl")).name
    assert not list(site.glob("dist_prims/**/*.so"))
    (site / "torch_of_the_tests.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    program = """
import dist_prims, torch
def body():
    tensor = torch.ones(1)
    dist_prims.all_reduce(tensor, algorithm="ring")
    return tensor.item()
print(dist_prims.spawn(body, 2, timeout=60))
dist_prims.empty(3)
"""
    done = subprocess.run(
        [str(python), "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **none, "PYTHONPATH": ""},
    )
    assert done.stdout == "[2.0, 2.0]\n", done.stderr
    assert re.search(r"\nImportError: the core of dist_prims: .* Install g\+\+ 10 or later .*\n$", done.stderr), (
        done.stderr
    )


def installed(source: str, folder: Path, **environ: Any) -> tuple[Path, Path]:
    """Python and site-packages of a new environment with a wheel of the source, without dependencies."""
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), source]
    run(sys.executable, "-m", "pip", *build, timeout=900, **environ)
    return installed_wheel(folder)


def installed_wheel(folder: Path) -> tuple[Path, Path]:
    """Python and site-packages of a new environment with the wheel of the folder."""
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return python, next((folder / "venv").glob("lib/python*/site-packages"))


DDP_PROGRAM = """
import torch, torch.distributed as dist
from dist_prims.datasets import digits
assert len(digits()) == 1797  # a file of the package
dist.init_process_group("dist_prims")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
print(f"{dist.get_rank()}:{model.module.weight.grad[0, 0]}\\n", end="")
dist.destroy_process_group()
"""
TYPED_PROGRAM = """
import torch
import dist_prims

place = dist_prims.init("dist_prims")
dist_prims.all_reduce(torch.ones(3), algorithm="ring", segment_bytes=1 << 20)
averager = dist_prims.GradientAverager(torch.nn.Linear(2, 1))
reveal_type(dist_prims.empty(3))
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
    assert 'Argument "algorithm" to "all_reduce" has incompatible type "int"; expected "str | None"' in errors[0]
