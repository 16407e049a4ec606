"""Who started this process, and which rank it is: read from the environment, touching nothing.

Every launcher leaves its own variables behind, and they nest: mpirun under sbatch, torchrun under mpirun, a shell under
srun. A single telling name is not enough. ``PMI_RANK`` is set by launchers that know no MPI, and the script that sbatch
runs carries ``SLURM_PROCID=0`` and ``SLURM_NTASKS=64`` although it is alone. So each launcher is known by a set of
variables that only it sets for the ranks it starts, and the innermost launcher is asked first.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

__all__ = ["Launcher", "detect", "expand_nodelist", "from_url"]

_NOT_A_STEP_OF_SRUN = 0xFFFFFFF0  # the batch script, an interactive shell and the like have step ids from here on


@dataclass(frozen=True)
class Launcher:
    """What was found: the launcher, our rank among how many, and the ``NAME=value`` that say so.

    ``url`` is where the ranks meet (``tcp://``, ``file://``); without one they meet over MPI, or there is only one.
    """

    name: str
    rank: int
    size: int
    evidence: tuple[str, ...] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            said = f" ({', '.join(self.evidence)})" if self.evidence else ""
            raise ValueError(
                f"init: rank {self.rank} of {self.size}{said}: a rank lies between 0 and the size less one"
            )


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The innermost launcher that started this process.

    >>> launcher = detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    >>> launcher.name, launcher.rank, launcher.size
    ('mpirun of Open MPI', 1, 4)
    >>> detect({"PMI_RANK": "1", "PMI_SIZE": "4"}).name  # a process manager, but no MPI
    'python'
    """
    for look in (_spawn, _env, _mpirun, _srun):
        if found := look(environ):
            return found
    if int(environ.get("WORLD_SIZE", 1)) > 1:
        missing = ", ".join(name for name in _ENV if name not in environ)
        raise ValueError(
            f"init: WORLD_SIZE={environ['WORLD_SIZE']} announces other ranks, but {missing} is not set; "
            "set it, unset WORLD_SIZE, or start the ranks with torchrun, mpirun or srun"
        )
    return Launcher("python", rank=0, size=1)


def from_url(
    url: str, rank: int | None = None, size: int | None = None, environ: Mapping[str, str] = os.environ
) -> Launcher:
    """What the caller says himself; where he leaves out rank and size, the launcher may know them."""
    if url == "env://":
        if missing := [name for name in _ENV if name not in environ]:
            raise ValueError(f"init: init_method='env://' needs {', '.join(missing)} in the environment")
        found = _env(environ)
        assert found
        return replace(found, rank=found.rank if rank is None else rank, size=found.size if size is None else size)
    if not re.match(r"tcp://.+:\d+$|file:///.", url):
        raise ValueError(f"init: init_method={url!r}; give 'env://', 'tcp://host:port' or 'file:///absolute/path'")
    if rank is not None and size is not None:
        return Launcher("init_method", rank, size, (f"init_method={url}",), url)
    found = detect(environ)
    if found.name == "python":
        raise ValueError(f"init: init_method={url!r} needs rank= and world_size=: no launcher has set them")
    return replace(found, rank=found.rank if rank is None else rank, size=found.size if size is None else size, url=url)


_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _spawn(environ: Mapping[str, str]) -> Launcher | None:
    names = ("RANK", "WORLD_SIZE", "DIST_PRIMS_RENDEZVOUS")
    return _found("spawn", environ, names, url=environ.get("DIST_PRIMS_RENDEZVOUS"))


def _env(environ: Mapping[str, str]) -> Launcher | None:
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables"
    return _found(name, environ, _ENV, url=f"tcp://{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}")


def _mpirun(environ: Mapping[str, str]) -> Launcher | None:
    hydra = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    return _found("mpirun of Open MPI", environ, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) or _found(
        f"mpirun of {hydra}", environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
    )


def _srun(environ: Mapping[str, str]) -> Launcher | None:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    found = _found("srun", environ, names)
    if not found or int(environ["SLURM_STEP_ID"]) >= _NOT_A_STEP_OF_SRUN:
        return None
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    # The ranks cannot talk yet, so each derives the same port: below the ephemeral range, another for each step.
    port = 10000 + (int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])) % 20000
    address = environ.get("MASTER_ADDR", hosts[0] if len(hosts) > 1 else "127.0.0.1")
    return replace(found, url=f"tcp://{address}:{environ.get('MASTER_PORT', port)}")


def _found(name: str, environ: Mapping[str, str], names: tuple[str, ...], url: str | None = None) -> Launcher | None:
    """The launcher, if all its variables are set; the first two are rank and size."""
    if any(variable not in environ for variable in names):
        return None
    evidence = tuple(f"{variable}={environ[variable]}" for variable in names)
    return Launcher(name, int(environ[names[0]]), int(environ[names[1]]), evidence, url)


def expand_nodelist(nodelist: str) -> list[str]:
    """The hosts that SLURM abbreviates.

    >>> expand_nodelist("node[08-10,12],gpu5")
    ['node08', 'node09', 'node10', 'node12', 'gpu5']
    >>> expand_nodelist("rack[1-2]n[0,7]-ib")
    ['rack1n0-ib', 'rack1n7-ib', 'rack2n0-ib', 'rack2n7-ib']
    """
    hosts: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", pattern)  # literal, ranges, literal, ranges, ..., literal
        choices = [list(_numbers(piece)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
