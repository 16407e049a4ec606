"""The launcher of this process and its rank: read from the environment, touching nothing.

Every launcher leaves its own variables behind, and they nest: mpirun under sbatch, torchrun under mpirun, a shell under
srun. A single telling name is not enough. ``PMI_RANK`` is set by launchers that know no MPI, and the script that sbatch
runs carries ``SLURM_PROCID=0`` and ``SLURM_NTASKS=64`` although it is alone. So each launcher is known by a set of
variables that only it sets for the ranks it starts, and the innermost launcher is asked first.

A launcher that is missed is worse than an error: each of its N ranks would train a model of its own and overwrite one
checkpoint. So variables that speak of several ranks and belong to no known set are refused.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .nodelist import expand_nodelist

__all__ = ["Launcher", "detect", "from_url"]

_NOT_A_STEP_OF_SRUN = 0xFFFFFFF0  # the batch script, an interactive shell and the like have step ids from here on
_REMEDY = (
    "start the ranks with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
)


@dataclass(frozen=True)
class Launcher:
    """What was found: the launcher, our rank among how many, and the ``NAME=value`` that say so.

    ``size`` is None where no variable says it; then MPI does. ``url`` is where the ranks meet (``tcp://``,
    ``file://``). Without one they meet over ``medium``: "MPI", or "PMI", the key-value store of the process manager.
    Neither is for a group of one.
    """

    name: str
    rank: int
    size: int | None
    evidence: tuple[str, ...] = ()
    url: str | None = None
    medium: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0 or (self.size is not None and self.rank >= self.size):
            said = f" ({', '.join(self.evidence)})" if self.evidence else ""
            raise ValueError(
                f"init: rank {self.rank} of {self.size}{said}: a rank lies between 0 and the size less one"
            )


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The innermost launcher that started this process.

    >>> launcher = detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    >>> launcher.name, launcher.rank, launcher.size, launcher.medium
    ('mpirun of Open MPI', 1, 4, 'MPI')
    >>> detect({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}).medium
    'PMI'
    >>> detect({}).name
    'python'
    """
    for look in (_spawn, _env, _mpirun, _prun, _flux, _srun, _pals, _pmi, _pmix):
        if found := look(environ):
            return found
    _refuse_several_ranks(environ)
    return Launcher("python", rank=0, size=1)


def from_url(
    url: str, rank: int | None = None, size: int | None = None, environ: Mapping[str, str] = os.environ
) -> Launcher:
    """The rendezvous that the caller names; rank and size that the caller leaves out come from the launcher."""
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
    return _found("spawn", environ, names, url=environ.get("DIST_PRIMS_RENDEZVOUS"))


def _env(environ: Mapping[str, str]) -> Launcher | None:
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables"
    return _found(name, environ, _ENV, url=f"tcp://{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}")


def _mpirun(environ: Mapping[str, str]) -> Launcher | None:
    hydra = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    for name, names in (
        ("mpirun of Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        ("mpirun_rsh of MVAPICH", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
        ("mpirun_rsh of MVAPICH", ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE")),  # from MVAPICH 3 on
        (f"mpirun of {hydra}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")),
    ):
        if found := _found(name, environ, names, medium="MPI"):
            return found
    by_port = "PMI_PORT" in environ and "MPI_LOCALNRANKS" in environ  # mpirun -pmi-port
    return _sizeless(f"mpirun of {hydra}", environ, "PMI_ID") if by_port else None


def _prun(environ: Mapping[str, str]) -> Launcher | None:
    """PRRTE's prun and prterun. Their daemons may be tasks of srun, whose variables the ranks inherit."""
    return _pmix(environ, "prun") if "PRTE_LAUNCHED" in environ else None


def _flux(environ: Mapping[str, str]) -> Launcher | None:
    """A Flux instance may run inside a step of srun; Flux unsets its own variables for what is no task of a job."""
    return _found("Flux", environ, ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), medium="PMI")


def _srun(environ: Mapping[str, str]) -> Launcher | None:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    found = _found("srun", environ, names)
    if not found or _number(environ, "SLURM_STEP_ID") >= _NOT_A_STEP_OF_SRUN:
        return None
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    # The ranks cannot talk yet, so each derives the same port: below the ephemeral range, another for each step.
    port = 10000 + (_number(environ, "SLURM_JOB_ID") * 31 + _number(environ, "SLURM_STEP_ID")) % 20000
    address = environ.get("MASTER_ADDR", hosts[0] if len(hosts) > 1 else "127.0.0.1")
    return replace(found, url=f"tcp://{address}:{environ.get('MASTER_PORT', port)}")


def _pals(environ: Mapping[str, str]) -> Launcher | None:
    """HPE's mpiexec and aprun, which leave PMI_SIZE out with ``--pmi=pmix``. Under srun Cray's plugin sets both."""
    if "PALS_RANKID" not in environ or "PMI_SIZE" in environ:
        return _found("mpiexec of Cray PALS", environ, ("PALS_RANKID", "PMI_SIZE"), medium="MPI")
    return _sizeless("mpiexec of Cray PALS", environ, "PALS_RANKID")


def _pmi(environ: Mapping[str, str]) -> Launcher | None:
    """Any process manager that offers PMI-1 over a socket and has not been recognised: mpiexec.gforker, for one."""
    return _found("a PMI process manager", environ, ("PMI_RANK", "PMI_SIZE", "PMI_FD"), medium="PMI")


def _pmix(environ: Mapping[str, str], name: str = "a PMIx launcher") -> Launcher | None:
    return _sizeless(name, environ, "PMIX_RANK") if "PMIX_NAMESPACE" in environ else None


def _found(
    name: str, environ: Mapping[str, str], names: tuple[str, ...], url: str | None = None, medium: str = ""
) -> Launcher | None:
    """The launcher, if all its variables are set; the first two are rank and size."""
    if any(variable not in environ for variable in names):
        return None
    evidence = tuple(f"{variable}={environ[variable]}" for variable in names)
    return Launcher(name, _number(environ, names[0]), _number(environ, names[1]), evidence, url, medium)


def _sizeless(name: str, environ: Mapping[str, str], variable: str) -> Launcher | None:
    if variable not in environ:
        return None
    return Launcher(name, _number(environ, variable), None, (f"{variable}={environ[variable]}",), medium="MPI")


def _number(environ: Mapping[str, str], variable: str) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise ValueError(f"init: {variable}={environ[variable]!r} is no number; {_REMEDY}") from None


# Set by launchers, known and unknown, to the number of ranks or to the rank.
_SIZES = ["PMI_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_SIZE", "PALS_LOCAL_SIZE", "FLUX_JOB_SIZE"]
_SIZES += ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"]
_RANKS = ["PMI_RANK", "PMI_ID", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "OMPI_COMM_WORLD_RANK"]
_RANKS += ["MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE", "SLURM_PROCID"]


def _refuse_several_ranks(environ: Mapping[str, str]) -> None:
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") > 1:
        missing = ", ".join(name for name in _ENV if name not in environ)
        raise ValueError(
            f"init: WORLD_SIZE={environ['WORLD_SIZE']} announces other ranks, but {missing} is not set; "
            "set it, unset WORLD_SIZE, or start the ranks with torchrun, mpirun or srun"
        )
    several = [name for name in _SIZES if name in environ and _number(environ, name) > 1]
    several += [name for name in _RANKS if name in environ and _number(environ, name) > 0]
    if several:
        said = ", ".join(f"{name}={environ[name]}" for name in several)
        raise ValueError(
            f"init: {said}: this process is one of several ranks, but its launcher is not known and each rank would "
            f"work alone. Remedy: {_REMEDY}; for a process that is meant to be alone, unset {', '.join(several)}"
        )
