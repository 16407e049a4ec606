"""Distributed primitives for PyTorch: a backend, verified collective algorithms, and the parts of a trainer.

Importing this package imports neither torch nor a module of its own: each public name is fetched from its module when
it is first used, and ``dist_prims.schedules`` needs NumPy only.

>>> import dist_prims
>>> dist_prims.__version__.split(".")[:2]
['0', '2']
"""

import importlib
import warnings
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_reduce_": "backend",
    "all_to_all": "collectives",
    "average_gradients": "training",
    "BackendOptions": "backend",
    "barrier": "collectives",
    "broadcast": "collectives",
    "CommError": "errors",
    "CommInterruptedError": "errors",
    "CommTimeoutError": "errors",
    "DataPartitioner": "training",
    "empty": "backend",
    "gather": "collectives",
    "GradientAverager": "training",
    "init": "launch",
    "MismatchError": "errors",
    "partition_dataset": "training",
    "PeerDiedError": "errors",
    "PeerLeftError": "errors",
    "Pipeline": "training",
    "RankFailedError": "launch",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "scan": "collectives",
    "scatter": "collectives",
    "ShardedSampler": "training",
    "spawn": "launch",
}
_OLD_NAMES = {"Options": "BackendOptions"}  # of version 0.1

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        warnings.warn(f"dist_prims.{name} is called {_OLD_NAMES[name]}", DeprecationWarning, stacklevel=2)
        name = _OLD_NAMES[name]
    if name not in _HOME:
        raise AttributeError(f"module 'dist_prims' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"dist_prims.{_HOME[name]}"), name)
    globals()[name] = found  # so that the next use does not come here
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
