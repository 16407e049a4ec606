"""The libraries under comparison: the packages of each environment, how it is built, and how its ranks are started.

Each library gets the settings that are best on one host, and none is bound to cores. With more ranks than cores,
libraries that support it are set to yield the core while they wait.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .launch import Failed, environment, run
from .oneccl import SOURCE

__all__: list[str] = []

_BUILD_SECONDS = 900.0
_NOTE = "dist_prims_peers.txt"  # written into a complete environment: requested packages, installed packages

Settings = Mapping[str, str]


@dataclass(frozen=True)
class RivalLibrary:
    """A library under comparison. ``opens``: its entry in program.py. ``packages``: of its environment; empty for the
    environment of this process. ``starter``: the command that starts the ranks; empty: they are started directly.
    ``library``: the file that ``finish`` builds in the environment. ``home``: a contender with the same environment."""

    opens: str
    packages: tuple[str, ...] = ()
    starter: tuple[str, ...] = ()
    settings: Callable[[Path, int], Settings] = lambda home, ranks: {}
    finish: Callable[[Path], None] = lambda home: None
    library: str = ""
    home: str = ""


def home_of(name: str, cache: Path) -> Path:
    return cache / (CONTENDERS[name].home or name)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def holds(name: str, home: Path) -> list[str]:
    """The packages in the environment with their versions; empty if the environment must be built."""
    note = home / _NOTE
    lines = note.read_text().splitlines() if note.is_file() else []
    return lines[1:] if lines[:1] == [" ".join(CONTENDERS[name].packages)] else []


def build(name: str, home: Path) -> None:
    """Build the environment of a contender unless it exists."""
    contender, python = CONTENDERS[name], str(home / "bin" / "python")
    if not contender.packages or holds(name, home):
        return
    if home.exists():
        if not (home / "pyvenv.cfg").is_file():
            raise Failed(f"{home} exists and is not a Python environment")
        shutil.rmtree(home)
    home.parent.mkdir(parents=True, exist_ok=True)
    _step([sys.executable, "-m", "venv", str(home)], home)
    _step([python, "-m", "pip", "install", "--quiet", *contender.packages], home)
    contender.finish(home)
    listed = home / "listed.txt"
    code = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    _step([python, "-c", f"import sys; sys.stdout = open({str(listed)!r}, 'w'); {code}"], home)
    (home / _NOTE).write_text(" ".join(contender.packages) + "\n" + listed.read_text())


def _step(command: list[str], home: Path, settings: Settings | None = None) -> None:
    run([command], _BUILD_SECONDS, [environment(home, settings or {})])


def _compile_oneccl(home: Path) -> None:
    source, lib = home / "all_reduce.cpp", home / "lib"
    source.write_text(SOURCE)
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{home / 'include'}"]
    libraries = [f"-L{lib}", "-lccl", "-lmpi", f"-Wl,-rpath,{lib}"]
    _step(["g++", *flags, str(source), "-o", str(home / "all_reduce.so"), *libraries], home)


def _compile_deepspeed(home: Path) -> None:
    """Compile DeepSpeed's operator, which otherwise happens on first use."""
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; Builder().load()"
    settings = {"TORCH_EXTENSIONS_DIR": str(home / "extensions"), "DS_ACCELERATOR": "cpu"}
    _step([str(home / "bin" / "python"), "-c", code], home, settings)


def _openmpi(home: Path, ranks: int) -> Settings:
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # allows more ranks than cores
    }


def _impi(home: Path, ranks: int) -> Settings:
    return {
        "I_MPI_ROOT": str(home),
        "I_MPI_FABRICS": "shm",
        "I_MPI_PIN": "0",
        "LD_LIBRARY_PATH": str(home / "lib"),
        **({"I_MPI_THREAD_YIELD": "2"} if ranks > cores() else {}),
    }


def _impi_ring(home: Path, ranks: int) -> Settings:
    """Intel MPI with the ring for large data, which it does not choose by itself; small data also changes."""
    return {**_impi(home, ranks), "I_MPI_ADJUST_ALLREDUCE": f"8:{(1 << 20) + 1}-{(1 << 31) - 1}"}


def _oneccl(home: Path, ranks: int) -> Settings:
    """The calling thread does the work, because a worker for each rank would need a core of its own. With more ranks
    than cores a worker does the work, because only threads that wait for a worker yield their core."""
    waits = {"CCL_YIELD": "sched_yield", "CCL_SPIN_COUNT": "1", "CCL_WORKER_COUNT": "1"}
    work = waits if ranks > cores() else {"CCL_WORKER_OFFLOAD": "0"}
    return {**_impi(home, ranks), "CCL_ATL_TRANSPORT": "mpi", "CCL_ALLREDUCE": "direct", **work}


def _deepspeed(home: Path, ranks: int) -> Settings:
    return {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": str(max(1, cores() // ranks))}


_TORCH = f"torch=={torch.__version__.partition('+')[0]}"
_IMPI = ("impi-rt", "mpi4py", "numpy")

CONTENDERS: dict[str, RivalLibrary] = {
    "dist_prims": RivalLibrary("dist_prims"),
    "direct": RivalLibrary("direct"),
    "gloo": RivalLibrary("gloo"),
    "openmpi": RivalLibrary(
        "mpi", ("openmpi>=5,<6", "mpi4py", "numpy"), ("mpirun", "--bind-to", "none", "-n"), _openmpi
    ),
    "mpich": RivalLibrary("mpi", ("mpich", "mpi4py", "numpy"), ("mpirun", "-n")),
    "impi": RivalLibrary("mpi", _IMPI, ("mpirun", "-n"), _impi),
    "impi_ring": RivalLibrary("mpi", _IMPI, ("mpirun", "-n"), _impi_ring, home="impi"),
    "deepspeed": RivalLibrary(
        "deepspeed",
        (_TORCH, "deepspeed", "numpy", "ninja", "setuptools"),
        settings=_deepspeed,
        finish=_compile_deepspeed,
        library="extensions/deepspeed_shm_comm/deepspeed_shm_comm.so",
    ),
    "oneccl": RivalLibrary(
        "oneccl",
        ("oneccl-devel", "impi-devel", "numpy"),
        ("mpirun", "-n"),
        _oneccl,
        _compile_oneccl,
        "all_reduce.so",
    ),
}
