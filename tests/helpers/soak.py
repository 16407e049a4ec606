"""A soak: threads make all calls on groups that are made and destroyed over and over; what a rank uses stays the same.

    python tests/helpers/soak.py --seconds 3600                      # 3 ranks on one host
    python tests/helpers/soak.py --seconds 600 --layout "a a b"      # of 3 ranks, the last one on another host

A round makes 20 groups, makes all collectives and messages in them on 8 new threads, and destroys the groups. Results
are compared with what they must be. Between rounds, when no thread is left, each rank counts its descriptors, threads
and mappings of files, and measures its resident memory. The first quarter of the time is the warm-up. After it

- descriptors, threads, and the mappings of files are the same in all samples;
- resident memory grows by no more than a few KB for each group.

torch itself keeps memory for each group that a process has ever made: docs/design/long_life.md lists it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from values import COLLECTIVES, Call, equal, held, summed

import dist_prims

__all__ = ["Options", "Sample", "Usage", "run"]

PAGE = os.sysconf("SC_PAGESIZE")
COUNTS = (1, 300, 5000)  # elements of 8 bytes: less than a message of the agreement, one phase, several
SAMPLES = 200  # for each run: what is kept would otherwise be growth
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1  # of mallopt()
Body = Callable[[Any, int], None]  # of calls: the group, and a number


@dataclass(frozen=True)
class Options:
    """``layout``: the name of the host of each rank. ``engine``: see DIST_PRIMS_ENGINE."""

    seconds: float
    least_groups: int = 0  # to be made, also if that takes longer
    layout: str = "a a a"
    engine: str = ""
    groups: int = 20
    threads: int = 8


@dataclass(frozen=True)
class Sample:
    """What one rank uses after a round; ``groups`` were made so far."""

    groups: int
    resident: int  # bytes
    descriptors: int
    threads: int
    files: int  # mappings of files, also of anonymous ones
    mappings: int

    @staticmethod
    def of_now(groups: int) -> Sample:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return Sample(
            groups=groups,
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            files=sum(line.split()[3] != "00:00" for line in maps),
            mappings=len(maps),
        )


@dataclass(frozen=True)
class Usage:
    """The samples of one rank after the warm-up."""

    samples: list[Sample]

    def values(self, name: str) -> list[int]:
        """The different values of a field."""
        return sorted({getattr(each, name) for each in self.samples})

    def bytes_for_each_group(self) -> float:
        """The slope of the resident memory, by least squares."""
        groups = [each.groups for each in self.samples]
        return statistics.linear_regression(groups, [each.resident for each in self.samples]).slope

    def growth(self) -> int:
        """Bytes by which the resident memory has grown: the medians of the first and the last fifth are compared."""
        fifth = max(len(self.samples) // 5, 1)
        first, last = (
            statistics.median(s.resident for s in part) for part in (self.samples[:fifth], self.samples[-fifth:])
        )
        return int(last - first)

    def text(self) -> str:
        first, last = self.samples[0], self.samples[-1]
        numbers = {name: self.values(name) for name in ("descriptors", "threads", "files")}
        return (
            f"{last.groups - first.groups} groups after {first.groups}; resident {first.resident / 2**20:.1f} "
            f"to {last.resident / 2**20:.1f} MiB, {self.bytes_for_each_group():.0f} bytes a group; "
            f"{numbers}; all mappings {first.mappings} to {last.mappings}, {self.values('mappings')[-1]} at most"
        )


def run(options: Options) -> list[Usage]:
    """Run the soak; the usage of each rank."""
    ranks = len(options.layout.split())
    time_limit = options.seconds * 1.5 + 120
    found = dist_prims.spawn(soak, ranks, (options,), backend="dist_prims", timeout=time_limit)
    return [Usage(samples) for samples in found]


def soak(options: Options) -> list[Sample]:
    """What each rank does."""
    limit_arenas()
    hosts = options.layout.split()
    if len(set(hosts)) > 1:
        os.environ.update(DIST_PRIMS_HOST_ID=hosts[dist.get_rank()], DIST_PRIMS_ENGINE=options.engine)
        dist.destroy_process_group()
        dist_prims.init("dist_prims", timeout=120)
    began, groups, samples, due = time.monotonic(), 0, [Sample.of_now(0)], options.seconds / 4
    while groups < options.least_groups or goes_on(began, options.seconds):
        go_round(options, groups)
        groups += options.groups
        if (passed := time.monotonic() - began) >= due:
            samples.append(Sample.of_now(groups))
            due = passed + options.seconds / SAMPLES
    return samples[1:]


def limit_arenas() -> None:
    """Make the threads share one heap of glibc. By default new threads use one of many, and each grows for a while."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 1 << 17), (_M_TRIM_THRESHOLD, 1 << 17)):
        if mallopt is not None:
            mallopt(parameter, value)


