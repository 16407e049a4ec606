"""Host identity: which ranks share a host.

A hostname alone is not reliable: the containers of one image often share a hostname, and two containers on one machine
may not be able to access each other's memory or loopback interface. A host is therefore identified by hostname, boot id
of the kernel, network namespace and user: processes of two users share no memory. Ranks that agree in all four reach
each other through 127.0.0.1.
"""

import functools
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__: list[str] = []

_DIGITS = 8  # of each of the two hashes in a host's name: of its machine, and of its network namespace and user


def host_id() -> str:
    """Return a name that two processes share if and only if they run on one host for one user.

    ``DIST_PRIMS_HOST_ID`` overrides the name.
    """
    if override := os.environ.get("DIST_PRIMS_HOST_ID"):
        return override
    place = hashlib.sha256(f"{_network()} {os.geteuid()}".encode()).hexdigest()
    return f"{socket.gethostname()}-{_machine()}{place[:_DIGITS]}"


def on_one_machine(host_ids: Sequence[str]) -> bool:
    """Return whether these hosts are containers or network namespaces of one machine, so that they share its cores.

    The result is False if a name comes from ``DIST_PRIMS_HOST_ID``, because its machine is unknown.
    """
    suffixes = [host.rpartition("-")[2] for host in host_ids]
    are_known = all(len(suffix) == 2 * _DIGITS for suffix in suffixes)
    return are_known and len({suffix[:_DIGITS] for suffix in suffixes}) == 1


def has_cores(host_ids: Sequence[str], rank: int) -> bool:
    """Return whether the ranks on the host of this rank do not outnumber its cores.

    ``host_ids`` lists the hosts of all ranks.

    >>> has_cores([host_id(), "another"], rank=0), has_cores([host_id()] * 10_000, rank=0)
    (True, False)
    """
    return host_ids.count(host_ids[rank]) <= len(os.sched_getaffinity(0))


def network_number() -> int:
    """Return a number from 1 to 2**64 - 1 that the processes of one network namespace of one machine have in common."""
    return int(_network()[:16], 16) or 1


def _machine() -> str:
    return hashlib.sha256(boot_id().encode()).hexdigest()[:_DIGITS]


def _network() -> str:
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()


@functools.cache
def boot_id() -> str:
    """The boot id of the kernel, read once, because the process may run out of file descriptors later."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Placement:
    """The hosts of a group's ranks, from the point of view of one rank. Hierarchical algorithms need this information.

    >>> place = Placement.of(2, ["a", "b", "b", "a"])  # rank 2 of four, ranks 0 and 3 on one host, 1 and 2 on another
    >>> place.hosts
    ((0, 3), (1, 2))
    >>> place.size, place.local_rank, place.local_size
    (4, 1, 2)
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host; hosts in the order of their lowest rank

    @classmethod
    def of(cls, rank: int, host_ids: Sequence[str]) -> "Placement":
        ranks: dict[str, list[int]] = {}
        for number, host in enumerate(host_ids):
            ranks.setdefault(host, []).append(number)
        return cls(rank, tuple(map(tuple, ranks.values())))

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, including this rank."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)
