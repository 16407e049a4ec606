"""One rank of the fuzz: its groups, its calls under way, and the memory that no call may write any more."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import dist_prims

__all__ = ["LIMIT", "Failure", "Group", "Rank"]

LIMIT = 60.0  # seconds; no single wait takes so long, even on a machine that is four times as slow
_SECONDS_TO_LET_GO = 20.0
_LINES_KEPT = 60
_TENSORS = "memfd:dist_prims:tensors"


class Failure(AssertionError):
    """The library broke a promise."""


@dataclass
class Group:
    """A group, as members and other ranks know it."""

    number: int
    members: list[int]  # ranks of the world
    handle: Any  # torch's group; None on a rank that is not a member
    me: int  # this rank in the group; -1 on a rank that is not a member

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def backend(self) -> Any:
        return self.handle._get_backend(torch.device("cpu"))


@dataclass
class Pending:
    """A call under way, and the check of its results."""

    what: str
    group: Group
    work: Any
    check: Callable[[], None]


@dataclass
class Rank:
    number: int
    size: int
    is_verbose: bool
    private: Random = field(default_factory=Random)
    groups: list[Group] = field(default_factory=list)  # the first is the world
    pending: list[Pending] = field(default_factory=list)
    frozen: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    # ---- groups

    def join(self, store: dist.Store) -> None:
        self.inherited = set(descriptors().values())
        limit = timedelta(seconds=LIMIT)
        dist.init_process_group("dist_prims", store=store, rank=self.number, world_size=self.size, timeout=limit)
        self.groups.append(Group(0, list(range(self.size)), dist.group.WORLD, self.number))

    def make(self, members: list[int], timeout: float = LIMIT, **options: Any) -> Group:
        """A new group. All ranks make it, members or not."""
        self.made += 1
        made_options = dist_prims.BackendOptions(**options)
        handle = dist.new_group(members, timeout=timedelta(seconds=timeout), pg_options=made_options)
        is_member = self.number in members
        return Group(self.made, members, handle if is_member else None, members.index(self.number) if is_member else -1)

    def make_own_group(self, shared: Random) -> Group:
        """A group of at least two ranks, sometimes with a pinned schedule."""
        return self.make(self.members(shared, 2), all_reduce=shared.choice(["", "", "ring"]))

    def members(self, shared: Random, least: int = 1) -> list[int]:
        """Some ranks of the world, for a group."""
        return sorted(shared.sample(range(self.size), shared.randrange(min(least, self.size), self.size + 1)))

    def destroy(self, group: Group) -> None:
        if group.handle is not None:
            dist.destroy_process_group(group.handle)
            group.handle = None

    def leave(self) -> None:
        """Destroy all groups. Nothing of the library may be left in this process."""
        dist.destroy_process_group()
        self.pending.clear()
        self.groups.clear()
        self.check_frozen()
        self.frozen.clear()
        limit = time.monotonic() + _SECONDS_TO_LET_GO
        while left := self.left_behind():  # a thread may be about to end
            if time.monotonic() > limit:
                raise Failure("left behind after the end:\n" + "\n".join(left))
            gc.collect()
            time.sleep(0.01)

    def left_behind(self) -> list[str]:
        """Mappings and descriptors that were not there when the rank joined, and pages of own shared tensors.

        Their address space stays for the life of the process, since other ranks may have it mapped.
        """
        files = descriptors()
        own = {os.stat(f"/proc/self/fd/{name}").st_ino: name for name, file in files.items() if _TENSORS in file}
        lines = Path("/proc/self/maps").read_text().splitlines()
        maps = [line for line in lines if "memfd:dist_prims" in line and int(line.split()[4]) not in own]
        opened = [file for file in files.values() if file not in self.inherited and _TENSORS not in file]
        pages = [os.stat(f"/proc/self/fd/{name}").st_blocks for name in own.values()]
        return maps + opened + [f"{count} blocks of shared tensors" for count in pages if count]

    # ---- calls under way

    def launch(self, what: str, group: Group, call: Callable[[bool], Any], check: Callable[[], None]) -> None:
        """Make a call, synchronous or asynchronous, and check or keep it."""
        is_async = self.private.random() < 0.5
        self.trace(f"{what} in group {group.number}")
        work = call(is_async)
        if is_async and work is not None:
            self.keep(what, group, work, check)
        else:
            check()

    def keep(self, what: str, group: Group, work: Any, check: Callable[[], None]) -> None:
        """A call is under way: some later step waits for it."""
        self.trace(f"{what} is under way in group {group.number}")
        self.pending.append(Pending(what, group, work, check))

    def wait_for(self, group: Group | None = None) -> None:
        """Wait for the pending calls, by default those of all groups, in an order of this rank's own."""
        calls = [pending for pending in self.pending if group is None or pending.group is group]
        self.private.shuffle(calls)
        for pending in calls:
            self.wait_for_one(pending)

    def wait_for_one(self, pending: Pending) -> None:
        self.pending.remove(pending)
        how = self.private.choice(["wait", "limit", "poll", "future"])
        self.trace(f"{how} for {pending.what} in group {pending.group.number}")
        if how == "poll":
            self.until(pending.work.is_completed, pending.what)
        if how == "future":
            pending.work.get_future().wait()
        elif how == "limit":
            pending.work.wait(timedelta(seconds=LIMIT))
        else:
            pending.work.wait()
        pending.check()

    def until(self, done: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + LIMIT
        while not done():
            if time.monotonic() > limit:
                raise Failure(f"{what} is not over after {LIMIT:g} s")
            time.sleep(0.0005)

    def between_steps(self) -> None:
        """Actions of this rank alone: a delay, a garbage collection, a wait."""
        draw = self.private.random()
        if draw < 0.3:
            self.pause(0.003)
        elif draw < 0.4:
            gc.collect()
        elif draw < 0.7 and self.pending:
            self.wait_for_one(self.private.choice(self.pending))

    def pause(self, most: float) -> None:
        time.sleep(self.private.random() * most)

    # ---- memory

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values to ordinary memory, to a shared tensor, or to a tensor with gaps."""
        draw = self.private.random()
        if draw < 0.3:
            return dist_prims.empty(list(values.shape), values.dtype).copy_(values)
        if draw < 0.5:
            return torch.empty(2 * values.numel(), dtype=values.dtype)[::2].copy_(values)
        return values.clone()

    def ones(self, count: int, is_shared: bool) -> torch.Tensor:
        return (dist_prims.empty(count) if is_shared else torch.empty(count)).fill_(1)

    def freeze(self, what: str, tensor: torch.Tensor) -> None:
        """The call that used the tensor is over: from now on nothing may write to it."""
        tensor.fill_(77)
        self.frozen.append((what, tensor, tensor.clone()))

    def check_frozen(self) -> None:
        for what, tensor, expected in self.frozen:
            if not torch.equal(tensor, expected):
                wrong = int((tensor != expected).sum())
                raise Failure(f"{wrong} of {tensor.numel()} elements were written late, after {what} was over")

    # ---- outcomes

    def fails(self, what: str, call: Callable[[], Any], *kinds: type[BaseException]) -> BaseException:
        """The call must raise one of these exceptions."""
        try:
            call()
        except kinds as error:
            self.trace(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            return error
        raise Failure(f"{what}: no error came")

    def fails_soon(
        self, group: Group, call: Callable[[], Any], kind: type[BaseException] = RuntimeError
    ) -> BaseException:
        """Repeat the call until it fails because another rank ends the group."""
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit:
            try:
                call()
            except kind as error:
                self.trace(f"group {group.number} has ended: {type(error).__name__}: {str(error)[:200]}")
                return error
        raise Failure(f"group {group.number} has ended elsewhere, and this rank does not notice")

    def trace(self, text: str) -> None:
        self.lines.append(f"{time.monotonic() - self.began:8.3f} rank {self.number}: {text}")
        if self.is_verbose:
            print(self.lines[-1], file=sys.stderr, flush=True)


def descriptors() -> dict[str, str]:
    """The open descriptors, and the target of each."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
    return targets
