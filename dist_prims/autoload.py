"""Makes ``init_process_group("dist_prims")`` known. ``import torch`` calls :func:`register` by the entry point
``torch.backends``, so that a script which has never heard of us can be told ``--backend dist_prims``; it must cost
nothing, and the extension is loaded when a group is made."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl, urlsplit

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
        _offer_to_meet_by_the_launcher()


def _make(options: Any, given: Any) -> Any:
    from .backend.create import make

    return make(options, given)


def _offer_to_meet_by_the_launcher() -> None:
    """Ranks that mpirun, srun or another launcher has started need no address: ``init_process_group`` without
    ``init_method`` finds the others as ``dist_prims.init`` does, and with ``init_method="mpi://"`` over MPI alone.

    Where RANK or WORLD_SIZE is set, or all that torch would read, torch reads it as it always did.
    """
    from .torch_compat import rendezvous_handlers

    handlers = rendezvous_handlers()
    by_variables = handlers["env"]

    def env(url: str, **how: Any) -> Any:
        if _told(url):
            return by_variables(url, **how)
        from .launch.detect import detect
        from .launch.launcher_rendezvous import handler

        return by_variables(url, **how) if detect().name == "python" else handler(url, **how)

    def over_mpi(url: str, **how: Any) -> Any:
        from .launch.launcher_rendezvous import handler

        return handler(url, **how)

    handlers["env"] = env
    handlers.setdefault("mpi", over_mpi)


def _told(url: str) -> bool:
    """Whether rank or size are in the environment, or the address is and the caller gives both."""
    query = dict(parse_qsl(urlsplit(url).query))
    given = all(query.get(name, "-1") != "-1" for name in ("rank", "world_size"))
    address = all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ or (given and address)
