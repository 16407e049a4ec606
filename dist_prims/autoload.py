"""Registration of the backend "dist_prims" with ``torch.distributed``.

``import torch`` calls :func:`register` through the entry point ``torch.backends``, so that a script that does not
import dist_prims supports ``--backend dist_prims``. The module must therefore import quickly: it loads the extension
when a group is created.

torch 2.15 also calls :func:`register` through the entry point ``torch.distributed.backends``, when the name is first
used. That is too late for the rendezvous without an address, which ``init_process_group`` does before it looks at the
name. So both entry points exist, and the second call does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from . import stand_in
from .backend_name import NAME

__all__: list[str] = []


def register() -> None:
    """Register the backend and the rendezvous handlers. Further calls have no effect."""
    import torch.distributed as dist  # in sys.modules already when torch calls this function

    devices = ["cpu", "cuda"] if dist.is_available() and dist.is_nccl_available() else ["cpu"]
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        _register_rendezvous_handlers()
        stand_in.install()
        atexit.register(_end_python_use)  # Python calls it late: in the reverse order of registration


def _end_python_use() -> None:
    """Let no thread of a group wait for the GIL while the interpreter shuts down, which would abort the process."""
    if adapter := sys.modules.get("dist_prims._backend"):
        adapter.end_python_use()


def prepare(backend: str | None) -> str:
    """Return the name of the backend, by default the default backend; compile its adapter if there is none yet.

    Call this before ranks are started, because their start has a deadline.
    """
    backend = backend or default_backend()
    if NAME in stand_in.own_name(backend):
        from .backend.torch_adapter import ensure

        ensure()
    return backend


def default_backend(announces: bool = True) -> str:
    """The backend of a program that names none: dist_prims, with NCCL for CUDA tensors if CUDA is available.

    Without the compiled adapter it is gloo instead of dist_prims; ``announces`` prints the reason.
    """
    import torch

    from .backend.torch_adapter import load

    cpu = NAME
    try:
        load()
    except ImportError as error:
        cpu = "gloo"
        if announces:
            from ._output import print_notice

            reason = str(error).partition("\n")[0]
            print_notice(f"the backend is gloo, because {NAME} is not available: {reason}")
    # device_count() asks the driver without initialising CUDA, after which a process could not fork ranks that use it.
    return f"cpu:{cpu},cuda:nccl" if torch.cuda.device_count() else cpu


def _create(description: Any, options: Any) -> Any:
    """Create the backend of a group for torch. See ``backend/create.py``, also for the arguments."""
    with _without_collections():
        from .backend.create import make_for_torch
        from .backend.origin import Repairs

        # Now, since an import needs descriptors, which a repair may lack.
        from .repair import reconfigure_handle, reconfigured_backend, shrink_backend

    stand_in.warn_of_ignite()
    return make_for_torch(description, options, Repairs(shrink_backend, reconfigure_handle, reconfigured_backend))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, whose many objects would start collections.

    A full collection visits all objects of torch, and would take as long as the imports.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _register_rendezvous_handlers() -> None:
    """Let ``init_process_group`` find the ranks of a launcher without an address.

    Without ``init_method`` it uses the rendezvous of ``dist_prims.init``, with ``init_method="mpi://"`` MPI only. If
    RANK or WORLD_SIZE is set, or the caller provides rank, size and address, torch's own handler runs.
    """
    from .torch_compat import rendezvous_handlers

    handlers = rendezvous_handlers()
    handler_of_torch = handlers["env"]

    def env(url: str, **options: Any) -> Any:
        if _is_complete(url):
            return handler_of_torch(url, **options)
        from .rendezvous.detect_launcher import detect
        from .rendezvous.launcher_rendezvous import torch_handler

        return handler_of_torch(url, **options) if detect().name == "python" else torch_handler(url, **options)

    def over_mpi(url: str, **options: Any) -> Any:
        from .rendezvous.launcher_rendezvous import torch_handler

        return torch_handler(url, **options)

    handlers["env"] = env
    handlers.setdefault("mpi", over_mpi)


def _is_complete(url: str) -> bool:
    """Whether torch's own handler has what it needs.

    That is rank or size in the environment, or the address in the environment and both numbers in the URL.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    has_numbers = all(query.get(name, "-1") != "-1" for name in ("rank", "world_size"))
    has_address = all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ or (has_numbers and has_address)