def goes_on(began: float, seconds: float) -> bool:
    """Whether there is time left: rank 0 decides."""
    left = torch.tensor(time.monotonic() - began < seconds)
    dist.broadcast(left, 0)
    return bool(left)


def go_round(options: Options, number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    chosen = [members(number + each, size) for each in range(options.groups)]
    groups = [dist.new_group(ranks) for ranks in chosen]
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for each in range(thread, options.groups, options.threads):
                if rank not in chosen[each]:
                    continue
                for turn in range(len(CALLS)):
                    CALLS[(thread + turn) % len(CALLS)](groups[each], number + turn)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    for group, ranks in zip(groups, chosen, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


def members(number: int, size: int) -> list[int]:
    """The ranks of a group: all of them, or in every third group all but one."""
    left_out = number % (3 * size)
    return [rank for rank in range(size) if size == 1 or rank * 3 + 2 != left_out]


def each_collective(group: Any, number: int) -> None:
    count = COUNTS[number % len(COUNTS)]
    for name in COLLECTIVES:
        Call(name, count, root=number % dist.get_world_size(group), salt=number % 11, group=group).run()


def several_at_once(group: Any, number: int) -> None:
    calls = [Call("all_reduce", count, salt=number % 11, group=group) for count in COUNTS]
    works = [call.start(is_async=True) for call in calls]
    for work, call in zip(works, calls, strict=True):
        work.wait()
        call.check()


def messages(group: Any, number: int) -> None:
    """Around the ring, with tags in the other order."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    inboxes = [torch.zeros_like(held(before, count)) for count in COUNTS]
    pending: list[Any] = [
        dist.irecv(inbox, tag=tag, group=group, group_src=before)
        for tag, inbox in reversed(list(enumerate(inboxes, start=number % 1000)))
    ]
    for tag, count in enumerate(COUNTS, start=number % 1000):
        pending.append(dist.isend(held(rank, count), tag=tag, group=group, group_dst=after))
    for work in pending:
        work.wait()
    for inbox, count in zip(inboxes, COUNTS, strict=True):
        equal(inbox, held(before, count), "recv")


def schedules(group: Any, number: int) -> None:
    """A collective by a schedule, and objects."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor = held(rank, COUNTS[1])
    dist_prims.all_reduce(tensor, group=group, algorithm="ring")
    equal(tensor, summed(size, COUNTS[1]), "ring")
    texts = [None] * size
    dist.all_gather_object(texts, {"rank": rank, "number": number}, group=group)
    assert texts == [{"rank": peer, "number": number} for peer in range(size)]


def shared_tensors(group: Any, number: int) -> None:
    """Only within one host the memory is shared."""
    backend: Any = group._get_backend(torch.device("cpu"))
    if backend.spans_hosts:
        return
    call = Call("all_reduce", 20_000, torch.float64, group=group, place=shared_copy)
    call.run()
    tensor = shared_copy(call.data())
    backend.incremental_reduce(tensor, 1 << 20, None).all_reduce(False).wait()
    equal(tensor, call.reduced(), "incremental sum")


def shared_copy(values: torch.Tensor) -> torch.Tensor:
    return dist_prims.empty(list(values.shape), values.dtype).copy_(values)


CALLS: list[Body] = [each_collective, several_at_once, messages, schedules, shared_tensors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Options(60.0)).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = Options(**vars(parser.parse_args()))
    began = time.monotonic()
    for rank, usage in enumerate(run(options)):
        print(f"rank {rank}: {usage.text()}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
