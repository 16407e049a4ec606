"""Private and version-dependent API of torch, each behind a documented function.

The rest of the package calls these functions and no private API of torch, so that a new release of torch needs changes
in this module only (``tests/project/test_style.py`` lists the files that are still exempt). The module imports nothing
of dist_prims, and supports torch 2.11 and later.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []

# The new names of all_gather_into_tensor and reduce_scatter_tensor, which torch 2.13 has renamed.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# default_group() returns the default group, and raises ValueError if there is none. An alias, because the shortest path
# of all_reduce_() calls it: a function around it would add 5 % to 1 µs.
default_group: Callable[[], dist.ProcessGroup] = dist.distributed_c10d._get_default_group


def group_named(name: str) -> dist.ProcessGroup:
    """The group with this ``group_name``.

    >>> group_named(default_group().group_name) is default_group()
    True
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch 2.11 takes a str


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The device types that a group has a backend for, in torch's order; empty for a group without devices.

    >>> "cpu" in device_types(default_group())
    True
    """
    return [device.type for device in group._device_types]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend object of a group for a device; RuntimeError if the group has none.

    >>> backend_of(default_group(), torch.device("cpu")).rank()
    0
    """
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives on a device; torch's default where the backend does not expose one.

    >>> timeout_of(default_group(), torch.device("cpu")) > timedelta(0)
    True
    """
    timeout = getattr(getattr(backend_of(group, device), "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the ranks of a group share; None if torch keeps none for it."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    return found[1] if found else None


def nccl_options(timeout: timedelta) -> Any:
    """Options for a ProcessGroupNCCL with this timeout."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def premul_sum(factor: float | torch.Tensor) -> Any:
    """The reduction PREMUL_SUM, which multiplies each rank's data by ``factor`` and adds the products."""
    return dist._make_nccl_premul_sum(factor)


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM: a number or a tensor. Before torch 2.13 only its pickled form contains the factor.

    >>> premul_factor(premul_sum(2.0))
    2.0
    """
    return op.factor if hasattr(dist.ReduceOp, "factor") else op.__getstate__()[1]


def rendezvous_handlers() -> dict[str, Callable[..., Any]]:
    """The rendezvous handlers of ``init_process_group`` by URL scheme. A change of this dictionary takes effect."""
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Any]] = module._rendezvous_handlers
    return handlers
