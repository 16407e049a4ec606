"""Distributed primitives for PyTorch: collectives as plans that prove, price, draw and run themselves.

Importing this package costs nothing: each public name is fetched from its module when it is first used, so that the
plans (``dist_prims.schedules``, NumPy only) never wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_reduce_": "backend",
    "all_to_all": "collectives",
    "average_gradients": "training",
    "barrier": "collectives",
    "broadcast": "collectives",
    "DataPartitioner": "training",
    "empty": "backend",
    "gather": "collectives",
    "GradientAverager": "training",
    "init": "launch",
    "Options": "backend",
    "partition_dataset": "training",
    "Pipeline": "training",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "scan": "collectives",
    "scatter": "collectives",
    "ShardedSampler": "training",
    "spawn": "launch",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dist_prims' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dist_prims.{_HOME[name]}"), name)
    globals()[name] = found  # so that the next use does not come here
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
