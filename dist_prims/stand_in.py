"""``DIST_PRIMS_AS=gloo``: a program that names gloo, or no backend, runs on this backend without a change.

Functions of ``torch.distributed`` are replaced while torch is imported. Those that take the name of a backend read
"dist_prims" where the program says "gloo", and those that return it answer "gloo". Groups that name another backend,
and the class ``ProcessGroupGloo``, stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .backend_name import NAME

__all__: list[str] = []

VARIABLE = "DIST_PRIMS_AS"
_GLOO = "gloo"

_is_installed = False


def install() -> None:
    """Replace the functions if the variable asks for it."""
    global _is_installed
    name = os.environ.get(VARIABLE, "")
    if not name or _is_installed:
        return
    if name != _GLOO:
        from ._output import print_notice

        print_notice(f"{VARIABLE}={name} has no effect; it can be {_GLOO!r}")
        return
    from .torch_compat import replace_function, set_default_backend

    _is_installed = True
    set_default_backend("cpu", NAME)
    for name in ("init_process_group", "new_group"):
        replace_function(name, _translate_argument)
    for name in ("get_backend", "get_backend_config"):
        replace_function(name, _translate_result)


def own_name(backend: str | None) -> str:
    """The backend that a name stands for.

    >>> own_name("cpu:gloo,cuda:nccl")
    'cpu:gloo,cuda:nccl'
    """
    text = backend or ""
    return re.sub(rf"\b{_GLOO}\b", NAME, text, flags=re.IGNORECASE) if _is_installed else text


def warn_of_ignite() -> None:
    """Warn that Ignite averages no gradients on a group of this backend: it does so for nccl, gloo and mpi only."""
    if "ignite.distributed" in sys.modules and not _is_installed:
        warnings.warn(
            f"Ignite does not know the backend {NAME!r}: its auto_model() returns the model without "
            f"DistributedDataParallel, and the ranks train apart. Set {VARIABLE}={_GLOO}, and name {_GLOO!r}",
            stacklevel=2,
        )


def _translate_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def translated(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        if isinstance(call.arguments.get("backend"), str):
            call.arguments["backend"] = own_name(call.arguments["backend"])
        return function(*call.args, **call.kwargs)

    return translated


def _translate_result(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def translated(*arguments: Any, **options: Any) -> Any:
        name = function(*arguments, **options)
        return type(name)(name.replace(NAME, _GLOO))

    return translated
