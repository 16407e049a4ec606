"""The ranks that serve the registers by which the survivors of a group on several hosts agree, and their addresses.

A majority of these ranks decides (:mod:`dist_prims.repair.quorum`), so the group can be repaired after the death of any
rank where there are at least three, and of any host where there are at least three hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from ..rendezvous.register_server import GroupRegisters
from ..rendezvous.served import listening_address, serve_registers

__all__: list[str] = []

_MOST = 5  # ranks that serve registers; two of them may be lost


def quorum_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the ranks that serve registers: the first rank of each host, then the second rank of each host, and so on.

    >>> quorum_ranks(["a", "a", "b", "b"])
    [0, 2, 1]
    >>> quorum_ranks(["a", "b"])
    [0]

    With three hosts or more, at most two of the ranks are on one host: the others have a majority without that host.

    >>> quorum_ranks(["a", "a", "a", "b", "c"])
    [0, 3, 4]
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    most_of_host = _MOST // 2 if len(by_host) > 2 else _MOST
    in_order = [rank for ranks in zip_longest(*by_host.values()) for rank in ranks if rank is not None]
    count = min(_MOST, sum(min(len(ranks), most_of_host) for ranks in by_host.values()))
    return in_order[: count - (count % 2 == 0)]  # an odd number: 4 ranks tolerate one loss, as 3 do


def listen_for_repairs(
    rank: int, hosts: Sequence[str], own_address: str, group: str, key: bytes
) -> tuple[str, GroupRegisters | None]:
    """Listen for repairs on this rank; return ``address:port``, and the registers of this rank.

    A process listens until it ends, so a refused connection shows that it has ended. The ranks of :func:`quorum_ranks`
    also serve registers there; the others have none, and get None.

    Args:
        rank: this rank.
        hosts: the host of each rank.
        own_address: the address of this host at which to listen.
        group: the name by which clients ask for the registers of this group.
        key: authenticates the clients; empty if the group has no secret.
    """
    if rank in quorum_ranks(hosts):
        return serve_registers(own_address, group, key)
    return listening_address(own_address), None
