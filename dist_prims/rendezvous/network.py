"""Addresses, ports and network interfaces: where to listen, and which interface leads to the other hosts.

By default TCPStore listens on all interfaces, and gloo on the address that the hostname resolves to. On one host this
exposes a job to the network although only local ranks connect. On several hosts the hostname often resolves to
127.0.1.1, which the other hosts cannot reach.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

__all__: list[str] = []

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
PORTS, KEEPALIVE = "DIST_PRIMS_PORTS", "DIST_PRIMS_KEEPALIVE"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_LINK_LOCAL = 0x20  # the scope of an address in /proc/net/if_inet6
_UNUSABLE, _SECOND_CHOICE = 0x48, 0x21  # linux/if_addr.h: tentative or a duplicate; deprecated or temporary
_SHORTEST_KEEPALIVE, _LONGEST_KEEPALIVE = 6, 32_767  # seconds; linux/tcp.h
_PROBES = 4
_KERNEL_PORTS = "net.ipv4.ip_local_port_range"
_BACKLOG = 4096  # all ranks may connect at once


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address.

    >>> join_address("10.0.0.1", 29500), join_address("fd00::1", 29500)
    ('10.0.0.1:29500', '[fd00::1]:29500')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; ValueError for another text.

    >>> split_address("host0:29500"), split_address("[fd00::1]:29500")
    (('host0', 29500), ('fd00::1', 29500))
    """
    parts = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:/]+)):(\d{1,5})", address)
    if parts and int(parts[3]) < 1 << 16:
        return parts[1] or parts[2], int(parts[3])
    raise ValueError(f"{address!r} is not of the form host:port; an IPv6 address has brackets: [fd00::1]:29500")


