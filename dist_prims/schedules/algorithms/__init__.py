"""The algorithms: one file and one cost card each.

Importing the package registers all of them, in an order that does not depend on which module a process imports first:
the order decides between equal prices, and all ranks must choose the same algorithm.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
