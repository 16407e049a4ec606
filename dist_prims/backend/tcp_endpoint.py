"""Where a rank listens for the ranks of other hosts, and the exchange of these addresses, for the TCP transport."""

from __future__ import annotations

import os
import secrets
from typing import Any

from ..launch.network import LOOPBACK, address_of, address_towards, interface_addresses, is_loopback
from ..launch.rendezvous import from_rank_0
from .extension import extension

__all__: list[str] = []

_FAILED = "!"  # begins what a rank publishes instead of an address


def make(store: Any, rank: int, size: int) -> Any:
    """Listen, exchange the addresses of all ranks through the group's store, and return the TcpEndpoint of this rank.

    If a rank cannot listen, all ranks raise RuntimeError.
    """
    endpoint: Any = None
    try:
        endpoint = extension().TcpEndpoint(own_address())
        published = endpoint.address
    except (OSError, ValueError, RuntimeError) as error:
        published = f"{_FAILED}{error}"
    store.set(f"tcp/{rank}", published)
    found = [answer.decode() for answer in store.multi_get([f"tcp/{each}" for each in range(size)])]
    for each, answer in enumerate(found):
        if answer.startswith(_FAILED):
            raise RuntimeError(
                f"rank {rank}: rank {each} cannot listen for the ranks of other hosts: {answer[len(_FAILED) :]}; set "
                "GLOO_SOCKET_IFNAME on that rank to the interface that leads to them, or use DIST_PRIMS_ENGINE=gloo"
            )
    endpoint.addresses = found
    endpoint.token = from_rank_0(store, rank, size, "tcp/token", lambda: secrets.token_hex(16))
    return endpoint


def own_address() -> str:
    """Return the address at which this rank listens.

    That is, in this order: the address of the interface ``GLOO_SOCKET_IFNAME``, the one from which the kernel sends to
    ``MASTER_ADDR``, the first that is no loopback address.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        if address := address_of(interface):
            return address
        raise ValueError(f"GLOO_SOCKET_IFNAME={interface}: this host has no such interface with an IPv4 address")
    if master := os.environ.get("MASTER_ADDR"):
        try:
            address = address_towards(master, int(os.environ.get("MASTER_PORT", "1")))
        except OSError as error:
            raise ValueError(f"MASTER_ADDR={master}: {error}") from error
        if is_loopback(master) or not is_loopback(address):  # a name may stand for a loopback address on its own host
            return address
    return next((each for each in interface_addresses() if not is_loopback(each)), LOOPBACK)
