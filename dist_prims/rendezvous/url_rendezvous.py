"""Rendezvous at a URL, ``tcp://host:port`` or ``file:///path``: the ranks open the store there, and do the handshake.

The process of rank 0 serves the store until it exits: a later rendezvous at the same URL finds it there.
"""

import contextlib
import fcntl
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch.distributed as dist

from .detect_launcher import Launcher
from .handshake import handshake
from .hosts import host_id
from .network import (
    LOOPBACK,
    address_towards,
    interface_addresses,
    interface_of,
    is_loopback,
    join_address,
    split_address,
)
from .secret import Secret, choose, secret_of_parent
from .served import open_store, served_store

__all__: list[str] = []

_GROUP = "the ranks of a launcher"  # for codes: the group of this rendezvous has no name
_PAUSE = 0.1  # seconds between attempts to connect to the store
_SECONDS_PER_ADDRESS = 5.0
_REMEDY = "for ranks on several hosts give an address of the host of rank 0 (MASTER_ADDR) that all hosts reach"


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous."""

    store: dist.Store  # that only the ranks of this rendezvous use
    rank: int  # this rank
    hosts: list[str]  # the host of each rank
    interface: str | None  # the network interface that leads to the other ranks, if it is known
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
                return _rendezvous_at(launcher.url, launcher, launcher.size, deadline)
            except dist.DistNetworkError as error:  # the store of an earlier group is shutting down
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no sign of rank 0 or its store: {error}") from error
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"init: rank {launcher.rank} of {launcher.size} ({launcher.name}): the rendezvous at {launcher.url} did "
            f"not complete within {timeout:g} s: {error}"
        ) from error


def _rendezvous_at(url: str, launcher: Launcher, size: int, deadline: float) -> Rendezvous:
    # 1. The secret of the ranks, which depends on where they meet.
    interface, advice = None, ""
    scheme, _, place = url.partition("://")
    name, port = ("", 0) if scheme == "file" else split_address(place)
    secret = (secret_of_parent() if launcher.name == "spawn" else None) or choose(None if scheme == "file" else name)
    # 2. The store: a file, or a server of rank 0 or of torchrun.
    if scheme == "file":
        path = urlsplit(url).path
        _check_file(path)
        store: dist.Store = dist.FileStore(path, size)
    else:
        torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher.name == "torchrun"
        if launcher.rank == 0 and not torchrun_serves:
            _serve(name, port)
            advice = _advice(name)
        try:
            address, store = _open_store(name, port, size, deadline)
        except TimeoutError as error:
            raise TimeoutError(f"{error}{advice}") from error
        interface = interface_of(address_towards(address, port))
    # 3. The handshake: a store is also used by other attempts and groups.
    try:
        meeting = handshake(dist.PrefixStore("dist_prims", store), launcher.rank, size, deadline, secret, _GROUP)
    except TimeoutError as error:
        raise TimeoutError(f"{error}{advice if is_loopback(name) else ''}") from error
    own_store = dist.PrefixStore(f"dist_prims/{meeting.attempt}", store)
    return Rendezvous(own_store, launcher.rank, meeting.hosts, interface, launcher.name, secret)


def _serve(name: str, port: int) -> None:
    """Serve the store at a name of this host: at the loopback address only if the name is a loopback address."""
    try:
        served_store((LOOPBACK if name == "localhost" else name) if is_loopback(name) else "", port)
    except OSError as error:
        raise RuntimeError(f"{error.strerror}; if another job uses this port, choose another MASTER_PORT") from error


def _advice(name: str) -> str:
    """The advice of rank 0 about its address if no other rank comes, or if it does not find its own store there."""
    if is_loopback(name):
        return f"; ranks on other hosts cannot connect to {name}, the loopback address of each host; {_REMEDY}"
    own = ", ".join(address for address in interface_addresses() if not is_loopback(address))
    return f"; rank 0 serves the store on a host with the addresses {own}, and {name} must lead there"


def _open_store(name: str, port: int, size: int, deadline: float) -> tuple[str, dist.Store]:
    """Connect to the store, which another process may begin to serve later. Return its address, and the store.

    ``size``: the number of ranks. TimeoutError gives the reason of the last attempt.
    """
    while True:
        problems, addresses = [], dict[str, str]()
        try:
            addresses = _resolve(name, port)
        except OSError as error:
            problems.append(f"this host does not know {name}: {error.strerror}")
        for address, resolved in addresses.items():
            left = max(deadline - time.monotonic(), 0.001)
            try:
                socket.create_connection((address, port), min(left, _SECONDS_PER_ADDRESS)).close()
                return address, open_store(join_address(address, port), size, left)
            except (OSError, dist.DistError) as error:
                problems.append(f"{name} is {resolved} on this host; {join_address(address, port)}: {error}")
        if time.monotonic() > deadline:
            if addresses and all(map(is_loopback, addresses.values())):
                problems.append(f"a loopback address leads from each host to that host; {_REMEDY}")
            raise TimeoutError(f"no sign of rank 0 or its store: {'; '.join(problems)}")
        time.sleep(_PAUSE)


def _resolve(name: str, port: int) -> dict[str, str]:
    """Return the addresses to which to connect, each with the address for which the name stands on this host.

    The two differ for the name of this host itself, which may stand for a loopback address here. The secret of the
    ranks depends on whether they meet at a loopback address, so an address of an interface replaces that address.
    """
    if name == "localhost":
        return {LOOPBACK: LOOPBACK}
    resolved = [str(info[4][0]) for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    outside = [address for address in interface_addresses() if not is_loopback(address)]
    if is_loopback(name) or not outside:
        return {address: address for address in resolved}
    return {outside[0] if is_loopback(address) else address: address for address in resolved}


def _check_file(path: str) -> None:
    """Raise ValueError for a file that does not consist of FileStore's records: FileStore would never stop reading.

    A record is a length and as many bytes.
    """
    content = b""
    # An earlier group removes its file at its end.
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # FileStore writes under the exclusive lock
        content = file.read()
    end = 0
    while end + 4 <= len(content):
        end += 4 + int.from_bytes(content[end : end + 4], sys.byteorder)
    if end != len(content):
        raise ValueError(f"init: {path} exists and is not a rendezvous file; remove it, or give another path")
