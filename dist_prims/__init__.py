"""Distributed primitives for PyTorch: a backend, verified collective algorithms, and the parts of a trainer.

Importing this package imports neither torch nor a module of its own: each public name is fetched from its module when
it is first used, and ``dist_prims.schedules`` needs NumPy only.

>>> import dist_prims
>>> dist_prims.__version__.split(".")[:2]
['0', '2']
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _HOME, for editors and type checkers
    from .backend import BackendOptions as BackendOptions
    from .backend import empty as empty
    from .collectives import all_gather as all_gather
    from .collectives import all_reduce as all_reduce
    from .collectives import all_to_all as all_to_all
    from .collectives import barrier as barrier
    from .collectives import broadcast as broadcast
    from .collectives import gather as gather
    from .collectives import reduce as reduce
    from .collectives import reduce_scatter as reduce_scatter
    from .collectives import scan as scan
    from .collectives import scatter as scatter
    from .errors import CommError as CommError
    from .errors import CommInterruptedError as CommInterruptedError
    from .errors import CommTimeoutError as CommTimeoutError
    from .errors import LeftOutError as LeftOutError
    from .errors import MismatchError as MismatchError
    from .errors import PeerDiedError as PeerDiedError
    from .errors import PeerLeftError as PeerLeftError
    from .launch import RankFailedError as RankFailedError
    from .launch import init as init
    from .launch.spawn import spawn as spawn
    from .repair import grow as grow
    from .repair import join as join
    from .repair import shrink as shrink
    from .tracing import trace as trace
    from .training import DataPartitioner as DataPartitioner
    from .training import GradientAverager as GradientAverager
    from .training import Pipeline as Pipeline
    from .training import ShardedSampler as ShardedSampler
    from .training import average_gradients as average_gradients
    from .training import partition_dataset as partition_dataset

__version__ = "0.2.0"

_NAMES = {  # the public names of each module
    "backend": "BackendOptions empty",
    "collectives": "all_gather all_reduce all_to_all barrier broadcast gather reduce reduce_scatter scan scatter",
    "errors": "CommError CommInterruptedError CommTimeoutError LeftOutError MismatchError PeerDiedError PeerLeftError",
    "launch": "RankFailedError init spawn",
    "repair": "grow join shrink",
    "tracing": "trace",
    "training": "DataPartitioner GradientAverager Pipeline ShardedSampler average_gradients partition_dataset",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = {"datasets", "errors", "models", "ops", "parallel", "repair", "schedules", "training"}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"dist_prims.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dist_prims' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"dist_prims.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"dist_prims.{name} needs torch 2.11 or later: pip install torch; dist_prims.schedules works without it",
            name="torch",
        ) from None
    globals()[name] = value  # so that the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_PACKAGES])
