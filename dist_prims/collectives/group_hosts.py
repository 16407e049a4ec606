"""The hosts of a group's ranks, by which a hierarchical algorithm that a call names groups them.

The backend dist_prims knows the hosts of its groups. The ranks of other groups exchange their hosts once, in the first
call that needs them.
"""

from __future__ import annotations

import hashlib
import weakref

import torch
import torch.distributed as dist

from ..rendezvous.hosts import host_id
from ..schedules.host_order import HostOrder
from ..torch_compat import backend_of, device_types
from .channel import Channel, Transfer

__all__: list[str] = []

_CPU = torch.device("cpu")
_of_names: weakref.WeakValueDictionary[str, HostOrder] = weakref.WeakValueDictionary()  # of groups of dist_prims
_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, HostOrder] = weakref.WeakKeyDictionary()  # of other backends


def remember_hosts(name: str, order: HostOrder) -> None:
    """Remember the hosts of the backend's group of this name, for as long as the caller keeps ``order``."""
    _of_names[name] = order


def known_hosts(group: dist.ProcessGroup) -> HostOrder | None:
    """Return the hosts of a group; None if its ranks have not exchanged them."""
    if _CPU.type in device_types(group):
        backend = backend_of(group, _CPU)
        if hasattr(backend, "spans_hosts"):
            ranks = tuple(range(group.size()))
            return _of_names.get(backend.options.group_name) if backend.spans_hosts else HostOrder(ranks, (len(ranks),))
    return _of_groups.get(group)


def exchange_hosts(channel: Channel, group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange the hosts of all ranks; every rank makes this call. After it :func:`known_hosts` returns them.

    Each message doubles the number of hosts that a rank knows, so there are log2 n rounds. A rank knows its own host
    first, after one round the host of the next rank too, after two rounds the hosts of four ranks, and so on.
    """
    rank, size = group.rank(), group.size()
    number = int.from_bytes(hashlib.sha256(host_id().encode()).digest()[:7], "little")
    known = torch.tensor([number], dtype=torch.int64, device=device)  # of the ranks from this one on
    while (distance := len(known)) < size:
        sent = known[: size - distance].clone()
        received = sent.clone()
        outgoing, incoming = channel.start(
            [Transfer((rank - distance) % size, sent)], [Transfer((rank + distance) % size, received)]
        )
        channel.wait([*incoming, *outgoing])
        known = torch.cat([known, received])
    _of_groups[group] = HostOrder.of(known.roll(rank).tolist())