def family_of(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


def is_name(host: str) -> bool:
    """Whether a host is given by its name, and not by an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_loopback(address: str) -> bool:
    if is_name(address):  # other hosts may resolve it differently
        return address == "localhost"
    return ipaddress.ip_address(address).is_loopback


def ports(environ: Mapping[str, str] = os.environ) -> range:
    """Return the ports of ``DIST_PRIMS_PORTS``. Port 0 alone: the variable is not set, and the kernel chooses.

    >>> ports({"DIST_PRIMS_PORTS": "20000-20100"}), ports({})
    (range(20000, 20101), range(0, 1))
    """
    if not (text := environ.get(PORTS, "")):
        return range(1)
    limits = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not limits or not 0 < int(limits[1]) <= int(limits[2]) < 1 << 16:
        raise ValueError(f"{PORTS}={text!r}: give the first and the last port, such as 20000-20100")
    return range(int(limits[1]), int(limits[2]) + 1)


def at_free_port(bind: Callable[[int], T]) -> T:
    """Return the result of ``bind`` for a port of :func:`ports`. ``bind`` raises OSError for a port that is in use."""
    allowed = ports()
    first = secrets.randbelow(len(allowed))  # other ranks of this host begin elsewhere
    for port in (*allowed[first:], *allowed[:first]):
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise _no_port(f"{PORTS}={os.environ[PORTS]}" if os.environ.get(PORTS) else _KERNEL_PORTS)


def _no_port(setting: str) -> OSError:
    return OSError(f"all ports of {setting} are in use on this host; give a wider range, or end other programs")


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen at an address of this host; empty: on all interfaces. Port 0 selects a free port of :func:`ports`."""

    def bind(chosen_port: int) -> socket.socket:
        is_dual = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual or ":" in address else socket.AF_INET
        return socket.create_server((address, chosen_port), family=family, dualstack_ipv6=is_dual, backlog=_BACKLOG)

    return bind(port) if port else at_free_port(bind)


def keep_alive(listening: socket.socket) -> None:
    """Let connections that are accepted here fail if the other host answers nothing for DIST_PRIMS_KEEPALIVE seconds.

    The kernel probes idle connections: at first after a third of the time, then four times. The kernel of the other
    host answers, also for a process that reads nothing or is stopped. Connections inherit the options of the socket.
    """
    text = os.environ.get(KEEPALIVE, "30")
    if not text.isdecimal() or not _SHORTEST_KEEPALIVE <= int(text) <= _LONGEST_KEEPALIVE:
        raise ValueError(f"{KEEPALIVE}={text!r}: give seconds, {_SHORTEST_KEEPALIVE} to {_LONGEST_KEEPALIVE}")
    idle = int(text) // 3
    interval = (int(text) - idle) // _PROBES
    options = {socket.TCP_KEEPIDLE: idle, socket.TCP_KEEPINTVL: interval, socket.TCP_KEEPCNT: _PROBES}
    for option, value in options.items():
        listening.setsockopt(socket.IPPROTO_TCP, option, value)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def addresses() -> list[str]:
    """The addresses at which other hosts may reach this host: the addresses of its interfaces, then its name."""
    unique = dict.fromkeys(address for _, name in socket.if_nameindex() for address in addresses_of(name))
    return [address for address in unique if not is_loopback(address)] + [socket.gethostname()]


def addresses_of(interface: str) -> list[str]:
    """The first IPv4 address and the first IPv6 address of an interface, if it has them."""
    by_family: dict[str, str] = {}
    for name, address in _interfaces():
        if name == interface:
            by_family.setdefault(family_of(address), address)
    return [*by_family.values()]


def own_address() -> str:
    """The first of :func:`own_addresses`."""
    return own_addresses()[0]


def own_addresses() -> list[str]:
    """The addresses at which this process listens for other hosts: at most one of IPv4 and one of IPv6.

    The addresses belong to the interface ``GLOO_SOCKET_IFNAME``; without that variable, to the interface through which
    the kernel sends to ``MASTER_ADDR``; else to the first interface that is not the loopback interface.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        if named := addresses_of(interface):
            return named
        raise ValueError(f"GLOO_SOCKET_IFNAME={interface}: this host has no such interface with an address")
    outside = [address for address in interface_addresses() if not is_loopback(address)]
    first = _address_towards_master() or (outside or [LOOPBACK])[0]
    same_interface = addresses_of(interface_of(first) or "")
    return [first, *(address for address in same_interface if family_of(address) != family_of(first))]


def _address_towards_master() -> str:
    """The address from which the kernel sends to ``MASTER_ADDR``; empty without that variable.

    It is also empty if ``MASTER_ADDR`` is a name that stands for a loopback address, as it may on its own host.
    """
    master = os.environ.get("MASTER_ADDR", "").strip("[]")
    if not master:
        return ""
    try:
        address = address_towards(master, int(os.environ.get("MASTER_PORT", "1")))
    except OSError as error:
        remedy = "; set GLOO_SOCKET_IFNAME on that rank to the interface that leads to the other hosts"
        # An error without a number is one of this module, which names its own remedy.
        raise ValueError(f"MASTER_ADDR={master}: {error}{remedy if error.errno else ''}") from error
    return address if is_loopback(master) or not is_loopback(address) else ""


def interface_addresses() -> list[str]:
    """The addresses of the interfaces of this host: the IPv4 addresses, then the IPv6 addresses."""
    return [address for _, address in _interfaces()]


def interface_of(address: str) -> str | None:
    """The name of the interface with this address."""
    return next((name for name, its_address in _interfaces() if its_address == address), None)


def loopback_interface() -> str | None:
    return next((name for name, address in _interfaces() if is_loopback(address)), None)


def address_towards(address: str, port: int) -> str:
    """The address of this host from which the kernel would send to ``address``. The function sends nothing."""
    failure = OSError(f"{address} has no address")
    for family, _, _, _, target in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)
            except BlockingIOError:
                raise _no_port(_KERNEL_PORTS) from None
            except OSError as error:  # this host has no address of this family
                failure = error
            else:
                return str(probe.getsockname()[0])
    raise failure


def _interfaces() -> list[tuple[str, str]]:
    """Each interface with each of its addresses, the IPv4 addresses first.

    Link-local IPv6 addresses are left out, because they are valid only together with the name of an interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        pairs = [(name, address) for _, name in socket.if_nameindex() if (address := _ipv4_address(probe, name))]
    with contextlib.suppress(FileNotFoundError):  # the kernel has no IPv6
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        first: list[tuple[str, str]] = []
        second: list[tuple[str, str]] = []
        for digits, _, _, scope, flags, name in lines:
            if int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _UNUSABLE:
                choice = second if int(flags, 16) & _SECOND_CHOICE else first
                choice.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
        pairs += first + second
    return pairs


def _ipv4_address(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(answer[20:24])
