"""Training patterns as short programs. Each shows one pattern and compares its result with that of a single process.

A recipe is a module with ``run(console)``, which every rank of the default group calls, for any size and backend.
``python -m dist_prims.recipes`` lists the recipes; docs/patterns has a page on each.
"""

__all__ = ["names", "recipe", "summary"]

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def names() -> list[str]:
    """The names of all recipes.

    >>> "ring_attention" in names()
    True
    """
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def recipe(name: str) -> Callable[[Any], None]:
    """The function of a recipe, which every rank calls with a console.

    >>> recipe("ring_attention").__name__
    'run'
    """
    found: Callable[[Any], None] = _module(name).run
    return found


def summary(name: str) -> str:
    """The summary of a recipe: the first line of its docstring.

    >>> summary("ring_attention")[:14]
    'Ring attention'
    """
    return (_module(name).__doc__ or "").split("\n")[0]


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
