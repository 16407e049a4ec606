"""Ranks that share a test: on hosts that they name, interrupted, and their child processes."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import dist_prims

needs_unsorted_groups = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of new_group"
)


def store() -> Any:
    """The store of the default group, in which no rank waits for another one without end."""
    found = dist.distributed_c10d._get_default_store()
    found.set_timeout(timedelta(seconds=50))
    return found


def press_ctrl_c_soon() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def children() -> set[int]:
    """Processes that this one has started and that are still there, zombies too, but for multiprocessing's own."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = {int(pid) for file in found for pid in file.read_text().split()}
    return {pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def backend_of(group: Any = None) -> Any:
    """The backend of a group, by default of the default group, with methods that torch's type does not have."""
    return (group or distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))


def spawn(body: Callable[..., Any], size: int, *args: Any, timeout: float = 90) -> list[Any]:
    """Run ``body`` on the ranks of a group of this backend on one host."""
    return dist_prims.spawn(body, size, args, backend="dist_prims", timeout=timeout)


def span(
    layout: str, body: Callable[..., Any], *args: Any, timeout: float = 60, group: float = 30, losses: int = 0
) -> list[Any]:
    """Run ``body`` on a rank for each letter, which names its host; the default group then spans the hosts. So many
    ranks as ``losses`` may die, and have the result None."""
    names = layout.split()

    def rank() -> Any:
        mine = names[dist.get_rank()]
        dist.destroy_process_group()
        os.environ["DIST_PRIMS_HOST_ID"] = mine
        place = dist_prims.init("dist_prims", timeout=group)
        assert len(place.hosts) == len(set(names))
        return body(*args)

    return dist_prims.spawn(rank, len(names), timeout=timeout, min_ranks=len(names) - losses if losses else None)
