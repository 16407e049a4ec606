"""UCX as a transport between hosts: finding its libraries, loading them, and its settings.

UCX is never required. ``libdist_prims_ucx.so`` is linked to no UCX; this module finds a libucp, in this order:

- a libucp that the process has loaded already: two of them would share a libucs;
- the one in the folder ``DIST_PRIMS_UCX``;
- the one in the package ``libucx-cu12`` or ``libucx-cu13``, which needs no CUDA;
- the one of the system, such as Debian's ``libucx0``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..rendezvous.mpi_exchange import is_mpi_inherited
from ..rendezvous.network import PORTS, at_free_port, family_of, interface_of
from ..rendezvous.rank_values import make_and_publish
from .compile_native import UCX, Library, ucx, ucx_headers
from .extension import extension
from .native_libraries import NativeLibrary

__all__: list[str] = []

_LIBUCP = "libucp.so.0"
_LOADED_FIRST = ("libucs.so.0", "libuct.so.0")  # in this order: libucm needs libucs, but is not linked to it
_REMEDY = "pip install libucx-cu12, or install the system's package (Debian: libucx0)"

# UCX reads these when it is loaded. It must not install signal handlers or threads, nor write to stdout.
_WHILE_LOADING = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_VFS_ENABLE": "n",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "fatal",  # the errors of dist_prims report a lost connection
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# UCX replaces mmap(), madvise() and so on in the whole process, to forget memory that it has registered for RDMA.
_WITHOUT_RDMA = {"UCX_MEM_EVENTS": "n"}

# Settings of each worker.
# - No shared memory: it is for ranks of one host, whose messages do not travel over a transport.
# - No keepalive: the connections of the control lane have it (rendezvous/network.py).
# - No connect() that blocks: the thread holds a lock.
# - Large reads: all_reduce of 16 MB takes 0.7 of the time with the default of 64K.
_SETTINGS = {
    "TLS": "tcp,rc,ud,dc",
    "KEEPALIVE_INTERVAL": "inf",
    "TCP_KEEPIDLE": "inf",
    "TCP_CONN_NB": "y",
    "TCP_RX_SEG_SIZE": "256K",
}
_LONGEST_TURN = 10.0  # seconds that a rank waits while other ranks of its host make their workers
_ACTIVE = "ACTIVE"  # the state of a port in /sys/class/infiniband

_process: int | None = None  # the id of the process that has made a worker: this process, or one that has forked it


def unusable_reason() -> str:
    """Return why UCX cannot be used in this process, with a remedy; an empty string if it can."""
    remedy = "start it by spawn or forkserver instead of fork"
    if _process not in (None, os.getpid()):  # the thread of UCX that accepts connections is not in this process
        return f"this process was forked from one that uses UCX; {remedy}"
    if is_mpi_inherited():
        return f"this process was forked from one that uses MPI, and MPI may use UCX; {remedy}"
    try:
        _library()
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return ""


def version() -> str:
    """Return the version of the UCX that this process has loaded."""
    return str(_library().version)


def make(store: Any, rank: int, size: int, address: str) -> Any:
    """Create the UCX worker of this rank, publish its address, and return the UcxEndpoint with the addresses of all.

    A worker is UCX's object for the connections and messages of a group. Every rank of the group calls this. If a rank
    cannot create its worker, all ranks raise RuntimeError.

    Args:
        store: the store of the group.
        rank: this rank.
        size: the number of ranks.
        address: the address of this host at which the rank listens for TCP; it selects the network device.
    """

    def create_worker() -> tuple[Any, str]:
        global _process
        _process = os.getpid()
        chosen = settings(os.environ, address)
        with _free_ports(address) if "TCP_PORT_RANGE" in chosen else contextlib.nullcontext():
            endpoint = _library().make(list(chosen.items()))
        return endpoint, endpoint.address.hex()

    failure = "cannot create a worker of UCX (see UCX_LOG_LEVEL=info on that rank)"
    endpoint, addresses = make_and_publish(store, rank, size, "ucx", create_worker, failure)
    endpoint.addresses = [bytes.fromhex(address_of_rank) for address_of_rank in addresses]
    return endpoint


def settings(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """Return the settings of a worker; a setting that the environment has, such as ``UCX_TLS``, is left out.

    ``address``: the address at which this rank listens for TCP.

    >>> settings({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0,eth1"}, "10.0.0.1")
    {'KEEPALIVE_INTERVAL': 'inf', 'TCP_KEEPIDLE': 'inf', 'TCP_CONN_NB': 'y', 'TCP_RX_SEG_SIZE': '256K'}
    """
    own = dict(_SETTINGS)
    if "UCX_NET_DEVICES" not in environment and (devices := network_devices(address)):
        own["NET_DEVICES"] = ",".join(devices)
    if family_of(address) == "IPv6":
        own["TCP_AF_PRIO"] = "inet6,inet"
    if environment.get(PORTS):
        own["TCP_PORT_RANGE"] = environment[PORTS]
    return {name: value for name, value in own.items() if f"UCX_{name}" not in environment}


@contextlib.contextmanager
def _free_ports(address: str) -> Iterator[None]:
    """Context in which a worker is made; OSError if the ports of ``DIST_PRIMS_PORTS`` do not suffice for it.

    UCX would try the ports of its range in random order and without end. It does not reuse the ports of connections
    that were closed less than a minute ago.
    """
    # 1. The ranks of this host take turns, so that no port is taken between the check and the worker. The turn is a
    # socket of an abstract address, which has the network namespace of the ports. No rank waits longer than a turn.
    family = socket.AF_INET6 if family_of(address) == "IPv6" else socket.AF_INET
    with socket.socket(socket.AF_UNIX) as turn:
        deadline = time.monotonic() + _LONGEST_TURN
        while time.monotonic() < deadline:
            try:
                turn.bind(f"\0dist_prims ucx {os.getuid()}")
                break
            except OSError:
                time.sleep(0.002)
        # 2. Check that as many ports are free as the worker will listen at.
        with contextlib.ExitStack() as opened:
            for _ in range(max(1, len(_interfaces()))):  # a worker listens at each interface
                probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                at_free_port(lambda port, probe=probe: probe.bind((address, port)))  # type: ignore[misc]
        yield  # 3. UCX makes the worker


def network_devices(address: str) -> list[str]:
    """Return the devices that UCX uses: the interfaces of ``GLOO_SOCKET_IFNAME``, and all active ports for RDMA.

    Without that variable it is the interface with the ``address`` at which this rank listens for TCP. UCX by itself
    would try all interfaces, also bridges of containers, which have the same addresses on all hosts.
    """
    own = interface_of(address)
    return [*(_interfaces() or ([own] if own else [])), *_rdma_ports()]


def _interfaces() -> list[str]:
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _rdma_ports(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the active ports for RDMA, as UCX names them: ``mlx5_0:1``."""
    states = sorted(folder.glob("*/ports/*/state"))
    return [f"{state.parts[-4]}:{state.parts[-2]}" for state in states if _ACTIVE in state.read_text()]


def _recipe(csrc: Path) -> Library:
    headers = ucx_headers()
    if headers is None:
        raise ImportError(
            "dist_prims was built without UCX, because its headers were not found, and they are not found now; install "
            "them (pip install libucx-cu12, or Debian's libucx-dev)"
        )
    return ucx(csrc, headers)


NATIVE = NativeLibrary("the library for UCX", UCX, _recipe)


@functools.cache
def _library() -> Any:
    """Load UCX and the library of this package for it; ImportError, OSError or RuntimeError with a remedy."""
    adapter = extension()
    file = NATIVE.path()
    with _environment(_WHILE_LOADING if _rdma_ports() else {**_WHILE_LOADING, **_WITHOUT_RDMA}):
        try:
            library = adapter.UcxLibrary(str(file), _find())
        except (OSError, RuntimeError) as error:
            raise OSError(f"UCX does not load: {error}; {_REMEDY}") from error
    atexit.register(library.close)  # before the destructors of UCX run
    return library


def _find() -> str:
    """Return the libucp to load, by name or path. If it is a path, load the libraries on which it depends."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(_LIBUCP, os.RTLD_NOLOAD | os.RTLD_NOW)
        return _LIBUCP
    for folder in _folders():
        if (folder / _LIBUCP).exists():
            for name in _LOADED_FIRST:
                ctypes.CDLL(str(folder / name), os.RTLD_NOW | os.RTLD_LOCAL)
            return str(folder / _LIBUCP)
    return _LIBUCP


def _folders() -> Iterator[Path]:
    if named := os.environ.get("DIST_PRIMS_UCX"):
        if not Path(named, "lib", _LIBUCP).exists():  # else another UCX would be used in its place
            raise OSError(f"DIST_PRIMS_UCX={named} has no lib/{_LIBUCP}")
        yield Path(named, "lib")
    package = importlib.util.find_spec("libucx")  # the function does not import it
    for location in (package and package.submodule_search_locations) or []:
        yield Path(location, "lib")


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which the environment has these variables too; it keeps the variables that it has already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
