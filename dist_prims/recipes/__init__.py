"""Training patterns as short programs: each shows one, and checks itself against the same done by a single process.

A recipe is a module with ``run(console)``, which every rank of the default group calls, whatever its size and backend.
``python -m dist_prims.recipes`` lists them; docs/patterns has a page on each.
"""

__all__ = ["names", "recipe", "summary"]

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def names() -> list[str]:
    """The recipes there are.

    >>> "ring_attention" in names()
    True
    """
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def recipe(name: str) -> Callable[[Any], None]:
    """What every rank calls, with a console.

    >>> recipe("ring_attention").__name__
    'run'
    """
    found: Callable[[Any], None] = _module(name).run
    return found


def summary(name: str) -> str:
    """What it shows: the first line of its docstring.

    >>> summary("ring_attention")[:14]
    'Ring attention'
    """
    return (_module(name).__doc__ or "").split("\n")[0]


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
