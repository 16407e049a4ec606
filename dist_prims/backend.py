"""The backend "dist_prims" of ``torch.distributed``: one group of it, on one of its ranks.

Ranks of one host reduce in shared memory; what is not ours (send and recv, sparse tensors, groups that span hosts) is
gloo's, behind the same name. Ranks share a host if they say the same of it (see :mod:`.launch.hosts`) and then really
attach: the memory comes over a socket that is only seen on one host.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .autoload import NAME
from .launch.hosts import host_id

__all__ = ["make"]

_SLOT_BYTES = 1 << 20  # of shared memory; a rank has two


def make(options: Any) -> Any:
    """The backend for a group; ``options`` are torch's: store, rank, size, timeout."""
    extension = _extension()
    rank, size = options.group_rank, options.group_size
    timeout = timedelta(seconds=options.timeout.total_seconds())
    store = dist.PrefixStore(NAME, options.store)
    store.set_timeout(timeout)
    engine = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    slot_bytes = int(os.environ.get("DIST_PRIMS_SLOT_BYTES", _SLOT_BYTES))
    return extension.PrimsBackend(store, rank, size, timeout, engine, _one_host(store, rank, size), slot_bytes)


def _extension() -> Any:
    remedy = "build it again: pip install --no-build-isolation --force-reinstall --no-deps <the source of dist_prims>"
    try:
        from . import _backend
    except ImportError as error:
        raise ImportError(
            f"the extension of dist_prims does not load with torch {torch.__version__}: {error}. It is not built, or "
            f"for another torch; {remedy}"
        ) from error
    if torch.__version__ != _backend.built_for:
        raise ImportError(
            f"the extension of dist_prims was built for torch {_backend.built_for}, and this is {torch.__version__}; "
            f"{remedy}"
        )
    return _backend


def _one_host(store: Any, rank: int, size: int) -> bool:
    store.set(f"host/{rank}", host_id())
    return len({store.get(f"host/{peer}") for peer in range(size)}) == 1
