"""Where a rank listens for the ranks of other hosts, and the exchange of these addresses, for the TCP transport."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ..rendezvous.hosts import has_cores
from ..rendezvous.network import LOOPBACK, address_of, address_towards, interface_addresses, is_loopback
from ..rendezvous.rank_values import from_rank_0, values_of_ranks
from .extension import extension

__all__: list[str] = []

_FAILED = "!"  # begins what a rank publishes instead of an address


def make(store: Any, rank: int, hosts: Sequence[str], key: str) -> Any:
    """Listen, exchange the addresses of all ranks through the group's store, and return the TcpEndpoint of this rank.

    ``hosts``: the host of each rank.

    Connections of other processes than the ranks are refused by a ``key`` of the group. Without one rank 0 makes a key,
    which every process that can read the store can read. If a rank cannot listen, all ranks raise RuntimeError.
    """

    def listen() -> tuple[Any, str]:
        made = extension().TcpEndpoint(own_address())
        return made, made.address

    remedy = "set GLOO_SOCKET_IFNAME on that rank to the interface that leads to them"
    failure = "cannot listen for the ranks of other hosts"
    endpoint, addresses = exchange(store, rank, len(hosts), "tcp", listen, failure, remedy)
    endpoint.addresses = addresses
    endpoint.polls = has_cores(hosts, rank)
    endpoint.key = key or from_rank_0(store, rank, len(hosts), "tcp/key", lambda: secrets.token_hex(32))
    return endpoint


def exchange(
    store: Any, rank: int, size: int, name: str, make_own: Callable[[], tuple[Any, str]], failure: str, remedy: str
) -> tuple[Any, list[str]]:
    """Return what ``make_own`` has made on this rank, and the addresses of all ranks.

    ``make_own`` returns an endpoint and its address, which is published under ``name``. If it fails on a rank, all
    ranks raise RuntimeError with that rank, the ``failure`` and the ``remedy``.
    """
    endpoint: Any = None
    try:
        endpoint, published = make_own()
    except (OSError, ValueError, RuntimeError) as error:
        published = f"{_FAILED}{error}"
    store.set(f"{name}/{rank}", published)
    found = values_of_ranks(store, rank, name, size)
    for each, answer in enumerate(found):
        if answer.startswith(_FAILED):
            raise RuntimeError(f"rank {rank}: rank {each} {failure}: {answer[len(_FAILED) :]}; {remedy}")
    return endpoint, found


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
