"""Groups that ``reconfigure`` of torch 2.15 gives other members, for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims

newest: Any = dist  # names that the pinned torch does not have
needs_reconfigure = pytest.mark.skipif(
    not hasattr(newest, "_reconfigure"), reason="this torch has no reconfigure (2.15 has)"
)

ALONE = "reconfigure first"  # in the errors of a group that has no members yet


class Meeting:
    """How the test programs exchange handles: by files, so no store of a group is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def handles(self, own: int, members: Collection[int], group: Any = None) -> list[str]:
        """Publish the handle of this process, and return those of the members. All members call it equally often."""
        number = next(self._numbers)
        self.write(f"handle{number}.{own}", newest._get_reconfigure_handle(group))
        return [self.read(f"handle{number}.{each}") for each in members]

    def write(self, name: str, text: str = "") -> None:
        new = self._folder / f"{name}.new{os.getpid()}"
        new.write_text(text)
        new.rename(self._folder / name)

    def read(self, name: str) -> str:
        deadline = time.monotonic() + 60
        while not (self._folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.005)
        return (self._folder / name).read_text()

    def barrier(self, name: str, own: int, members: Collection[int]) -> None:
        self.write(f"{name}.{own}")
        for each in members:
            self.read(f"{name}.{each}")


def start(rank: int, size: int, folder: Path, name: str = "start", **options: Any) -> None:
    """Make a default group without members."""
    options = {"timeout": timedelta(seconds=60), "enable_reconfigure": True, **options}
    dist.init_process_group("dist_prims", f"file://{folder}/{name}", rank=rank, world_size=size, **options)


def reconfigure(uuid: int, handles: Sequence[str] | set[str], seconds: float = 60, group: Any = None) -> None:
    work = newest._reconfigure(uuid, handles, group=group, timeout=timedelta(seconds=seconds))
    assert work.wait()
    assert work.is_completed()


def reconfigured(rank: int, size: int, folder: Path) -> tuple[Meeting, list[str]]:
    """Make a default group, and give it its members by the call number 1; return the meeting and their handles.

    It returns when all members have the group: each of them needs rank 0 up to the end of its call, so a test that
    stops or ends rank 0 before has a member that waits for 60 s.
    """
    start(rank, size, folder)
    meeting = Meeting(folder)
    handles = meeting.handles(rank, range(size))
    reconfigure(1, handles)
    meeting.barrier("reconfigured", rank, range(size))
    return meeting, handles


def total(group: dist.ProcessGroup | None = None) -> float:
    """The sum of 1 over all ranks, after several kinds of collectives, small and large."""
    dist.barrier(group)
    small, large, shared = torch.ones(1), torch.ones(300_000), dist_prims.empty(100_000).fill_(1)
    for tensor in (small, large, shared):
        dist.all_reduce(tensor, group=group)
    size = dist.get_world_size(group)
    assert small == size
    assert large.eq(size).all()
    assert shared.eq(size).all()
    gathered = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank(group)]), group=group)
    assert gathered.tolist() == list(range(size))
    return small.item()


def place() -> tuple[int, int, float]:
    return dist.get_rank(), dist.get_world_size(), total()
