"""The TCP endpoint of a rank: the socket at which it listens for ranks of other hosts, and the addresses of all ranks.

``rendezvous/network.py`` finds the addresses of one host. Here the ranks of a group agree on the kind of address that
they use, IPv4 or IPv6, and publish where they listen in the store of the group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..rendezvous.hosts import has_cores
from ..rendezvous.network import family_of, is_name, join_address, keep_alive, listen, own_addresses
from ..rendezvous.rank_values import from_rank_0, make_and_publish
from .extension import extension

__all__: list[str] = []


def make(store: Any, rank: int, hosts: Sequence[str], address: str, key: str) -> Any:
    """Listen on this rank, publish where, and return this rank's TcpEndpoint with the addresses of all ranks.

    Every rank of the group calls this. If a rank cannot listen, all ranks raise RuntimeError.

    Args:
        store: the store that only the ranks of the group use.
        rank: this rank.
        hosts: the host of each rank.
        address: the address of this host at which the rank listens, from :func:`common_address`.
        key: proves that a connection is from a rank of the group; others are refused. If it is empty, rank 0 makes a
            key, which every process that can read the store can read.
    """

    def listen_for_ranks() -> tuple[Any, str]:
        listening = listen(address)
        listening.setblocking(False)
        keep_alive(listening)
        published = join_address(address, listening.getsockname()[1])
        return extension().TcpEndpoint(listening.detach()), published  # the endpoint owns the descriptor

    failure = "cannot listen for the ranks of other hosts"
    endpoint, addresses = make_and_publish(store, rank, len(hosts), "tcp", listen_for_ranks, failure)
    endpoint.addresses = addresses
    endpoint.polls = has_cores(hosts, rank)
    endpoint.key = key or from_rank_0(store, rank, len(hosts), "tcp/key", lambda: secrets.token_hex(32))
    return endpoint


def common_address(store: Any, rank: int, size: int, met_at: str | None) -> str:
    """Return an address of this host at which this rank can listen, of a family that all ranks have: IPv4 or IPv6.

    Every rank of the group calls this. If all ranks have both families, the result has the family of ``met_at``, the
    address of the store at which the ranks have met; None or a name leaves the choice to rank 0. If a rank has no
    address, or the ranks have no family in common, all ranks raise RuntimeError.
    """

    def list_families() -> tuple[list[str], str]:
        addresses = own_addresses()
        preferred = family_of(addresses[0] if met_at is None or is_name(met_at) else met_at)
        addresses.sort(key=lambda address: family_of(address) != preferred)
        return addresses, " ".join(map(family_of, addresses))

    failure = "has no address for the ranks of other hosts"
    own, families = make_and_publish(store, rank, size, "families", list_families, failure)
    for family in families[0].split():  # in the order that rank 0 prefers
        if all(family in of_rank for of_rank in families):
            return str(next(address for address in own if family_of(address) == family))
    lacking = {
        family: [other for other, of_rank in enumerate(families) if family not in of_rank]
        for family in ("IPv4", "IPv6")
    }
    raise RuntimeError(
        f"rank {rank}: the ranks have neither IPv4 nor IPv6 in common: ranks {lacking['IPv4']} have no IPv4 address, "
        f"and ranks {lacking['IPv6']} no IPv6 address; give each interface an address of one kind"
    )
