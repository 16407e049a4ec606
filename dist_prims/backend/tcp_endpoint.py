"""Where a rank listens for the ranks of other hosts, and the exchange of these addresses, for the TCP transport."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ..rendezvous.hosts import has_cores
from ..rendezvous.network import (
    LOOPBACK,
    address_towards,
    addresses_of,
    family_of,
    interface_addresses,
    interface_of,
    is_loopback,
    is_name,
    join_address,
    keep_alive,
    listen,
)
from ..rendezvous.rank_values import from_rank_0, values_of_ranks, wait_for_readers
from .extension import extension

__all__: list[str] = []

_FAILED = "!"  # begins what a rank publishes instead of an address
_REMEDY = "set GLOO_SOCKET_IFNAME on that rank to the interface that leads to the other hosts"


def make(store: Any, rank: int, hosts: Sequence[str], address: str, key: str) -> Any:
    """Listen at an address of this rank, exchange the addresses of all ranks through the group's store, and return the
    TcpEndpoint of this rank.

    ``hosts``: the host of each rank.

    Connections of other processes than the ranks are refused by a ``key`` of the group. Without one rank 0 makes a key,
    which every process that can read the store can read. If a rank cannot listen, all ranks raise RuntimeError.
    """

    def listening() -> tuple[Any, str]:
        made = listen(address)
        made.setblocking(False)
        keep_alive(made)
        published = join_address(address, made.getsockname()[1])
        return extension().TcpEndpoint(made.detach()), published

    failure = "cannot listen for the ranks of other hosts"
    endpoint, addresses = exchange(store, rank, len(hosts), "tcp", listening, failure)
    endpoint.addresses = addresses
    endpoint.polls = has_cores(hosts, rank)
    endpoint.key = key or from_rank_0(store, rank, len(hosts), "tcp/key", lambda: secrets.token_hex(32))
    return endpoint


def exchange(
    store: Any, rank: int, size: int, name: str, make_own: Callable[[], tuple[Any, str]], failure: str
) -> tuple[Any, list[str]]:
    """Return what ``make_own`` has made on this rank, and the addresses of all ranks.

    ``make_own`` returns an endpoint and its address, which is published under ``name``. If it fails on a rank, all
    ranks raise RuntimeError with that rank and the ``failure``.
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
            wait_for_readers(store, rank, name, size)
            raise RuntimeError(f"rank {rank}: rank {each} {failure}: {answer[len(_FAILED) :]}")
    return endpoint, found


def common_address(store: Any, rank: int, size: int, met_at: str | None) -> str:
    """Return the address at which this rank listens: IPv4 or IPv6, of which all ranks have an address.

    If all have both, it is of the kind of ``met_at``, at which they have found the store, if that is an address and not
    a name. If a rank has no address, or the ranks have neither in common, all ranks raise RuntimeError.
    """

    def families() -> tuple[list[str], str]:
        found = own_addresses()
        preferred = family_of(found[0] if met_at is None or is_name(met_at) else met_at)
        found = sorted(found, key=lambda each: family_of(each) != preferred)
        return found, " ".join(map(family_of, found))

    own, found = exchange(store, rank, size, "families", families, "has no address for the ranks of other hosts")
    for family in found[0].split():
        if all(family in each for each in found):
            return str(next(each for each in own if family_of(each) == family))
    lacking = {family: [each for each, text in enumerate(found) if family not in text] for family in ("IPv4", "IPv6")}
    raise RuntimeError(
        f"rank {rank}: the ranks have neither IPv4 nor IPv6 in common: ranks {lacking['IPv4']} have no IPv4 address, "
        f"and ranks {lacking['IPv6']} no IPv6 address; give each interface an address of one kind"
    )


def own_address() -> str:
    """Return the first address of :func:`own_addresses`."""
    return own_addresses()[0]


def own_addresses() -> list[str]:
    """Return the addresses at which this rank can listen, at most one of IPv4 and one of IPv6.

    The addresses belong to the interface ``GLOO_SOCKET_IFNAME``; without that variable, to the interface through which
    the kernel sends to ``MASTER_ADDR``; else to the first that is not the loopback interface.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        if found := addresses_of(interface):
            return found
        raise ValueError(f"GLOO_SOCKET_IFNAME={interface}: this host has no such interface with an address")
    outside = [each for each in interface_addresses() if not is_loopback(each)]
    first = _address_towards_master() or (outside or [LOOPBACK])[0]
    same_interface = addresses_of(interface_of(first) or "")
    return [first, *(each for each in same_interface if family_of(each) != family_of(first))]


def _address_towards_master() -> str:
    master = os.environ.get("MASTER_ADDR", "").strip("[]")
    if not master:
        return ""
    try:
        address = address_towards(master, int(os.environ.get("MASTER_PORT", "1")))
    except OSError as error:
        remedy = f"; {_REMEDY}" if error.errno else ""  # without a number the error has its own remedy
        raise ValueError(f"MASTER_ADDR={master}: {error}{remedy}") from error
    # A name may stand for a loopback address on its own host.
    return address if is_loopback(master) or not is_loopback(address) else ""
