"""Build script: the native libraries, see dist_prims/backend/compile_native.py. The metadata is in pyproject.toml.

The libraries for MPI are compiled with its header alone and linked to none of its libraries: they use the one that
mpi4py loads. An mpicc tells where the header is: that of the environment, that of the PATH, and those that the variable
DIST_PRIMS_MPICC names, with colons between them.

The library for UCX is compiled with its headers alone, too: those of the folder that DIST_PRIMS_UCX names, of the
package libucx-cu12 in this environment, or of the system.

- DIST_PRIMS_TORCH=folder:folder compiles adapters for these packages of torch as well as for the installed one.
- DIST_PRIMS_PURE=1 builds a wheel without native libraries: schedules, proofs, pictures. It needs no torch.
- DIST_PRIMS_SANITIZE=address or =thread compiles core and adapter under that sanitizer, for tests. Give the build a
  folder of its own, or it replaces the ordinary libraries:

    DIST_PRIMS_SANITIZE=thread python setup.py build_ext --build-lib build/thread --build-temp build/thread
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PURE = os.environ.get("DIST_PRIMS_PURE") == "1"
SANITIZER = os.environ.get("DIST_PRIMS_SANITIZE", "")
CSRC = Path("csrc")
FOLDER = Path("dist_prims", "lib")

_spec = importlib.util.spec_from_file_location("compile_native", Path("dist_prims", "backend", "compile_native.py"))
native = sys.modules["compile_native"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)

TORCH = None if PURE else importlib.util.find_spec("torch")
if not PURE and TORCH is None:  # at once, before pip downloads anything
    raise SystemExit(
        "dist_prims is built against the torch that it will run with, and there is none in this environment. "
        "Install torch 2.11 or later first, then: pip install --no-build-isolation ."
    )
if SANITIZER and SANITIZER not in native.SANITIZERS:
    raise SystemExit(f"DIST_PRIMS_SANITIZE={SANITIZER}: it is 'address' or 'thread'")


class Build(build_ext):
    """Compiles the native libraries in place of the extension, which stands for all of them."""

    def run(self):
        self.compiled = libraries()
        into = FOLDER if self.inplace or self.editable_mode else Path(self.build_lib) / FOLDER
        native.build(self.compiled, into, Path(self.build_temp), sanitizer=SANITIZER)
        if into != FOLDER:  # the sources of the adapter, for a torch that has none
            for source in [*CSRC.rglob("*.h"), *CSRC.glob("torch/**/*.cpp")]:
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


def libraries():
    installed = Path(TORCH.origin).parent
    torches = [installed, *map(Path, filter(None, os.environ.get("DIST_PRIMS_TORCH", "").split(":")))]
    families = {} if SANITIZER else mpi_headers()
    ucx = None if SANITIZER else ucx_headers()
    adapters = {library.file: library for library in (native.adapter(CSRC, torch) for torch in torches)}
    return [
        native.core(CSRC),
        *([] if ucx is None else [native.ucx(CSRC, ucx)]),
        *(native.mpi(CSRC, family, headers) for family, headers in sorted(families.items())),
        *adapters.values(),
    ]


def ucx_headers():
    """The folders of the headers of UCX, none if the compiler finds them by itself; None if there are no headers."""
    package = importlib.util.find_spec("libucx")
    prefixes = [os.environ.get("DIST_PRIMS_UCX"), *(package.submodule_search_locations if package else [])]
    for folder in [str(Path(prefix, "include")) for prefix in prefixes if prefix]:
        if Path(folder, "ucp", "api", "ucp.h").is_file():
            return [folder]
    if any(Path(folder, "ucp", "api", "ucp.h").is_file() for folder in ("/usr/include", "/usr/local/include")):
        return []
    print("dist_prims: built without UCX: no ucp/api/ucp.h is found", file=sys.stderr)
    return None


def mpi_headers():
    """The folders of the headers of each family of MPI for which there is an mpicc."""
    named = [name for name in os.environ.get("DIST_PRIMS_MPICC", "").split(":") if name]
    found = {}
    for mpicc in [*named, str(Path(sys.executable).parent / "mpicc"), shutil.which("mpicc")]:
        family, headers = ask(mpicc) if mpicc else (None, [])
        if family:
            found.setdefault(family, headers)
        elif mpicc in named:
            print(f"dist_prims: {mpicc} is no mpicc of Open MPI or of MPICH's kind, and left out", file=sys.stderr)
    for family in native.FAMILIES.keys() - found.keys():
        print(f"dist_prims: built without {native.FAMILIES[family]}: no mpicc of it is found", file=sys.stderr)
    return found


def ask(mpicc):
    """Family and folders of headers of an mpicc; no family if it is none."""
    for family, question in (("openmpi", "--showme:compile"), ("mpich", "-show")):
        try:
            said = subprocess.run([mpicc, question], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        folders = [word[2:] for word in shlex.split(said) if word.startswith("-I")]
        if any(Path(folder, "mpi.h").is_file() for folder in folders):
            return family, folders
    return None, []


setup(
    ext_modules=[] if PURE else [Extension("dist_prims.lib.native", [])],
    cmdclass={"build_ext": Build, "build_py": WithCourse},
)
