"""Makes ``init_process_group("dist_prims")`` known. ``import torch`` calls :func:`register` by the entry point
``torch.backends``, so that a script which has never heard of us can be told ``--backend dist_prims``; it must cost
nothing, and the extension is loaded when a group is made."""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["NAME", "register"]

NAME = "dist_prims"
_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        _offer_to_meet_over_mpi()


def _make(options: Any, given: Any) -> Any:
    from .backend import make

    return make(options, given)


def _offer_to_meet_over_mpi() -> None:
    """Ranks that mpirun has started need to be told nothing: ``init_process_group`` with ``init_method="mpi://"``, or
    without one where the variables that it would read are not set. Where one of them is, all is as it was."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    by_variables = handlers["env"]

    def env(url: str, **how: Any) -> Any:
        if any(name in os.environ for name in _TOLD):
            return by_variables(url, **how)
        from .launch import mpi

        return mpi.rendezvous(url, **how) if mpi.is_launcher() else by_variables(url, **how)

    def over_mpi(url: str, **how: Any) -> Any:
        from .launch import mpi

        return mpi.rendezvous(url, **how)

    handlers["env"] = env
    handlers.setdefault("mpi", over_mpi)
