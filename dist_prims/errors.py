"""The exceptions of collectives. Each is a ``torch.distributed.DistBackendError``, so existing handlers catch them.

>>> import torch.distributed as dist
>>> issubclass(MismatchError, dist.DistBackendError)
True
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed import DistBackendError

__all__ = [
    "CommError",
    "CommInterruptedError",
    "CommTimeoutError",
    "MismatchError",
    "PeerDiedError",
    "PeerLeftError",
]


class CommError(DistBackendError):
    """Ranks of a group could not finish a collective. The message names rank, operation and remedy."""


class MismatchError(CommError):
    """Ranks called different collectives, or one with different arguments. No data was touched; the group can go on."""


class PeerDiedError(CommError):
    """A rank's process has ended. The group cannot go on."""


class PeerLeftError(CommError):
    """A rank has destroyed the group. The group cannot go on."""


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not make the call before the timeout. The group cannot go on."""


class CommInterruptedError(CommError):
    """A rank was interrupted within a collective. The group cannot go on."""


_OLD_NAMES = {  # of version 0.1
    "CommTimeout": CommTimeoutError,
    "Interrupted": CommInterruptedError,
    "PeerDied": PeerDiedError,
    "PeerLeft": PeerLeftError,
}


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _OLD_NAMES[name]
    warnings.warn(f"dist_prims.errors.{name} is called {found.__name__}", DeprecationWarning, stacklevel=2)
    return found
