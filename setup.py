"""Build script: the native libraries, see dist_prims/backend/compile_native.py. The metadata is in pyproject.toml.

What is not built here is compiled when it is first used: the adapter for torch, if this environment has no torch, as in
pip's isolated builds, and all libraries, if there is no compiler.

The libraries for MPI are compiled with its header alone and linked to none of its libraries: they use the one that
mpi4py loads. An mpicc tells where the header is: each mpicc in DIST_PRIMS_MPICC (separated by colons), the
environment's mpicc, and the mpicc on the PATH.

The library for UCX is compiled with its headers alone, too: those of the folder that DIST_PRIMS_UCX names, of the
package libucx-cu12 in this environment, or of the system.

- DIST_PRIMS_TORCH=folder:folder compiles adapters for these packages of torch as well as for the installed one.
- DIST_PRIMS_PYTHON=python3.12:python3.13 compiles all adapters for these interpreters as well as for this one.
- DIST_PRIMS_PURE=1 builds a wheel without native libraries: schedules, proofs, pictures. It needs no torch.
- DIST_PRIMS_SANITIZE=address or =thread compiles core and adapter under that sanitizer, for tests. Give the build a
  folder of its own, or it replaces the ordinary libraries:

    DIST_PRIMS_SANITIZE=thread python setup.py build_ext --build-lib build/thread --build-temp build/thread
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PURE = os.environ.get("DIST_PRIMS_PURE") == "1" or sys.platform != "linux"
SANITIZER = os.environ.get("DIST_PRIMS_SANITIZE", "")
CSRC = Path("csrc")
FOLDER = Path("dist_prims", "lib")
REQUIRED = ["numpy>=1.26", "cloudpickle>=3"]
TORCH = "torch>=2.11"

_spec = importlib.util.spec_from_file_location("compile_native", Path("dist_prims", "backend", "compile_native.py"))
native = sys.modules["compile_native"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)

if SANITIZER and SANITIZER not in native.SANITIZERS:
    raise SystemExit(f"DIST_PRIMS_SANITIZE={SANITIZER}: it is 'address' or 'thread'")


class Build(build_ext):
    """Compiles the native libraries in place of the extension, which stands for all of them."""

    def run(self):
        self.compiled = libraries()
        into = FOLDER if self.inplace or self.editable_mode else Path(self.build_lib) / FOLDER
        native.build(self.compiled, into, Path(self.build_temp), sanitizer=SANITIZER)
        if into != FOLDER:  # the sources, for what is compiled at first use
            for source in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]:
                if "tests" not in source.parts:
                    copy = into / source
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, copy)

    def get_outputs(self):
        return [str(Path(self.build_lib) / FOLDER / each.file) for each in getattr(self, "compiled", [])]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return list(map(str, CSRC.rglob("*.*")))


class WithCourse(build_py):
    """Copies the lessons of the course into a wheel; an editable install reads them in docs/course."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "docs/course", Path(self.build_lib, "dist_prims", "learn", "course_files"), dirs_exist_ok=True
            )


class AnyPython(bdist_wheel):
    """Names the wheel for every Python 3: only adapters depend on the interpreter, and one that lacks is compiled."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def libraries():
    """All libraries that can be compiled here. What is left out is compiled at first use."""
    if problem := native.compiler_problem():
        print(f"dist_prims: built without native libraries: {problem}", file=sys.stderr)
        return []
    built = [native.core(CSRC), *adapters().values()]
    if SANITIZER:
        return built
    ucx, families = native.ucx_headers(), native.mpi_headers()
    if ucx is None:
        print("dist_prims: built without UCX: no ucp/api/ucp.h is found", file=sys.stderr)
    else:
        built.append(native.ucx(CSRC, ucx))
    for family in native.FAMILIES.keys() - families.keys():
        print(f"dist_prims: built without {native.FAMILIES[family]}: no mpicc of it is found", file=sys.stderr)
    return [*built, *(native.mpi(CSRC, family, headers) for family, headers in sorted(families.items()))]


def adapters():
    installed = importlib.util.find_spec("torch")
    torches = [*map(Path, filter(None, os.environ.get("DIST_PRIMS_TORCH", "").split(":")))]
    if installed is not None:
        torches.insert(0, Path(installed.origin).parent)
    elif not torches:
        print("dist_prims: built without an adapter: there is no torch in this environment", file=sys.stderr)
    others = filter(None, os.environ.get("DIST_PRIMS_PYTHON", "").split(":"))
    pythons = [native.Python(), *map(native.Python.of, others)]
    built = [native.adapter(CSRC, torch, python) for torch in torches for python in pythons]
    return {library.file: library for library in built}


setup(
    ext_modules=[] if PURE else [Extension("dist_prims.lib.native", [])],
    cmdclass={"build_ext": Build, "build_py": WithCourse} | ({} if PURE else {"bdist_wheel": AnyPython}),
    install_requires=[*REQUIRED, *([] if PURE else [TORCH])],
)
