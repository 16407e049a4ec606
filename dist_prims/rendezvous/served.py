"""What a process serves for the repair of groups: a store, registers, and a sign that the process runs.

The store of a job may end with the process of rank 0, so a repaired group needs a new one. Some ranks of a group that
spans hosts serve the registers by which the survivors agree (:mod:`.register_server`). A process serves one store and
one set of registers at each address, for all its groups, until it exits.

Other hosts learn that a process has ended when nothing listens at its address any more: the kernel of its host refuses
the connection. A process that serves no registers therefore listens as well, and accepts nothing. Forked children
close the copies of these sockets, which would keep the addresses in use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist

from .register_server import GroupRegisters, RegisterServer
from .url_rendezvous import connect

__all__: list[str] = []

_SECONDS = 60.0  # for what the process asks of its own store
_FIRST_ATTEMPT = 6.0  # seconds to connect to a store; twice as long after each failure
_BACKLOG = 4096  # all ranks may connect at once

_stores: dict[str, tuple[dist.Store, str]] = {}  # by the address of this host, with the port
_sockets: dict[str, socket.socket] = {}  # for all but the stores
_servers: dict[str, RegisterServer] = {}  # at some of these sockets
_of_parent: list[list[object]] = []  # in a forked child
_descriptors: dict[int, int] = {}  # of the sockets that are listening, with their inodes


def served_store(address: str) -> tuple[dist.Store, str]:
    """Return the store that this process serves at an address of this host, and its ``address:port``.

    >>> store, address = served_store("127.0.0.1")
    >>> store.set("key", "value")
    >>> open_store(address, 1, timeout=10).get("key")
    b'value'
    """
    if address not in _stores:
        listening = socket.create_server((address, 0), backlog=_BACKLOG)
        _note(listening)
        port = listening.getsockname()[1]
        _stores[address] = connect(address, port, 1, _SECONDS, listening.detach()), f"{address}:{port}"
    return _stores[address]


def listening_address(address: str) -> str:
    """Return an ``address:port`` of this host at which this process listens while it runs.

    >>> [*answers([listening_address("127.0.0.1")], seconds=10).values()]
    [True]
    """
    if address not in _sockets:
        _sockets[address] = socket.create_server((address, 0), backlog=_BACKLOG)
        _note(_sockets[address])
    return f"{address}:{_sockets[address].getsockname()[1]}"


def serve_registers(address: str, group: str, key: bytes) -> tuple[str, GroupRegisters]:
    """Serve the registers of a group at an address of this host; return ``address:port`` and the registers.

    >>> address, registers = serve_registers("127.0.0.1", "group", b"")
    """
    found = listening_address(address)
    if address not in _servers:
        _servers[address] = RegisterServer(_sockets[address])
    return found, _servers[address].add(group, key)


def open_store(address: str, size: int, timeout: float) -> dist.Store:
    """Connect to a store that another process serves. Raise OSError soon if nothing listens there.

    The call may wait without end for a process that is stopped.

    TCPStore itself tries until its timeout to connect to a process that has ended. It is therefore given a shorter one,
    and each attempt begins with a connection of our own. Before torch connects, it asks the DNS for the name of the
    address, also of a loopback address. The resolver waits 5 s for a reply that is lost; an attempt takes longer than
    that, so it does not fail by one lost reply, and ask again.
    """
    host, _, port = address.rpartition(":")
    deadline, attempt = time.monotonic() + timeout, _FIRST_ATTEMPT
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        socket.create_connection((host, int(port)), left).close()
        try:
            store = connect(host, int(port), size, min(attempt, left))
        except dist.DistError:
            if time.monotonic() > deadline:
                raise
            attempt *= 2
        else:
            store.set_timeout(timedelta(seconds=timeout))
            return store


def answers(addresses: Collection[str], seconds: float) -> dict[str, bool]:
    """Return whether a process listens at each address of a host that answers in this time."""
    found = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for address in addresses:
            host, _, port = address.rpartition(":")
            probe = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setblocking(False)
            if probe.connect_ex((host, int(port))) == errno.ECONNREFUSED:
                found[address] = False
            else:
                selector.register(probe, selectors.EVENT_WRITE, address)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                probe = key.fileobj  # type: ignore[assignment]
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error in (0, errno.ECONNREFUSED):
                    found[key.data] = error == 0
    return found


def _note(listening: socket.socket) -> None:
    _descriptors[listening.fileno()] = os.fstat(listening.fileno()).st_ino


def _close_in_child() -> None:
    for descriptor, inode in _descriptors.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    for each in _sockets.values():
        each.detach()
    # The destructor of a TCPStore would wait without end for the thread of its server, which the child does not have.
    _of_parent.append([*_stores.values(), *_servers.values()])
    for known in (_stores, _sockets, _servers, _descriptors):
        known.clear()


os.register_at_fork(after_in_child=_close_in_child)
