"""Synchronous calls of the backend dist_prims without torch.distributed, which takes 5 µs before it calls a backend.

Each function returns False, without a call, unless its last argument is a group whose backend for CPU tensors is
dist_prims, and its tensors can be passed to that backend unchanged. A rank may use this shortcut where another rank
does not: both paths make the same call of the backend.

The functions are in the adapter (``csrc/torch/backend/direct_calls.cpp``), which the first group of dist_prims loads.
At first this module has functions that return False for all other groups; the first call in a group of dist_prims
replaces them by the functions of the adapter. Callers therefore use them as attributes of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist

from .backend_calls import has_dist_prims_for_cpu

__all__: list[str] = []

_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")


def _until_loaded(name: str) -> Callable[..., bool]:
    def load_and_call(*arguments: Any) -> bool:
        group = arguments[-1]
        if not (isinstance(group, dist.ProcessGroup) and has_dist_prims_for_cpu(group)):
            return False
        adapter = import_module("dist_prims._backend")
        globals().update({each: getattr(adapter, each) for each in _NAMES})
        return bool(globals()[name](*arguments))

    return load_and_call


all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier = map(_until_loaded, _NAMES)
