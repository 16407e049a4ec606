"""The command ``python -m dist_prims``: one module for each subcommand.

Only ``doctor`` and ``tune`` import torch; the other subcommands start without that delay.
"""

from .main import main as main

__all__: list[str] = []
