"""Groups on one host or several, and schedules that are pinned in them after they have been made."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ranks import backend_of

import dist_prims
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.backend.options import PINNABLE
from dist_prims.backend.pins import pin_schedules
from dist_prims.rendezvous.hosts import host_id
from dist_prims.schedules import Schedule


def pin(**algorithms_of: Any) -> None:
    """Pin schedules in the default group, as at its creation."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, host_id())
    multi_host = MultiHostSchedules(hosts, rank, ASSUMED, Schedule.verify) if len(set(hosts)) > 1 else None
    for collective in PINNABLE:
        backend_of().pin(collective, "", None)
    pin_schedules(backend_of(), rank, size, dist_prims.BackendOptions(**algorithms_of), multi_host, Schedule.verify)
