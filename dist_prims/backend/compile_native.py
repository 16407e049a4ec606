"""Compilation of the native libraries: the core, one for UCX, one for each family of MPI, an adapter for each torch.

- ``libdist_prims_core.so``: shared memory, transports, kernels. It knows neither torch nor MPI nor UCX.
- ``libdist_prims_ucx.so``: calls of UCX, resolved by the libucp that ``ucx_library.py`` finds at run time.
- ``libdist_prims_mpich.so`` and ``libdist_prims_openmpi.so``: calls of MPI, resolved by the MPI that mpi4py has loaded.
- ``torch2.13/_backend.*.so``: the adapter, a Python module between the core and the headers of one torch.

``setup.py`` compiles the libraries whose headers it finds. A process compiles a library that its package lacks when it
first needs it, see ``native_libraries.py``. The module imports only the standard library, because ``setup.py`` loads it
without the package.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__: list[str] = []

CORE = "libdist_prims_core.so"
UCX = "libdist_prims_ucx.so"
FAMILIES = {"mpich": "MPICH, Intel MPI or MVAPICH", "openmpi": "Open MPI"}  # by the kind of their handles
# The first fault ends the process. The check of vptr opens a pipe, and reports faults where no descriptor is left.
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}

# Without contraction a * b + c rounds twice on every processor: the same bits everywhere.
_COMMON = ["-std=c++20", "-fPIC", "-DNDEBUG", "-ffp-contract=off", "-fno-math-errno", "-Wall"]
# Named, because some compilers are set up to link libstdc++ statically: a process then had a second libstdc++ beside
# torch's, and crashed at the first number that a stream wrote.
_LIBSTDCXX = "-lstdc++"
# The core exports its symbols; calls within it are bound at link time and may be inlined.
_EXPORTS = ["-fno-semantic-interposition", "-fvisibility-inlines-hidden"]
_HIDES = ["-fvisibility=hidden"]
_LIMIT = 1800  # seconds for one run of the compiler


class CompileError(RuntimeError):
    """The compiler or the linker failed."""


@dataclass(frozen=True)
class Library:
    """A library: its file below the folder of libraries, its sources, its flags."""

    file: str
    sources: tuple[Path, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()


def core(csrc: Path) -> Library:
    """The library without torch, MPI and UCX, to which the others are linked."""
    sources = [source for folder in ("common", "shm", "net", "tcp") for source in sorted((csrc / folder).glob("*.cpp"))]
    return Library(CORE, tuple(sources), tuple(_EXPORTS), ("-Wl,-Bsymbolic-functions", f"-Wl,-soname,{CORE}"))


def ucx(csrc: Path, headers: Iterable[str]) -> Library:
    """The library for UCX; ``headers`` are the folders of its headers."""
    return _over_core(UCX, csrc / "ucx", headers)


def mpi(csrc: Path, family: str, headers: Iterable[str]) -> Library:
    """The library for one family of MPI; ``headers`` are the folders of its ``mpi.h``."""
    return _over_core(mpi_file(family), csrc / "mpi", headers)


def _over_core(file: str, folder: Path, headers: Iterable[str]) -> Library:
    """The library of the sources in a folder, linked to the core, which is beside it at run time."""
    flags = (*_HIDES, *(f"-isystem{path}" for path in headers))
    return Library(file, tuple(sorted(folder.glob("*.cpp"))), flags, _core_beside("$ORIGIN"))


def mpi_file(family: str) -> str:
    return f"libdist_prims_{family}.so"


def adapter(csrc: Path, torch: Path, python: Python | None = None) -> Library:
    """The adapter for the torch whose package is in the folder ``torch``. That torch is not imported.

    ``python``: the interpreter that will load the adapter, by default the running one.
    """
    python = python or Python()
    include = torch / "include"
    headers = [include, include / "torch" / "csrc" / "api" / "include", Path(python.include)]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    version = version_of(torch)
    return Library(
        f"{adapter_folder(version)}/{adapter_file(python)}",
        (csrc / "torch" / "adapter.cpp",),
        (*_HIDES, f'-DBUILT_FOR_TORCH="{version}"', *(f"-isystem{folder}" for folder in headers)),
        (*_core_beside("$ORIGIN/.."), *libraries),
    )


@dataclass(frozen=True)
class Python:
    """A Python interpreter for which an extension is compiled: the folder of its headers, the suffix of extensions."""

    include: str = sysconfig.get_path("include")
    suffix: str = sysconfig.get_config_var("EXT_SUFFIX")

    @classmethod
    def of(cls, executable: str) -> Python:
        """Ask the interpreter ``executable``."""
        question = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep='\\n')"
        reply = subprocess.run([executable, "-c", question], capture_output=True, text=True, check=True, timeout=60)
        return cls(*reply.stdout.split("\n")[:2])


def adapter_file(python: Python | None = None) -> str:
    return f"_backend{(python or Python()).suffix}"


def ucx_headers() -> list[str] | None:
    """The folders of the headers of UCX, empty if the compiler finds them by itself; None if there are no headers."""
    package = importlib.util.find_spec("libucx")
    locations = (package and package.submodule_search_locations) or []
    for prefix in filter(None, [os.environ.get("DIST_PRIMS_UCX"), *locations]):
        if Path(prefix, "include", "ucp", "api", "ucp.h").is_file():
            return [str(Path(prefix, "include"))]
    folders = ("/usr/include", "/usr/local/include")
    return [] if any(Path(folder, "ucp", "api", "ucp.h").is_file() for folder in folders) else None


def mpi_headers() -> dict[str, list[str]]:
    """The folders of the headers of each family of MPI for which there is an mpicc."""
    named = [name for name in os.environ.get("DIST_PRIMS_MPICC", "").split(":") if name]
    headers_of: dict[str, list[str]] = {}
    for mpicc in [*named, str(Path(sys.executable).parent / "mpicc"), shutil.which("mpicc")]:
        family, headers = _ask_mpicc(mpicc) if mpicc else (None, [])
        if family:
            headers_of.setdefault(family, headers)
        elif mpicc in named:
            print(f"dist_prims: {mpicc} is not an mpicc of Open MPI or of MPICH's kind, and left out", file=sys.stderr)
    return headers_of


def _ask_mpicc(mpicc: str) -> tuple[str | None, list[str]]:
    """Family and folders of headers of an mpicc; None if the command is not an mpicc of either family."""
    for family, question in (("openmpi", "--showme:compile"), ("mpich", "-show")):
        try:
            reply = subprocess.run([mpicc, question], capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        folders = [word[2:] for word in shlex.split(reply) if word.startswith("-I")]
        if any(Path(folder, "mpi.h").is_file() for folder in folders):
            return family, folders
    return None, []


def adapter_folder(version: str) -> str:
    """The folder of the adapter for a version of torch: releases that differ in the third number share one.

    A version between two releases, such as a nightly one, has a folder of its own.

    >>> adapter_folder("2.13.0+cpu"), adapter_folder("2.13.1")
    ('torch2.13', 'torch2.13')
    >>> adapter_folder("2.14.0a0+git1234")
    'torch2.14.0a0+git1234'
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", version)
    return f"torch{release[1] if release else version}"


