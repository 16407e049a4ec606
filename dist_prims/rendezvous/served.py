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
import ctypes
import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from .network import LOOPBACK, join_address, listen, split_address
from .register_server import GroupRegisters, RegisterServer

__all__: list[str] = []

_SECONDS = 60.0  # for what the process asks of its own store
_MOST_PROBES = 64  # connections that are opened at the same time
_FIRST_ATTEMPT = 6.0  # seconds to connect to a store; twice as long after each failure

_stores: dict[tuple[str, int], tuple[dist.Store, str]] = {}  # store and its address:port, by requested address and port
_sockets: dict[str, socket.socket] = {}  # that listen for repairs, by address of this host
_servers: dict[str, RegisterServer] = {}  # of registers, at some of these sockets
_of_parent: list[list[object]] = []  # in a forked child: kept alive, see _close_in_child
_descriptors: dict[int, int] = {}  # of all sockets that listen, with their inodes


def served_store(address: str, port: int = 0) -> tuple[dist.Store, str]:
    """Return the store that this process serves at an address of this host, and its ``address:port``.

    An empty ``address`` stands for all addresses of this host. If ``port`` is 0, a free port is used.

    >>> store, address = served_store("127.0.0.1")
    >>> store.set("key", "value")
    >>> open_store(address, 1, timeout=10).get("key")
    b'value'
    """
    if (address, port) not in _stores:
        listening = listen(address, port)
        _note(listening)
        actual_port, client = listening.getsockname()[1], address or LOOPBACK
        store = connect(client, actual_port, 1, _SECONDS, listening.detach(), is_shared=port != 0)
        _stores[address, port] = store, join_address(client, actual_port)
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
    address_and_port = listening_address(address)
    if address not in _servers:
        _servers[address] = RegisterServer(_sockets[address])
    return address_and_port, _servers[address].add(group, key)


def connect(
    address: str, port: int, size: int, timeout: float, server: int | None = None, is_shared: bool = False
) -> dist.Store:
    """Create a client of the TCPStore at ``address`` and ``port``.

    Args:
        size: the number of ranks.
        timeout: seconds for the connection, and for each later request.
        server: the descriptor of a listening socket: create the server as well, which then owns it.
        is_shared: ``init_process_group`` of this process at the same port, as MASTER_PORT, uses this server too.
    """
    with _quick_name_requests():
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


@contextlib.contextmanager
def _quick_name_requests() -> Iterator[None]:
    """On this thread the C library asks the DNS again after 1 s, not after 5, if no reply comes.

    TCPStore asks for the name of each address to which it connects, even of a loopback address, only for its log.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "__res_state"):  # not glibc
        yield
        return
    library.__res_init()  # in a new thread the state is empty
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    seconds_to_repeat = library.__res_state().contents  # the first field of ``struct __res_state`` of ``resolv.h``
    before, seconds_to_repeat.value = seconds_to_repeat.value, min(seconds_to_repeat.value, 1)
    try:
        yield
    finally:
        seconds_to_repeat.value = before


def open_store(address: str, size: int, timeout: float) -> dist.Store:
    """Connect to a store that another process serves at ``host:port``. Raise OSError soon if nothing listens there.

    The call may wait without end for a process that is stopped. ``timeout``: seconds to connect, and for each later
    request.

    TCPStore itself tries until its timeout to connect to a process that has ended. It is therefore given a shorter
    timeout, and each attempt begins with a connection of our own. The thread that serves a TCPStore asks the DNS for
    the name of each client, and waits 5 s for a reply that is lost. The first attempt takes longer than 5 s, so one
    lost reply does not make it fail.
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
    """Return, by address, whether a process listens there. An address whose host does not answer in time is left out.

    OSError if this process has no descriptor left, or this host no port, so that nothing can be said of other hosts.
    ``seconds``: for each _MOST_PROBES addresses.
    """
    to_probe, is_listening = [*addresses], dict[str, bool]()
    for begin in range(0, len(to_probe), _MOST_PROBES):
        is_listening.update(_answers(to_probe[begin : begin + _MOST_PROBES], seconds))
    return is_listening


def _answers(addresses: Sequence[str], seconds: float) -> dict[str, bool]:
    is_listening = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        # 1. Begin to connect to all.
        for address in addresses:
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setblocking(False)
            error = probe.connect_ex((host, port))
            if error == errno.ECONNREFUSED:
                is_listening[address] = False
            elif error in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, address)
            elif error == errno.EAGAIN or (error == errno.EADDRNOTAVAIL and _has_source_for(family, host, port)):
                raise OSError(error, f"this host has no port for a connection to {address}")
            # After another error, such as no route, no answer comes.
        # 2. Collect the results until the deadline.
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                probe = key.fileobj  # type: ignore[assignment]
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error in (0, errno.ECONNREFUSED):
                    is_listening[key.data] = error == 0
    return is_listening


def _has_source_for(family: int, host: str, port: int) -> bool:
    """Whether this host has an address from which it can send a packet to ``host``.

    ``EADDRNOTAVAIL`` has two causes: no port is left, or there is no such address. A datagram socket needs no TCP port.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex((host, port)) != errno.EADDRNOTAVAIL


def _note(listening: socket.socket) -> None:
    """Remember the socket for :func:`_close_in_child`."""
    _descriptors[listening.fileno()] = os.fstat(listening.fileno()).st_ino


def _close_in_child() -> None:
    """Close the child's copies of the sockets. A descriptor with another inode was closed and is something else now."""
    for descriptor, inode in _descriptors.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
    for listening in _sockets.values():
        listening.detach()
    # The destructor of a TCPStore would wait without end for the thread of its server, which the child does not have.
    _of_parent.append([*_stores.values(), *_servers.values()])
    for of_process in (_stores, _sockets, _servers, _descriptors):
        of_process.clear()


os.register_at_fork(after_in_child=_close_in_child)
