"""The native libraries: which file is taken, and how one is compiled at first use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_prims.backend import compile_native, native_libraries

ALL_REDUCE = """
import torch, dist_prims
def body():
    tensor = torch.ones(3)
    dist_prims.all_reduce(tensor)
    return tensor.sum().item()
if __name__ == "__main__":
    print(dist_prims.spawn(body, 2, backend="dist_prims", timeout=500))
"""


@pytest.fixture
def without_adapter(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose package has no adapter: links to the files of the real one, but for it."""
    package = tmp_path / "site" / "dist_prims"
    package.mkdir(parents=True)
    here = native_libraries.LIBRARIES.parent
    for each in here.iterdir():
        if each.name not in ("lib", "__pycache__"):
            (package / each.name).symlink_to(each)
    (package / "lib").mkdir()
    (package / "lib" / compile_native.CORE).symlink_to(native_libraries.LIBRARIES / compile_native.CORE)
    (package / "lib" / "csrc").symlink_to(native_libraries.sources())
    return {**os.environ, "PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def run(program: str, environ: dict[str, str], timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    folder = environ["PYTHONPATH"]  # not the checkout, whose package would be imported
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.slow
def test_without_adapter_and_compiler_the_error_says_what_to_do(without_adapter: dict[str, str]) -> None:
    environ = {**without_adapter, "CXX": "/no/compiler"}
    program = """
import dist_prims, dist_prims.schedules
from dist_prims.cli.doctor import report
try:
    dist_prims.empty(3)
except ImportError as error:
    print(error)
print("schedule:", dist_prims.schedules.build("all_reduce", "ring", 3).algorithm)
print("report:", report())
"""
    done = run(program, environ)
    error, _, report = done.stdout.partition("schedule: ring\n")
    assert error.startswith("the adapter for torch 2."), done.stdout + done.stderr
    assert error.count("\n") == 1
    assert "Install g++ 10 or later" in error
    for text in (error, report):
        assert "none can be compiled: the compiler '/no/compiler' does not run" in text, done.stdout
    assert "compiling" not in done.stderr


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(without_adapter: dict[str, str], tmp_path: Path) -> None:
    """It was a bare FileExistsError or PermissionError, without remedy."""
    (tmp_path / "cache").write_text("")
    done = run("import dist_prims; dist_prims.empty(3)", without_adapter)
    assert "ImportError: the adapter for torch 2." in done.stderr, done.stderr
    assert "a compiled one cannot be kept: [Errno" in done.stderr
    assert "set XDG_CACHE_HOME to a folder that is writable" in done.stderr


@pytest.mark.slow
def test_an_adapter_that_does_not_load_is_named(without_adapter: dict[str, str]) -> None:
    import torch

    folder = Path(without_adapter["PYTHONPATH"], "dist_prims", "lib", compile_native.adapter_folder(torch.__version__))
    folder.mkdir()
    (folder / compile_native.adapter_file()).write_text("no library")
    done = run("import dist_prims; dist_prims.empty(3)", {**without_adapter, "CXX": "/no/compiler"})
    assert "the package's adapter does not load: " in done.stderr, done.stderr
    assert "invalid ELF header" in done.stderr or "file too short" in done.stderr, done.stderr


@pytest.mark.slow
def test_without_core_and_sources_the_error_says_so(without_adapter: dict[str, str]) -> None:
    for name in (compile_native.CORE, "csrc"):
        Path(without_adapter["PYTHONPATH"], "dist_prims", "lib", name).unlink()
    done = run("import dist_prims; dist_prims.empty(3)", without_adapter)
    assert "ImportError: the core of dist_prims: the package has none, nor its sources" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(without_adapter: dict[str, str], tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\ncase \"$*\" in *-fsyntax-only*) exit 0;; esac\necho 'error: no space' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    done = run("import dist_prims; dist_prims.empty(3)", {**without_adapter, "CXX": str(compiler)})
    assert "compiling one failed" in done.stderr, done.stderr
    assert "error: no space" in done.stderr
    assert not list(tmp_path.glob("cache/dist_prims/libraries/*/_backend*"))


def test_the_folder_is_shared_by_releases_only() -> None:
    folder = compile_native.adapter_folder
    assert folder("2.13.0") == folder("2.13.1+cu130") == folder("2.13.0+cpu") == "torch2.13"
    assert folder("2.13.0a0+gitabc") != "torch2.13"
    assert folder("2.15.0.dev20261101+cpu") not in ("torch2.15", folder("2.15.0.dev20261102+cpu"))


def test_objects_are_compiled_again_when_a_header_is_newer(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "value.h").write_text("inline int value() { return 1; }\n")
    source = csrc / "one.cpp"
    source.write_text('#include "value.h"\nextern "C" int one() { return value(); }\n')
    library = compile_native.Library("one.so", (source,), ())

    def built() -> int:
        compile_native.build([library], tmp_path / "lib", tmp_path / "objects")
        (one,) = (tmp_path / "objects").rglob("*.o")
        return one.stat().st_mtime_ns

    first = built()
    assert built() == first
    later = first / 1e9 + 10
    os.utime(csrc / "value.h", (later, later))
    assert built() != first
    source.write_text("no C++")
    os.utime(source, (later + 10, later + 10))
    with pytest.raises(compile_native.CompileError, match=r"one\.cpp .*failed:\n.*error"):
        built()
    assert (tmp_path / "lib" / "one.so").exists()


def test_a_library_has_the_libstdcxx_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is set up to link it statically gave the process a second one, and every group crashed."""
    monkeypatch.setenv("CXX", f"{compile_native.compiler()} -static-libstdc++")
    source = tmp_path / "csrc" / "one.cpp"
    source.parent.mkdir()
    source.write_text("#include <iostream>\nvoid one() { std::cout << 1; }\n")
    compile_native.build([compile_native.Library("one.so", (source,), ())], tmp_path, tmp_path / "objects")
    assert b"libstdc++.so" in (tmp_path / "one.so").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_the_ranks_compiles_at_first_use(without_adapter: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ALL_REDUCE)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # the last -O holds, and optimizing takes most of the time
    compiler.chmod(0o755)
    environ = {**without_adapter, "CXX": str(compiler)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1100, check=False)
    assert done.stdout == "[6.0, 6.0]\n", done.stderr
    assert done.stderr.count("compiling the adapter for torch") == 1, done.stderr
    assert done.stderr.count("dist_prims: compiled in ") == 1
    (compiled,) = tmp_path.glob("cache/dist_prims/libraries/*/_backend*.so")
    done = run("from dist_prims.cli.doctor import report; print(report())", without_adapter)
    assert f"yes, by the adapter {compiled} (compiled at an earlier use, because the package has none" in done.stdout


@pytest.mark.slow
def test_the_library_for_ucx_is_compiled_at_first_use(without_adapter: dict[str, str]) -> None:
    """It was found only in packages whose build had seen the headers of UCX."""
    if compile_native.ucx_headers() is None:
        pytest.skip("there are no headers of UCX")
    program = "from dist_prims.backend.ucx_library import NATIVE; print(NATIVE.path()); print(NATIVE.path())"
    done = run(program, without_adapter)
    one, two = done.stdout.split()
    assert one == two, done.stderr
    assert Path(one).is_relative_to(without_adapter["XDG_CACHE_HOME"])
    assert done.stderr.count("compiling the library for UCX: the package has none") == 1


def test_the_adapter_has_all_sources() -> None:
    folder = native_libraries.sources() / "torch"
    included = re.findall(r'#include "(.+)"', (folder / "adapter.cpp").read_text())
    assert included == sorted(str(each.relative_to(folder)) for each in folder.glob("*/*.cpp"))
