"""The ranks that serve the registers by which the survivors of a group on several hosts agree, and their addresses.

A majority of these ranks decides (:mod:`dist_prims.repair.quorum`), so the group can be repaired after the death of any
rank where there are at least three, and of any host where there are at least three hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ..rendezvous.register_server import GroupRegisters
from ..rendezvous.served import listening_address, serve_registers
from .tcp_endpoint import exchange

__all__: list[str] = []

_MOST = 5  # two of them may be lost


def quorum_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the ranks that serve registers: at first the first rank of each host, then the second ones.

    >>> quorum_ranks(["a", "a", "b", "b"])
    [0, 2, 1]
    >>> quorum_ranks(["a", "b"])
    [0]

    With three hosts or more, each host has at most two of them, so the others have a majority.

    >>> quorum_ranks(["a", "a", "a", "b", "c"])
    [0, 3, 4]
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    most_of_host = _MOST // 2 if len(by_host) > 2 else _MOST
    in_order = [rank for ranks in zip_longest(*by_host.values()) for rank in ranks if rank is not None]
    count = min(_MOST, sum(min(len(ranks), most_of_host) for ranks in by_host.values()))
    return in_order[: count - (count % 2 == 0)]  # an even number tolerates no more losses than one less


def publish(
    store: Any, rank: int, hosts: Sequence[str], own_address: str, group: str, key: bytes
) -> tuple[list[str], GroupRegisters | None]:
    """Return the address of each rank, at which it listens while its process runs, and the registers of this rank.

    The ranks of :func:`quorum_ranks` serve registers at their address. If a rank cannot listen, all ranks raise
    RuntimeError.
    """

    def listen() -> tuple[GroupRegisters | None, str]:
        if rank not in quorum_ranks(hosts):
            return None, listening_address(own_address)
        address, registers = serve_registers(own_address, group, key)
        return registers, address

    registers, addresses = exchange(store, rank, len(hosts), "repair", listen, "cannot listen for repairs")
    return addresses, registers
