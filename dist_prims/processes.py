"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, SIGKILL included; ``parent``: the parent's process id.

    The kernel watches the thread that started this process. That thread must live as long as the process is needed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)
