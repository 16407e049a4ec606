"""Threads of the library. Where the system has no thread left, the error names the rank, the thread and the remedy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

__all__: list[str] = []


def start_thread(name: str, run: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start a daemon thread; RuntimeError with a remedy if the system has none left."""
    thread = threading.Thread(target=run, args=arguments, daemon=True, name=f"dist_prims {name}")
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {os.environ.get('RANK', 'unknown')}: the thread {thread.name!r} cannot start ({error}); {remedy()}"
        ) from None
    return thread


def remedy() -> str:
    """Return what to do where no thread or process can start."""
    import resource  # of POSIX systems

    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    number = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"raise the limit of processes and threads of this user (`ulimit -u`, now {number}), the limit of the "
        "container (pids.max of its cgroup), or free memory"
    )
