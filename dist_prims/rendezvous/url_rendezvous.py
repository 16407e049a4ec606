"""Rendezvous at a URL: open the store there, and find the ranks of this attempt by the handshake of handshake.py.

The process of rank 0 serves the store until it exits: a later rendezvous at the same URL finds it there.
"""

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
from .secret import Secret, choose, received
from .served import open_store, served_store

__all__: list[str] = []

_GROUP = "the ranks of a launcher"  # for codes: the group of this rendezvous has no name
_PAUSE = 0.1  # seconds between attempts to connect to the store
_SECONDS_PER_ADDRESS = 5.0
_REMEDY = "for ranks on several hosts give an address of the host of rank 0 (MASTER_ADDR) that all hosts reach"


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
    interface, advice = None, ""
    scheme, _, place = url.partition("://")
    name, port = ("", 0) if scheme == "file" else split_address(place)
    secret = (received() if launcher.name == "spawn" else None) or choose(None if scheme == "file" else name)
    if scheme == "file":
        path = urlsplit(url).path
        _check_file(path)
        store: dist.Store = dist.FileStore(path, size)
    else:
        if launcher.rank == 0 and not _torchrun_serves(launcher):
            _serve(name, port)
            advice = _advice(name)
        try:
            address, store = _open_store(name, port, size, deadline)
        except TimeoutError as error:
            raise TimeoutError(f"{error}{advice}") from error
        interface = interface_of(address_towards(address, port))
    try:
        attempt, hosts = handshake(dist.PrefixStore("dist_prims", store), launcher.rank, size, deadline, secret, _GROUP)
    except TimeoutError as error:
        raise TimeoutError(f"{error}{advice if is_loopback(name) else ''}") from error
    found = dist.PrefixStore(f"dist_prims/{attempt}", store)
    return Rendezvous(found, launcher.rank, hosts, interface, launcher.name, secret)


def _torchrun_serves(launcher: Launcher) -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher.name == "torchrun"


def _serve(name: str, port: int) -> None:
    """Serve the store at a name of this host: on the loopback interface alone, if the name stands for it everywhere."""
    try:
        served_store((LOOPBACK if name == "localhost" else name) if is_loopback(name) else "", port)
    except OSError as error:
        raise RuntimeError(f"{error.strerror}; if another job uses this port, choose another MASTER_PORT") from error


def _advice(name: str) -> str:
    """What rank 0 says about its address if no other rank comes, or it does not find its own store there."""
    if is_loopback(name):
        return f"; ranks on other hosts cannot connect to {name}, the loopback address of each host; {_REMEDY}"
    own = ", ".join(each for each in interface_addresses() if not is_loopback(each))
    return f"; rank 0 serves the store on a host with the addresses {own}, and {name} must lead there"


def _open_store(name: str, port: int, size: int, deadline: float) -> tuple[str, dist.Store]:
    """Connect to the store, which another process may begin to serve later. Return its address, and the store.

    TimeoutError tells why there was no store.
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
    """Return the addresses to which to connect, and those for which the name stands. torch would ask at each attempt.

    The name of this host may stand for a loopback address on this host only. The secret of the ranks depends on whether
    they meet at a loopback address, so an address of an interface replaces it.
    """
    if name == "localhost":
        return {LOOPBACK: LOOPBACK}
    found = [str(each[4][0]) for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    others = [each for each in interface_addresses() if not is_loopback(each)]
    if is_loopback(name) or not others:
        return {each: each for each in found}
    return {others[0] if is_loopback(each) else each: each for each in found}


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
