"""Meet the other ranks at a URL: open the store there, and agree on who takes part *this time*.

A store outlives the ranks that use it. torchrun keeps one for all attempts of a job, and a file stays where a crash
left it; gloo then reads the addresses of the dead and cannot connect. Neither a restart count (it stands still when
hosts come and go) nor a key that was written earlier can be trusted. So the ranks greet each other: each peer leaves a
random token under its rank, rank 0 answers *that token* with a random name for this meeting, and repeats it as tokens
change until all have acknowledged it. Everything afterwards is kept under that name, where no old key can be.
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
from .detect import Launcher
from .hosts import host_id
from .network import LOOPBACK, interface_towards, listen

__all__ = ["Meeting", "connect", "from_rank_0", "greet", "meet"]

_SECONDS_TO_READ = 10.0  # all ranks have met before


@dataclass(frozen=True)
class Meeting:
    """A store that only the ranks of this meeting use, ours among them, their hosts by rank, and the interface that
    leads to them."""

    store: dist.Store
    rank: int
    hosts: list[str]
    interface: str | None
    by: str  # the launcher, as we announce it


def meet(launcher: Launcher, timeout: float) -> Meeting:
    if launcher.size == 1 or launcher.url is None:
        return Meeting(dist.HashStore(), 0, [host_id()], None, launcher.name)
    assert launcher.size is not None, "whoever says where to meet says how many meet"
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                return _meet_at(urlsplit(launcher.url), launcher, launcher.size, deadline)
            except dist.DistNetworkError as error:  # a store on its way out, of a group that was here before
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no sign of rank 0 or its store: {error}") from error
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"init: rank {launcher.rank} of {launcher.size} ({launcher.name}) did not meet the others at "
            f"{launcher.url} within {timeout:g} s: {error}"
        ) from error


def connect(address: str, port: int, size: int, timeout: float, server: int | None = None) -> dist.Store:
    """A client of the TCPStore at ``address``; with the descriptor of a listening socket, its server too."""
    return dist.TCPStore(
        address,
        port,
        size,
        is_master=server is not None,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=server,
    )


def _meet_at(url: SplitResult, launcher: Launcher, size: int, deadline: float) -> Meeting:
    interface = None
    if url.scheme == "file":
        _refuse_foreign_file(url.path)
        store: dist.Store = dist.FileStore(url.path, size)
    else:
        address, port = LOOPBACK if url.hostname == "localhost" else url.hostname or "", url.port or 0
        store = _tcp_store(launcher, size, address, port, max(1.0, deadline - time.monotonic()))
        interface = interface_towards(address, port)
    name, hosts = greet(dist.PrefixStore("dist_prims", store), launcher.rank, size, deadline)
    return Meeting(dist.PrefixStore(f"dist_prims/{name}", store), launcher.rank, hosts, interface, launcher.name)


def _tcp_store(launcher: Launcher, size: int, address: str, port: int, timeout: float) -> dist.Store:
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launcher.name == "torchrun"
    if launcher.rank != 0 or torchrun_serves:
        return connect(address, port, size, timeout)
    try:
        server = listen(address, port)
    except OSError as error:
        raise RuntimeError(f"{error.strerror}; if another job has that port, choose another MASTER_PORT") from error
    return connect(address, port, size, timeout, server.detach())


def greet(
    store: dist.Store, rank: int, size: int, deadline: float, look: Callable[[], None] = lambda: None
) -> tuple[str, list[str]]:
    """The name of this meeting, and the hosts of its ranks. ``look`` is called now and then; what it raises ends it."""
    token = secrets.token_hex(8)
    if rank == 0:
        return token, _welcome_all(store, size, token, deadline, look)

    def welcome() -> bool:
        look()
        store.set(f"hello/{rank}", f"{token} {host_id()}")  # again and again: an old group may still remove its file
        return store.check([f"welcome/{token}"])

    until(welcome, deadline, "rank 0")
    name = store.get(f"welcome/{token}").decode()
    store.add(f"{name}/acknowledged", 1)

    def complete() -> bool:
        look()
        return store.check([f"{name}/hosts"])

    until(complete, deadline, "the last ranks")
    return name, json.loads(store.get(f"{name}/hosts"))


def _welcome_all(store: dist.Store, size: int, name: str, deadline: float, look: Callable[[], None]) -> list[str]:
    hosts = {0: host_id()}
    welcomed: dict[int, str] = {}

    def everyone() -> bool:
        look()
        for rank in range(1, size):
            if store.check([f"hello/{rank}"]):
                token, _, hosts[rank] = store.get(f"hello/{rank}").decode().partition(" ")
                if welcomed.get(rank) != token:  # the first one, or the last was a leftover of the dead
                    store.set(f"welcome/{token}", name)
                    welcomed[rank] = token
        return store.add(f"{name}/acknowledged", 0) == size - 1

    try:
        until(everyone, deadline, "the others")
    except TimeoutError as error:
        missing = [rank for rank in range(1, size) if rank not in welcomed]
        raise TimeoutError(f"no sign of ranks {missing}" if missing else "a rank went silent") from error
    names = [hosts[rank] for rank in range(size)]
    store.set(f"{name}/hosts", json.dumps(names))
    return names


def _refuse_foreign_file(path: str) -> None:
    """A file that does not consist of FileStore's records (a length, then that many bytes) makes it read for ever."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # FileStore writes under the exclusive lock
        content = file.read()
    end = 0
    while end + 4 <= len(content):
        end += 4 + int.from_bytes(content[end : end + 4], sys.byteorder)
    if end != len(content):
        raise ValueError(f"init: {path} exists and is no file of a rendezvous; remove it, or give another path")


def from_rank_0(store: Any, rank: int, size: int, key: str, make: Callable[[], str]) -> str:
    """What ``make`` returns on rank 0, on every rank; if it raises there, RuntimeError on the others, at once."""
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
        raise RuntimeError(f"dist_prims: rank {rank}: the group is not made, because rank 0 failed: {answer[1:]}")
    return str(answer[1:])


def _wait_for_readers(store: Any, key: str, readers: int) -> None:
    """The error may end rank 0, and the store with it; the others would be told of that instead."""
    with contextlib.suppress(TimeoutError, dist.DistError):  # the error of rank 0 matters more
        until(lambda: store.add(f"{key}/read", 0) == readers, time.monotonic() + _SECONDS_TO_READ, "the readers")
