"""Whether a backward runs within another: a hook sees only the innermost, whose end is not the end."""

from __future__ import annotations

import sys
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

__all__ = ["within_a_checkpoint"]


def within_a_checkpoint() -> bool:
    """Whether ``checkpoint(use_reentrant=True)`` is in its backward, on this thread.

    >>> within_a_checkpoint()
    False
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False
