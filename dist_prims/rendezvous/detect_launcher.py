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
from typing import NamedTuple

from .network import LOOPBACK, PORTS, join_address, ports, split_address
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
    for known in _KNOWN:
        if launcher := _find(known, environ):
            return launcher
    _refuse_several_ranks(environ)
    return Launcher("python", rank=0, size=1)


def from_url(
    url: str, rank: int | None = None, size: int | None = None, environ: Mapping[str, str] = os.environ
) -> Launcher:
    """Return a Launcher whose ranks meet at a URL. Rank and size that the caller omits come from the launcher."""
    if url == "env://":
        if missing := [name for name in _ENV if name not in environ]:
            raise ValueError(f"init: init_method='env://' needs {', '.join(missing)} in the environment")
        launcher = _find(_BY_ADDRESS, environ)
        assert launcher
        rank, size = launcher.rank if rank is None else rank, launcher.size if size is None else size
        return replace(launcher, rank=rank, size=size)
    if not _is_rendezvous(url):
        raise ValueError(
            f"init: init_method={url!r}; give 'env://', 'tcp://host:port' or 'file:///absolute/path'; an IPv6 address "
            "has brackets: 'tcp://[fd00::1]:29500'"
        )
    if rank is not None and size is not None:
        return Launcher("init_method", rank, size, (f"init_method={url}",), url)
    launcher = detect(environ)
    size = launcher.size if size is None else size
    if launcher.name == "python" or size is None:
        raise ValueError(f"init: init_method={url!r} needs rank= and world_size=: no launcher has set them")
    return replace(launcher, rank=launcher.rank if rank is None else rank, size=size, url=url, medium="")


_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Known(NamedTuple):
    """A launcher that is recognised if all these environment variables are set."""

    name: str
    rank: str  # the variable with the rank
    size: str | None  # the variable with the number of ranks, if there is one
    others: tuple[str, ...] = ()
    medium: str = "MPI"  # empty for a launcher with a URL


_SPAWN = _Known("spawn", "RANK", "WORLD_SIZE", ("DIST_PRIMS_RENDEZVOUS",), medium="")
_BY_ADDRESS = _Known("environment variables", *_ENV[:2], _ENV[2:], medium="")
_OF_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
_SRUN = _Known("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _OF_STEP, medium="")
_HYDRA = "mpirun of MPICH"  # or of Intel MPI
_KNOWN = (  # the innermost first
    _SPAWN,
    _BY_ADDRESS,
    _Known("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Known("mpirun_rsh of MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    _Known("mpirun_rsh of MVAPICH", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),  # from MVAPICH 3 on
    _Known(_HYDRA, "PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS",)),
    _Known(_HYDRA, "PMI_ID", None, ("PMI_PORT", "MPI_LOCALNRANKS")),  # with -pmi-port
    # PRRTE, whose daemons may be tasks of srun: the ranks then inherit srun's variables.
    _Known("prun", "PMIX_RANK", None, ("PMIX_NAMESPACE", "PRTE_LAUNCHED")),
    # A Flux instance may run in a step of srun. Flux unsets its own variables outside the tasks of a job.
    _Known("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", medium="PMI"),
    _SRUN,
    # HPE's mpiexec and aprun do not set PMI_SIZE with --pmi=pmix. Under srun Cray's plugin sets both.
    _Known("mpiexec of Cray PALS", "PALS_RANKID", "PMI_SIZE"),
    _Known("mpiexec of Cray PALS", "PALS_RANKID", None),
    # Any other process manager that offers PMI-1 over a socket, such as mpiexec.gforker.
    _Known("a PMI process manager", "PMI_RANK", "PMI_SIZE", ("PMI_FD",), medium="PMI"),
    _Known("a PMIx launcher", "PMIX_RANK", None, ("PMIX_NAMESPACE",)),
)


def _find(known: _Known, environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher if all its variables are set."""
    names = [known.rank, *([known.size] if known.size else []), *known.others]
    if any(name not in environ for name in names):
        return None
    name, url = known.name, None
    if known is _SPAWN:
        url = environ["DIST_PRIMS_RENDEZVOUS"]
    elif known is _BY_ADDRESS:
        url = _tcp_url(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else name
    elif known is _SRUN:
        if _number(environ, "SLURM_STEP_ID") >= _NOT_A_STEP_OF_SRUN:
            return None
        url = _url_of_step(environ)
    elif name == _HYDRA and any(variable.startswith("I_MPI_") for variable in environ):
        name = "mpirun of Intel MPI"
    size = _number(environ, known.size) if known.size else None
    evidence = tuple(f"{variable}={environ[variable]}" for variable in names)
    return Launcher(name, _number(environ, known.rank), size, evidence, url, known.medium)


def _url_of_step(environ: Mapping[str, str]) -> str:
    """Return the URL at which the ranks of a step of srun meet."""
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    # The ranks have no connection yet, so all derive the same port, different for each step: of DIST_PRIMS_PORTS, or
    # below the ephemeral range.
    allowed = ports(environ) if environ.get(PORTS) else range(10000, 30000)
    derived = allowed[(_number(environ, "SLURM_JOB_ID") * 31 + _number(environ, "SLURM_STEP_ID")) % len(allowed)]
    address = environ.get("MASTER_ADDR", hosts[0] if len(hosts) > 1 else LOOPBACK)
    return _tcp_url(address, _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else derived)


def _tcp_url(address: str, port: int) -> str:
    """The URL of an address, which may be an IPv6 address with brackets or without."""
    return f"tcp://{join_address(address.strip('[]'), port)}"


def _is_rendezvous(url: str) -> bool:
    scheme, _, place = url.partition("://")
    if scheme != "tcp":
        return re.match("file:///.", url) is not None
    try:
        split_address(place)
    except ValueError:
        return False
    return True


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
    """Raise ValueError if variables indicate several ranks, although no launcher was recognised."""
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
