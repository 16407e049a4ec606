"""The command ``python -m dist_prims``, one module a subcommand.

Only ``doctor`` and ``tune`` import torch; the others answer at once.
"""

from .main import main

__all__ = ["main"]
