"""Groups of this backend for frameworks that keep their groups themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..backend.create import make_group
from ..backend.origin import GroupRequest, Origin, Repairs, Trait
from ..repair import reconfigure_handle, reconfigured_backend, shrink_backend
from ..torch_compat import unlisted_group

__all__: list[str] = []


def make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> Any:
    """Make the backend object of a new group. Each of its ranks calls this with the same store and the same name."""
    request = GroupRequest(
        store=store,
        name=name,
        rank=rank,
        size=size,
        timeout=timeout,
        ranks=(),
        given=None,
        origin=Origin.LAUNCHED,
        repairs=Repairs(shrink_backend, reconfigure_handle, reconfigured_backend),
        inherited=Trait.NO_GLOBAL_RANKS,
    )
    return make_group(request)


def make_unlisted_group(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Make a group that ``torch.distributed`` does not list. The parameters: see :func:`make_backend`."""
    return unlisted_group(make_backend(store, rank, size, timeout, name), store)
