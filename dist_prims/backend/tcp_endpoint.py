"""The TCP endpoint of a rank: the socket at which it listens for ranks of other hosts, and the addresses of all ranks.

``rendezvous/network.py`` finds the addresses of one host. In the handshake of a group each rank tells its addresses to
rank 0, which chooses the family of address that all ranks use, IPv4 or IPv6. Then each rank publishes where it listens.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..rendezvous.hosts import has_cores
from ..rendezvous.network import family_of, is_name, join_address, keep_alive, listen, own_addresses
from ..rendezvous.rank_values import make_and_publish
from .extension import extension

__all__: list[str] = []


def make(
    store: Any, rank: int, hosts: Sequence[str], address: str, listen_for_repairs: Callable[[], str], key: str
) -> tuple[Any, list[str]]:
    """Listen on this rank, and publish where.

    Return this rank's TcpEndpoint with the addresses of all ranks, and where each rank listens for repairs. Every rank
    of the group calls this. If a rank cannot listen, all ranks raise RuntimeError.

    Args:
        store: the store that only the ranks of the group use.
        rank: this rank.
        hosts: the host of each rank.
        address: the address of this host at which the rank listens, from :func:`address_of_family`.
        listen_for_repairs: returns where this rank listens for repairs, as ``address:port``.
        key: proves that a connection is from a rank of the group; others are refused.
    """

    def listen_for_ranks() -> tuple[Any, str]:
        listening = listen(address)
        listening.setblocking(False)
        keep_alive(listening)
        published = join_address(address, listening.getsockname()[1])
        endpoint = extension().TcpEndpoint(listening.detach())  # the endpoint owns the descriptor
        return endpoint, f"{published} {listen_for_repairs()}"

    failure = "cannot listen for the ranks of other hosts"
    endpoint, texts = make_and_publish(store, rank, len(hosts), "tcp", listen_for_ranks, failure)
    endpoint.addresses, for_repairs = map(list, zip(*map(str.split, texts), strict=True))
    endpoint.polls = has_cores(hosts, rank)
    endpoint.key = key
    return endpoint, for_repairs


def describe_addresses() -> str:
    """Return the addresses at which this rank can listen, or why it has none, for :func:`choose_family`."""
    try:
        variables = (os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"))
        return json.dumps({"addresses": _own_addresses(*variables)})
    except Exception as error:  # every rank must come to the handshake, in which all learn of the error
        return json.dumps({"error": str(error)})


@functools.cache
def _own_addresses(*_variables: str | None) -> list[str]:
    """The addresses of this process, which depend on these variables. They are looked up once.

    A group on one host does not need them, and the look-up of a name may wait for a server that does not answer.
    """
    return own_addresses()


def choose_family(descriptions: Sequence[str], met_at: str | None) -> tuple[str, str]:
    """Return the family of address that all ranks have, IPv4 or IPv6, or an empty text and why there is none.

    If all ranks have both, it is the family of ``met_at``, the address of the store at which the ranks have met; None
    or a name leaves the choice to rank 0. ``descriptions``: of the addresses of each rank.
    """
    of_ranks: list[list[str]] = []
    for rank, description in enumerate(descriptions):
        facts = json.loads(description)
        if "error" in facts:
            return "", f"rank {rank} has no address for the ranks of other hosts: {facts['error']}"
        of_ranks.append([family_of(address) for address in facts["addresses"]])
    preferred = of_ranks[0][0] if met_at is None or is_name(met_at) else family_of(met_at)
    lacking = {
        family: [rank for rank, families in enumerate(of_ranks) if family not in families]
        for family in ("IPv4", "IPv6")
    }
    for family in sorted(lacking, key=lambda family: family != preferred):
        if not lacking[family]:
            return family, ""
    return "", (
        f"the ranks have neither IPv4 nor IPv6 in common: ranks {lacking['IPv4']} have no IPv4 address, and ranks "
        f"{lacking['IPv6']} no IPv6 address; give each interface an address of one kind"
    )


def address_of_family(description: str, family: str) -> str:
    """Return the address of this family in the description of this rank's addresses.

    >>> address_of_family('{"addresses": ["10.0.0.1", "fd00::1"]}', "IPv6")
    'fd00::1'
    """
    addresses: list[str] = json.loads(description)["addresses"]
    return next(address for address in addresses if family_of(address) == family)