def version_of(torch: Path) -> str:
    """The version of the torch in this folder, without importing it."""
    assignment = re.search(r"^__version__ = '(.+)'$", (torch / "version.py").read_text(), re.MULTILINE)
    if not assignment:
        raise CompileError(f"{torch / 'version.py'} names no version of torch")
    return assignment[1]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


@functools.cache
def compiler_problem() -> str:
    """Why nothing can be compiled; empty if a C++20 compiler is there."""
    try:
        check = [*shlex.split(compiler()), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
        done = subprocess.run(check, input="int main() { return 0; }", text=True, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler {compiler()!r} does not run: {error}"
    return f"{compiler()!r} is not a C++20 compiler: {done.stderr.strip()[-500:]}" if done.returncode else ""


def build(libraries: Sequence[Library], into: Path, objects: Path, *, sanitizer: str = "", report: bool = True) -> None:
    """Compile libraries.

    Args:
        libraries: what to compile.
        into: the folder of the results. Libraries other than the core are linked to the core in this folder.
        objects: the folder that keeps objects; one is compiled again if a source, a header or the flags have changed.
        sanitizer: a key of ``SANITIZERS``, or empty.
        report: print the commands' warnings.
    """
    into.mkdir(parents=True, exist_ok=True)
    instrument = ["-O1", "-g1", "-fno-omit-frame-pointer", *SANITIZERS[sanitizer]] if sanitizer else []
    common = [*shlex.split(compiler()), *_COMMON, *(instrument or ["-O3", "-g0"])]
    # 1. The objects of each library, and the commands for those that are missing or out of date.
    jobs: list[tuple[list[str], Path]] = []  # a command without its output, and the object
    objects_of: list[tuple[Library, list[Path]]] = []
    for library in libraries:
        files = []
        for source in library.sources:
            command = [*common, *library.compile_flags, "-c", str(source)]
            digest = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:8]
            files.append(objects / library.file / f"{source.stem}-{digest}.o")
            if _is_older(files[-1], source):
                jobs.append((command, files[-1]))
        objects_of.append((library, files))
    # 2. Compile in parallel, the longest job first.
    jobs.sort(key=lambda job: "adapter.cpp" not in job[0][-1])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for compilation in [pool.submit(_run, command, file, report) for command, file in jobs]:
            compilation.result()
    # 3. Link, in the given order: the core first.
    for library, files in objects_of:
        link = [*shlex.split(compiler()), "-shared", *instrument, *map(str, files)]
        _run([*link, f"-L{into}", *library.link_flags, _LIBSTDCXX], into / library.file, report)


def _core_beside(folder: str) -> tuple[str, ...]:
    """Link to the core, which the loader then finds in ``folder``; ``$ORIGIN`` is the folder of the library itself."""
    return "-ldist_prims_core", f"-Wl,-rpath,{folder}"


def _is_older(file: Path, source: Path) -> bool:
    """Whether a file is absent or older than the source or any header."""
    if not file.exists():
        return True
    csrc = next(folder for folder in source.parents if folder.name == "csrc")
    patterns = ["*.h", "*.cpp"] if source.name == "adapter.cpp" else ["*.h"]
    inputs = [source, *(path for pattern in patterns for path in csrc.rglob(pattern))]
    return any(path.stat().st_mtime > file.stat().st_mtime for path in inputs)


def _run(command: list[str], file: Path, report: bool) -> None:
    """Run a command that writes a file. The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        done = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        if done.returncode:
            raise CompileError(f"{shlex.join(command)} failed:\n{done.stderr[:4000]}")
        if report and done.stderr:
            print(done.stderr, file=sys.stderr)
        unfinished.replace(file)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{shlex.join(command)} did not end within {_LIMIT} s") from error
    finally:
        unfinished.unlink(missing_ok=True)
