"""Build script: the extension dist_prims._backend, and one for each kind of MPI. The metadata is in pyproject.toml.

The extensions for MPI are compiled with its header alone and linked to none of its libraries: they use the one that
mpi4py loads. An mpicc tells where the header is: that of the environment, that of the PATH, and those that the variable
DIST_PRIMS_MPICC names, with colons between them.

DIST_PRIMS_SANITIZE=address or =thread builds dist_prims._backend alone, under that sanitizer, for tests. Give the build
a folder of its own, or it replaces the ordinary extension:

    DIST_PRIMS_SANITIZE=thread python setup.py build_ext --build-lib build/thread --build-temp build/thread
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "dist_prims is built against the torch that it will run with, and there is none in this environment. "
        "Install torch 2.11 or later first, then: pip install --no-build-isolation ."
    ) from error

# Without contraction a * b + c rounds twice on every processor: the same bits everywhere.
COMMON = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
SANITIZERS = {"": "", "address": "address,undefined", "thread": "thread"}
SANITIZER = SANITIZERS.get(os.environ.get("DIST_PRIMS_SANITIZE", ""))
if SANITIZER is None:
    raise SystemExit(f"DIST_PRIMS_SANITIZE={os.environ['DIST_PRIMS_SANITIZE']}: it is 'address' or 'thread'")
INSTRUMENTED = ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZER}"]
FLAGS = [*COMMON, *(INSTRUMENTED if SANITIZER else ["-O3", "-g0"])]
CORE = [source for folder in ("common", "shm", "net") for source in Path("csrc", folder).glob("*.cpp")]  # no torch
FAMILIES = {"mpich": "MPICH, Intel MPI or MVAPICH", "openmpi": "Open MPI"}  # by the kind of their handles


class Build(BuildExtension):
    """The extensions share sources and not the flags, so each has its own folder of objects."""

    def build_extension(self, ext):
        everything = self.build_temp
        self.build_temp = str(Path(everything) / ext.name)
        super().build_extension(ext)
        self.build_temp = everything


def extension(name, sources, include_dirs=()):
    return CppExtension(
        f"dist_prims.{name}",
        sources=sorted(map(str, [*CORE, *sources])),
        depends=sorted(map(str, Path("csrc").rglob("*.h"))),
        include_dirs=list(include_dirs),
        define_macros=[("DIST_PRIMS_TORCH", f'"{torch.__version__}"')],
        extra_compile_args=FLAGS,
        extra_link_args=[f"-fsanitize={SANITIZER}"] if SANITIZER else [],
    )


def backend():
    """The sources of the backend. An instrumented build compiles them as one: the headers of torch, parsed and
    instrumented once for each source, are nearly all of what it takes."""
    sources = sorted(source for folder in ("common", "backend") for source in Path("csrc/torch", folder).glob("*.cpp"))
    if not SANITIZER:
        return sources
    text = "".join(f'#include "../{source}"\n' for source in sources)
    one = Path("build", f"backend_with_{SANITIZER.replace(',', '_')}.cpp")
    if not one.exists() or one.read_text() != text:  # else an incremental build would compile it again
        one.parent.mkdir(exist_ok=True)
        one.write_text(text)
    return [one]


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


def mpi_extensions():
    named = [name for name in os.environ.get("DIST_PRIMS_MPICC", "").split(":") if name]
    found = {}
    for mpicc in [*named, str(Path(sys.executable).parent / "mpicc"), shutil.which("mpicc")]:
        family, folders = ask(mpicc) if mpicc else (None, [])
        if family:
            found.setdefault(family, folders)
        elif mpicc in named:
            print(f"dist_prims: {mpicc} is no mpicc of Open MPI or of MPICH's kind, and left out", file=sys.stderr)
    for family in FAMILIES.keys() - found.keys():
        print(f"dist_prims: built without {FAMILIES[family]}: no mpicc of it is found", file=sys.stderr)
    sources = [source for folder in ("mpi", "torch/mpi", "torch/common") for source in Path("csrc", folder).glob("*.cpp")]
    return [extension(f"_mpi_{family}", sources, folders) for family, folders in sorted(found.items())]


setup(
    ext_modules=[extension("_backend", backend()), *([] if SANITIZER else mpi_extensions())],
    cmdclass={"build_ext": Build},
)
