"""Rendezvous at a URL: open the store there, and find the ranks of this attempt by the handshake of handshake.py."""

import fcntl
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import SplitResult, urlsplit

import torch.distributed as dist

from .detect_launcher import Launcher
from .handshake import handshake
from .hosts import host_id
from .network import LOOPBACK, interface_towards, listen
from .secret import Secret, choose, received

__all__: list[str] = []

_GROUP = "the ranks of a launcher"  # for codes: the group of this rendezvous has no name


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    ``store`` is used by the ranks of this rendezvous only. ``hosts`` contains the host of each rank, and ``interface``
    is the network interface that leads to the ranks.
    """

    store: dist.Store
    rank: int
    hosts: list[str]
    interface: str | None
    launcher: str  # its name for the message of init()
    secret: Secret | None = field(default=None, repr=False)  # by which the ranks were authenticated


def rendezvous_at_url(launcher: Launcher, timeout: float) -> Rendezvous:
    """Complete the rendezvous at ``launcher.url``. A group of one rank needs no URL."""
    if launcher.size == 1 or launcher.url is None:
        return Rendezvous(dist.HashStore(), 0, [host_id()], None, launcher.name)
    assert launcher.size is not None, "a launcher with a URL has a size"
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                return _rendezvous_at(urlsplit(launcher.url), launcher, launcher.size, deadline)
            except dist.DistNetworkError as error:  # the store of an earlier group is shutting down
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no sign of rank 0 or its store: {error}") from error
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"init: rank {launcher.rank} of {launcher.size} ({launcher.name}): the rendezvous at {launcher.url} did "
            f"not complete within {timeout:g} s: {error}"
        ) from error


def connect(address: str, port: int, size: int, timeout: float, server: int | None = None) -> dist.Store:
    """Create a client of the TCPStore at ``address``; with the descriptor of a listening socket, its server as well."""
    return dist.TCPStore(
        address,
        port,
        size,
        is_master=server is not None,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=server,
    )


def _rendezvous_at(url: SplitResult, launcher: Launcher, size: int, deadline: float) -> Rendezvous:
    interface = None
    secret = (received() if launcher.name == "spawn" else None) or choose(
        None if url.scheme == "file" else url.hostname or ""
    )
    if url.scheme == "file":
        _check_file(url.path)
        store: dist.Store = dist.FileStore(url.path, size)
    else:
        address, port = LOOPBACK if url.hostname == "localhost" else url.hostname or "", url.port or 0
        store = _tcp_store(launcher, size, address, port, max(1.0, deadline - time.monotonic()))
        interface = interface_towards(address, port)
    name, hosts = handshake(dist.PrefixStore("dist_prims", store), launcher.rank, size, deadline, secret, _GROUP)
    found = dist.PrefixStore(f"dist_prims/{name}", store)
    return Rendezvous(found, launcher.rank, hosts, interface, launcher.name, secret)


def _tcp_store(launcher: Launcher, size: int, address: str, port: int, timeout: float) -> dist.Store:
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher.name == "torchrun"
    if launcher.rank != 0 or torchrun_serves:
        return connect(address, port, size, timeout)
    try:
        server = listen(address, port)
    except OSError as error:
        raise RuntimeError(f"{error.strerror}; if another job uses this port, choose another MASTER_PORT") from error
    return connect(address, port, size, timeout, server.detach())


def _check_file(path: str) -> None:
    """Raise ValueError for a file that does not consist of FileStore's records: FileStore would never stop reading.

    A record is a length and as many bytes.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # FileStore writes under the exclusive lock
        content = file.read()
    end = 0
    while end + 4 <= len(content):
        end += 4 + int.from_bytes(content[end : end + 4], sys.byteorder)
    if end != len(content):
        raise ValueError(f"init: {path} exists and is not a rendezvous file; remove it, or give another path")
