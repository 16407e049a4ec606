"""Addresses and network interfaces: where to listen, and which interface leads to the other hosts.

By default TCPStore listens on all interfaces, and gloo on the address that the hostname resolves to. On one host this
exposes a job to the network although only local ranks connect. On several hosts the hostname often resolves to
127.0.1.1, which the other hosts cannot reach.
"""

import fcntl
import ipaddress
import socket
import struct

__all__: list[str] = []

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_BACKLOG = 4096  # all ranks may connect at once


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name: other hosts may resolve it differently
        return address == "localhost"


def listen(address: str, port: int) -> socket.socket:
    """Listen on loopback if ``address`` is a loopback address, else on all interfaces. Port 0 selects a free port."""
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def addresses() -> list[str]:
    """The addresses at which other hosts may reach this host: the IPv4 addresses of its interfaces, then its name."""
    return [address for address in interface_addresses() if not is_loopback(address)] + [socket.gethostname()]


def interface_addresses() -> list[str]:
    """The IPv4 addresses of the interfaces of this host."""
    found = [address_of(name) for _, name in socket.if_nameindex()]
    return [address for address in found if address]


def loopback_interface() -> str | None:
    return next((name for _, name in socket.if_nameindex() if address_of(name) == LOOPBACK), None)


def interface_towards(address: str, port: int) -> str | None:
    """The interface through which the kernel would send to ``address``. The function sends nothing."""
    local = address_towards(address, port)
    return next((name for _, name in socket.if_nameindex() if address_of(name) == local), None)


def address_towards(address: str, port: int) -> str:
    """This host's address in what the kernel would send to ``address``. The function sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
