"""What is known about a group on this rank: for Python (MadeGroup), and for the C++ backend (GroupSetup)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..backend_name import NAME
from . import link_costs
from .multi_host import MultiHostSchedules
from .origin import GroupRequest, Origin, Trait
from .tuning import CALIBRATION

__all__: list[str] = []


@dataclass(eq=False)
class MadeGroup:
    """What is known about a group of this process after it has been made."""

    request: GroupRequest  # by which it was made
    hosts: list[str]  # by rank
    attempt: str  # the random name of the attempt that has made it, the same on all ranks
    key: bytes = field(repr=False)  # of the registers by which survivors agree; empty without a secret
    addresses: list[str] = field(default_factory=list)  # by rank, where each listens for repairs; empty on one host
    registers: Any = None  # the GroupRegisters that this rank serves, if it serves any
    failed_grows: int = 0  # calls of grow() that have failed
    undecided_grow: str = ""  # the agreement of a call of grow() whose outcome this rank does not know


@dataclass(eq=False)
class GroupSetup:
    """The argument ``setup`` of PrimsBackend; ``csrc/torch/backend/bindings.cpp`` reads the attributes by their names.

    C++ calls the methods, with the GIL, when a group is made from this one, and when the group needs gloo, a schedule,
    or a description for traces. The backend keeps this object alive, and with it ``made``.
    """

    made: MadeGroup
    store: Any  # that only the ranks of this group use
    make: Callable[[GroupRequest], Any]  # makes the backend of another group
    multi_host: MultiHostSchedules | None  # None on one host, where a group has no schedules
    nccl: Any  # the backend for CUDA tensors, or None
    slot_bytes: int  # the size of a slot in shared memory
    one_shot_bytes: int  # the largest all_reduce in which each rank adds the data of all
    network: int  # the network namespace of this process, if the link between hosts is to be measured; else 0
    dump: str  # the file for the flight record; empty for none
    # Between hosts: either MPI, or TCP, of which UCX may carry the data.
    mpi: Any = None
    tcp: Any = None
    ucx: Any = None

    @property
    def name(self) -> str:
        return self.made.request.name

    @property
    def ranks(self) -> list[int]:
        return self.made.request.all_ranks

    @property
    def host_names(self) -> list[str]:
        """The host ids without their hash suffixes, if the names are unique without them."""
        hosts = self.made.hosts
        short = [host.rpartition("-")[0] or host for host in hosts]
        return short if len(set(short)) == len(set(hosts)) else hosts

    @property
    def choose(self) -> Any:
        """The function that chooses a schedule, see :meth:`.MultiHostSchedules.choose`; None on one host."""
        return self.multi_host.choose if self.multi_host else None

    def make_gloo(self) -> Any:
        """Make a gloo group of the same ranks, for calls that the backend leaves to gloo."""
        request = self.made.request
        store = dist.PrefixStore("gloo", self.store)
        return dist.ProcessGroupGloo(store, request.rank, request.size, request.timeout)

    def make_child(self, store: Any, name: str, rank: int, size: int, timeout: timedelta, ranks: Sequence[int]) -> Any:
        """Make a group that is split from this one, its parent, or merged from it and others. It inherits the options.

        Args:
            store: the store in which the new ranks meet.
            name: the name of the new group on this rank.
            rank, size: this rank in the new group, and the number of its ranks.
            timeout: of its collectives.
            ranks: its ranks as ranks of the parent; empty for a merged group.
        """
        parent = self.made.request
        if Trait.OWN_STORE in parent.traits and ranks:
            store = dist.PrefixStore(f"{name}/", parent.store)
        request = GroupRequest(
            store=store.clone(),  # a timeout is set, and the store may be the parent's
            name=name,
            rank=rank,
            size=size,
            timeout=timeout,
            ranks=[parent.all_ranks[rank_in_parent] for rank_in_parent in ranks],
            given=parent.given,
            origin=Origin.SPLIT if ranks else Origin.MERGED,
            repairs=parent.repairs,
            inherited=parent.heritage,
        )
        return self.make(request)

    def shrink(self, backend: Any, excluded: Sequence[int]) -> Any:
        """Make the group of the ranks that are not excluded, for ``torch.distributed.shrink_group``."""
        return self.made.request.repairs.shrink(backend, excluded)

    def make_handle(self, rank: int) -> str:
        """Make the text that names this process to other members of a group, for torch's ``reconfigure``."""
        return self.made.request.repairs.make_handle(rank)

    def reconfigure(
        self, backend: Any, uuid: int, own: str, handles: Sequence[str], is_ordered: bool, timeout: timedelta
    ) -> Any:
        """Make the group of other members, see :func:`dist_prims.repair.reconfigure.reconfigured_backend`."""
        return self.made.request.repairs.reconfigure(backend, uuid, own, handles, is_ordered, timeout)

    def describe(self, link: tuple[float, float] | None) -> str:
        """The description of the group in traces, as JSON.

        ``link``: seconds for a message and for a byte between the hosts, if C++ has measured them.
        """
        made = self.made
        if self.multi_host and link:
            self.multi_host.use(link_costs.measured(made.hosts, *link))
        levels = self.multi_host.costs if self.multi_host else CALIBRATION.read(warn=False) or link_costs.ASSUMED
        group = {"name": self.name, "counter": NAME, "token": made.attempt, "rank": made.request.rank}
        costs = {"levels": levels, "one_shot_bytes": self.one_shot_bytes}
        return json.dumps({**group, "ranks": self.ranks, "hosts": made.hosts, **costs})
