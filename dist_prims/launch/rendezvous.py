"""Rendezvous at a URL: open the store there, and agree on the ranks of *this* attempt by a handshake.

A store outlives the ranks that use it. torchrun keeps one for all attempts of a job, and a file stays after a crash;
gloo would then read the addresses of dead processes and fail to connect. Neither a restart count (it does not change
when hosts are added or removed) nor a key that was written earlier is reliable evidence of the current attempt.

The ranks therefore do a handshake in the store:

1. Each rank but 0 writes a random token under its rank.
2. Rank 0 answers *that token* with a random name for this attempt, and again when a token changes.
3. Each rank acknowledges the name. When all have, rank 0 publishes the hosts of all ranks.

All later keys have the name as their prefix, under which no key of an earlier attempt can exist.
"""

import contextlib
import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch.distributed as dist

from .deadline import until
from .detect_launcher import Launcher
from .hosts import host_id
from .network import LOOPBACK, interface_towards, listen

__all__: list[str] = []

_SECONDS_TO_READ = 10.0  # enough, because all ranks are connected to the store


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
    if url.scheme == "file":
        _check_file(url.path)
        store: dist.Store = dist.FileStore(url.path, size)
    else:
        address, port = LOOPBACK if url.hostname == "localhost" else url.hostname or "", url.port or 0
        store = _tcp_store(launcher, size, address, port, max(1.0, deadline - time.monotonic()))
        interface = interface_towards(address, port)
    name, hosts = handshake(dist.PrefixStore("dist_prims", store), launcher.rank, size, deadline)
    return Rendezvous(dist.PrefixStore(f"dist_prims/{name}", store), launcher.rank, hosts, interface, launcher.name)


def _tcp_store(launcher: Launcher, size: int, address: str, port: int, timeout: float) -> dist.Store:
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher.name == "torchrun"
    if launcher.rank != 0 or torchrun_serves:
        return connect(address, port, size, timeout)
    try:
        server = listen(address, port)
    except OSError as error:
        raise RuntimeError(f"{error.strerror}; if another job uses this port, choose another MASTER_PORT") from error
    return connect(address, port, size, timeout, server.detach())


def handshake(
    store: dist.Store, rank: int, size: int, deadline: float, check: Callable[[], None] = lambda: None
) -> tuple[str, list[str]]:
    """Do the handshake. Return the name of this attempt and the hosts of its ranks.

    The wait calls ``check`` at intervals, and passes on the exceptions that ``check`` raises.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        return token, _answer_all(store, size, token, deadline, check)

    def is_answered() -> bool:
        check()
        store.set(f"hello/{rank}", f"{token} {host_id()}")  # repeated, because an old group may still remove its file
        return store.check([f"welcome/{token}"])

    until(is_answered, deadline, "rank 0")
    name = store.get(f"welcome/{token}").decode()
    store.add(f"{name}/acknowledged", 1)

    def is_complete() -> bool:
        check()
        return store.check([f"{name}/hosts"])

    until(is_complete, deadline, "the last ranks")
    return name, json.loads(store.get(f"{name}/hosts"))


def _answer_all(store: dist.Store, size: int, name: str, deadline: float, check: Callable[[], None]) -> list[str]:
    hosts = {0: host_id()}
    answered: dict[int, str] = {}

    def is_acknowledged() -> bool:
        check()
        for rank in range(1, size):
            if store.check([f"hello/{rank}"]):
                token, _, hosts[rank] = store.get(f"hello/{rank}").decode().partition(" ")
                if answered.get(rank) != token:  # the first token, or the last one was of an earlier attempt
                    store.set(f"welcome/{token}", name)
                    answered[rank] = token
        return store.add(f"{name}/acknowledged", 0) == size - 1

    try:
        until(is_acknowledged, deadline, "the others")
    except TimeoutError as error:
        missing = [rank for rank in range(1, size) if rank not in answered]
        raise TimeoutError(f"no sign of ranks {missing}" if missing else "no acknowledgement of a rank") from error
    names = [hosts[rank] for rank in range(size)]
    store.set(f"{name}/hosts", json.dumps(names))
    return names


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


def from_rank_0(store: Any, rank: int, size: int, key: str, make: Callable[[], str]) -> str:
    """Return on every rank what ``make`` returns on rank 0; if ``make`` raises, the other ranks raise RuntimeError."""
    if rank == 0:
        try:
            value = make()
        except Exception as error:
            store.set(key, f"!{type(error).__name__}: {error}")
            _wait_for_readers(store, key, size - 1)
            raise
        store.set(key, f"={value}")
        return value
    answer = store.get(key).decode()
    if answer.startswith("!"):
        store.add(f"{key}/read", 1)
        raise RuntimeError(f"dist_prims: rank {rank}: the group is not created, because rank 0 failed: {answer[1:]}")
    return str(answer[1:])


def _wait_for_readers(store: Any, key: str, readers: int) -> None:
    """Wait until the other ranks have read the error: it may end rank 0 and the store, whose loss they would report."""
    with contextlib.suppress(TimeoutError, dist.DistError):  # the error of rank 0 matters more
        until(lambda: store.add(f"{key}/read", 0) == readers, time.monotonic() + _SECONDS_TO_READ, "the readers")
