"""Makes ``init_process_group("dist_prims")`` known. ``import torch`` calls :func:`register` by the entry point
``torch.backends``, so that a script which has never heard of us can be told ``--backend dist_prims``; it must cost
nothing, and the extension is loaded when a group is made."""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "dist_prims"


def register() -> None:
    """Make the name known to ``torch.distributed``; again does nothing.

    >>> register()
    >>> import torch.distributed as dist
    >>> NAME in dist.Backend.backend_list
    True
    """
    import torch.distributed as dist  # under way already when torch calls us

    devices = ["cpu", "cuda"] if dist.is_available() and dist.is_nccl_available() else ["cpu"]
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=devices)


def _make(options: Any, given: Any) -> Any:
    from .backend import make

    return make(options, given)
