"""Detection of a backward within a backward: a hook sees the inner one only, which ends before the outer one."""

from __future__ import annotations

import sys
from types import FrameType

from torch.autograd.function import BackwardCFunction

__all__: list[str] = []

_CALLS = {
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if name in vars(BackwardCFunction)
}


def within_a_backward() -> bool:
    """Whether the backward of a ``torch.autograd.Function`` runs on this thread, as that of
    ``checkpoint(use_reentrant=True)`` does: gradients that are accumulated then come from a backward within it.

    >>> within_a_backward()
    False
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back
    return False
