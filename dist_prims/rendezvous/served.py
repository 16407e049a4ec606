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
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch.distributed as dist

from .network import LOOPBACK, join_address, listen, split_address
from .register_server import GroupRegisters, RegisterServer

__all__: list[str] = []

_SECONDS = 60.0  # for what the process asks of its own store
_MOST_PROBES = 64  # connections that are opened at the same time
_FIRST_ATTEMPT = 6.0  # seconds to connect to a store; twice as long after each failure

_stores: dict[tuple[str, int], tuple[dist.Store, str]] = {}  # by address of this host and port, with host:port
_sockets: dict[str, socket.socket] = {}  # for all but the stores
_servers: dict[str, RegisterServer] = {}  # at some of these sockets
_of_parent: list[list[object]] = []  # in a forked child
_descriptors: dict[int, int] = {}  # of the sockets that are listening, with their inodes


def served_store(address: str, port: int = 0) -> tuple[dist.Store, str]:
    """Return the store that this process serves at an address of this host, and its ``address:port``.

    It is at all addresses of this host if ``address`` is empty, and at a free port if ``port`` is 0.

    >>> store, address = served_store("127.0.0.1")
    >>> store.set("key", "value")
    >>> open_store(address, 1, timeout=10).get("key")
    b'value'
    """
    if (address, port) not in _stores:
        listening = listen(address, port)
        _note(listening)
        found = listening.getsockname()[1]
        client = address or LOOPBACK
        _stores[address, port] = (
            connect(client, found, 1, _SECONDS, listening.detach(), is_shared=port != 0),
            join_address(client, found),
        )
    return _stores[address, port]


def listening_address(address: str) -> str:
    """Return an ``address:port`` of this host at which this process listens while it runs.

    >>> [*answers([listening_address("127.0.0.1")], seconds=10).values()]
    [True]
    """
    if address not in _sockets:
        _sockets[address] = listen(address)
        _note(_sockets[address])
    return join_address(address, _sockets[address].getsockname()[1])


def serve_registers(address: str, group: str, key: bytes) -> tuple[str, GroupRegisters]:
    """Serve the registers of a group at an address of this host; return ``address:port`` and the registers.

    >>> address, registers = serve_registers("127.0.0.1", "group", b"")
    """
    found = listening_address(address)
    if address not in _servers:
        _servers[address] = RegisterServer(_sockets[address])
    return found, _servers[address].add(group, key)


def connect(
    address: str, port: int, size: int, timeout: float, server: int | None = None, is_shared: bool = False
) -> dist.Store:
    """Create a client of the TCPStore at ``address``; with the descriptor of a listening socket, its server as well.

    If it is shared, ``init_process_group`` of this process at the same port, as MASTER_PORT, uses this server too.
    """
    return dist.TCPStore(
        address,
        port,
        size,
        is_master=server is not None,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=is_shared,
        master_listen_fd=server,
    )


def open_store(address: str, size: int, timeout: float) -> dist.Store:
    """Connect to a store that another process serves. Raise OSError soon if nothing listens there.

    The call may wait without end for a process that is stopped.

    TCPStore itself tries until its timeout to connect to a process that has ended. It is therefore given a shorter one,
    and each attempt begins with a connection of our own. Before torch connects, it asks the DNS for the name of the
    address, also of a loopback address. The resolver waits 5 s for a reply that is lost; an attempt takes longer than
    that, so it does not fail by one lost reply, and ask again.
    """
    server = split_address(address)
    deadline, attempt = time.monotonic() + timeout, _FIRST_ATTEMPT
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        socket.create_connection(server, left).close()
        try:
            store = connect(*server, size, min(attempt, left))
        except dist.DistError:
            if time.monotonic() > deadline:
                raise
            attempt *= 2
        else:
            store.set_timeout(timedelta(seconds=timeout))
            return store


def answers(addresses: Collection[str], seconds: float) -> dict[str, bool]:
    """Return whether a process listens at each address of a host that answers in this time.

    OSError if this process has no descriptor left, or this host no port, so that nothing can be said of other hosts.
    """
    waiting, found = [*addresses], {}
    for begin in range(0, len(waiting), _MOST_PROBES):
        found.update(_answers(waiting[begin : begin + _MOST_PROBES], seconds))
    return found


def _answers(addresses: Sequence[str], seconds: float) -> dict[str, bool]:
    found = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for address in addresses:
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setblocking(False)
            error = probe.connect_ex((host, port))
            if error == errno.ECONNREFUSED:
                found[address] = False
            elif error in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, address)
            elif error in (errno.EADDRNOTAVAIL, errno.EAGAIN):
                raise OSError(error, f"this host has no port for a connection to {address}")
            # After another error, such as no route, no answer comes.
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
