"""Detection of the launcher of this process, and of its rank, from environment variables alone.

Every launcher sets its own variables, and launchers nest: mpirun under sbatch, torchrun under mpirun, a shell under
srun. One variable is not enough evidence. ``PMI_RANK`` is also set by launchers that do not support MPI, and the script
that sbatch runs has ``SLURM_PROCID=0`` and ``SLURM_NTASKS=64`` although it is a single process. Each launcher is
therefore identified by a set of variables that only it sets for the ranks it starts, and the innermost launcher is
checked first.

A launcher that is not recognised is worse than an error: each of its N ranks would train a model of its own and
overwrite one checkpoint. Variables that indicate several ranks and belong to no known set are therefore an error.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .nodelist import expand_nodelist

__all__: list[str] = []

_NOT_A_STEP_OF_SRUN = 0xFFFFFFF0  # the batch script, an interactive shell and the like have step ids from here on
_REMEDY = (
    "start the ranks with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
)


@dataclass(frozen=True)
class Launcher:
    """A launcher, the rank of this process, the number of ranks, and the ``NAME=value`` pairs that are the evidence.

    ``size`` is None where no variable contains it; MPI then provides it. ``url`` is the address of the rendezvous
    (``tcp://``, ``file://``). Without a URL the rendezvous uses ``medium``: "MPI", or "PMI", the key-value store of the
    process manager. A group of one rank has neither.

    >>> launcher = Launcher("a launcher of my own", rank=1, size=4, url="tcp://host0:29500")
    >>> launcher.rank, launcher.medium
    (1, '')
    >>> Launcher("a launcher of my own", rank=4, size=4)
    Traceback (most recent call last):
    ValueError: init: rank 4 of 4: a rank must be at least 0 and less than the size
    """

    name: str
    rank: int
    size: int | None
    evidence: tuple[str, ...] = ()
    url: str | None = None
    medium: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0 or (self.size is not None and self.rank >= self.size):
            evidence = f" ({', '.join(self.evidence)})" if self.evidence else ""
            raise ValueError(
                f"init: rank {self.rank} of {self.size}{evidence}: a rank must be at least 0 and less than the size"
            )


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """Return the innermost launcher that started this process.

    >>> launcher = detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    >>> launcher.name, launcher.rank, launcher.size, launcher.medium
    ('mpirun of Open MPI', 1, 4, 'MPI')
    >>> detect({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}).medium
    'PMI'
    >>> detect({}).name
    'python'
    """
    for find in (_spawn, _env, _mpirun, _prun, _flux, _srun, _pals, _pmi, _pmix):
        if found := find(environ):
            return found
    _refuse_several_ranks(environ)
    return Launcher("python", rank=0, size=1)


def from_url(
    url: str, rank: int | None = None, size: int | None = None, environ: Mapping[str, str] = os.environ
) -> Launcher:
    """Return the rendezvous at a URL. Rank and size that the caller does not give come from the launcher."""
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
    size = found.size if size is None else size
    if found.name == "python" or size is None:
        raise ValueError(f"init: init_method={url!r} needs rank= and world_size=: no launcher has set them")
    return replace(found, rank=found.rank if rank is None else rank, size=size, url=url, medium="")


_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _spawn(environ: Mapping[str, str]) -> Launcher | None:
    names = ("RANK", "WORLD_SIZE", "DIST_PRIMS_RENDEZVOUS")
    return _with_size("spawn", environ, names, url=environ.get("DIST_PRIMS_RENDEZVOUS"))


def _env(environ: Mapping[str, str]) -> Launcher | None:
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables"
    return _with_size(name, environ, _ENV, url=f"tcp://{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}")


def _mpirun(environ: Mapping[str, str]) -> Launcher | None:
    hydra = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    for name, names in (
        ("mpirun of Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        ("mpirun_rsh of MVAPICH", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
        ("mpirun_rsh of MVAPICH", ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE")),  # from MVAPICH 3 on
        (f"mpirun of {hydra}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")),
    ):
        if found := _with_size(name, environ, names, medium="MPI"):
            return found
    by_port = "PMI_PORT" in environ and "MPI_LOCALNRANKS" in environ  # mpirun -pmi-port
    return _without_size(f"mpirun of {hydra}", environ, "PMI_ID") if by_port else None


def _prun(environ: Mapping[str, str]) -> Launcher | None:
    """Detect PRRTE's prun and prterun, whose daemons may be tasks of srun: the ranks then inherit srun's variables."""
    return _pmix(environ, "prun") if "PRTE_LAUNCHED" in environ else None


def _flux(environ: Mapping[str, str]) -> Launcher | None:
    """Detect Flux.

    A Flux instance may run in a step of srun. Flux unsets its own variables outside the tasks of a job.
    """
    return _with_size("Flux", environ, ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), medium="PMI")


def _srun(environ: Mapping[str, str]) -> Launcher | None:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    found = _with_size("srun", environ, names)
    if not found or _number(environ, "SLURM_STEP_ID") >= _NOT_A_STEP_OF_SRUN:
        return None
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    # The ranks have no connection yet, so all derive the same port: below the ephemeral range, different for each step.
    port = 10000 + (_number(environ, "SLURM_JOB_ID") * 31 + _number(environ, "SLURM_STEP_ID")) % 20000
    address = environ.get("MASTER_ADDR", hosts[0] if len(hosts) > 1 else "127.0.0.1")
    return replace(found, url=f"tcp://{address}:{environ.get('MASTER_PORT', port)}")


def _pals(environ: Mapping[str, str]) -> Launcher | None:
    """Detect HPE's mpiexec and aprun, which do not set PMI_SIZE with ``--pmi=pmix``.

    Under srun Cray's plugin sets both.
    """
    if "PALS_RANKID" not in environ or "PMI_SIZE" in environ:
        return _with_size("mpiexec of Cray PALS", environ, ("PALS_RANKID", "PMI_SIZE"), medium="MPI")
    return _without_size("mpiexec of Cray PALS", environ, "PALS_RANKID")


def _pmi(environ: Mapping[str, str]) -> Launcher | None:
    """Detect any other process manager that offers PMI-1 over a socket, such as mpiexec.gforker."""
    return _with_size("a PMI process manager", environ, ("PMI_RANK", "PMI_SIZE", "PMI_FD"), medium="PMI")


def _pmix(environ: Mapping[str, str], name: str = "a PMIx launcher") -> Launcher | None:
    return _without_size(name, environ, "PMIX_RANK") if "PMIX_NAMESPACE" in environ else None


def _with_size(
    name: str, environ: Mapping[str, str], names: tuple[str, ...], url: str | None = None, medium: str = ""
) -> Launcher | None:
    """Return the launcher if all its variables are set. The first two variables are rank and size."""
    if any(variable not in environ for variable in names):
        return None
    evidence = tuple(f"{variable}={environ[variable]}" for variable in names)
    return Launcher(name, _number(environ, names[0]), _number(environ, names[1]), evidence, url, medium)


def _without_size(name: str, environ: Mapping[str, str], variable: str) -> Launcher | None:
    if variable not in environ:
        return None
    return Launcher(name, _number(environ, variable), None, (f"{variable}={environ[variable]}",), medium="MPI")


def _number(environ: Mapping[str, str], variable: str) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise ValueError(f"init: {variable}={environ[variable]!r} is not a number; {_REMEDY}") from None


# Variables that launchers, recognised or not, set to the number of ranks or to the rank.
_SIZES = ["PMI_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_SIZE", "PALS_LOCAL_SIZE", "FLUX_JOB_SIZE"]
_SIZES += ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"]
_RANKS = ["PMI_RANK", "PMI_ID", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "OMPI_COMM_WORLD_RANK"]
_RANKS += ["MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE", "SLURM_PROCID"]


def _refuse_several_ranks(environ: Mapping[str, str]) -> None:
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") > 1:
        missing = ", ".join(name for name in _ENV if name not in environ)
        raise ValueError(
            f"init: WORLD_SIZE={environ['WORLD_SIZE']} indicates several ranks, but {missing} is not set; "
            "set it, unset WORLD_SIZE, or start the ranks with torchrun, mpirun or srun"
        )
    several = [name for name in _SIZES if name in environ and _number(environ, name) > 1]
    several += [name for name in _RANKS if name in environ and _number(environ, name) > 0]
    if several:
        evidence = ", ".join(f"{name}={environ[name]}" for name in several)
        raise ValueError(
            f"init: {evidence}: this process is one of several ranks, but its launcher is not known and each rank "
            f"would form a group of its own. Remedy: {_REMEDY}; for a single process, unset {', '.join(several)}"
        )
