"""Which ranks share a host, by evidence.

A hostname alone misleads: the containers of one image often share it, and two of them on one machine may not see each
other's memory or loopback. So a host is a hostname, a boot of a kernel, and a network namespace: ranks that agree in
all three can reach each other through 127.0.0.1.
"""

import functools
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Placement", "host_id"]


def host_id() -> str:
    """A name that two processes share exactly if they run on one host; ``DIST_PRIMS_HOST_ID`` overrides it.

    >>> host_id() == host_id()
    True
    """
    if override := os.environ.get("DIST_PRIMS_HOST_ID"):
        return override
    boot = _boot()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{socket.gethostname()}-{hashlib.sha256(f'{boot} {namespace}'.encode()).hexdigest()[:12]}"


@functools.cache
def _boot() -> str:
    """Read once: later this process may have no descriptor left."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Placement:
    """Where the ranks of the group run, as seen by one of them: what a hierarchical algorithm needs to know.

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
        """The ranks of this host, ours among them."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)
