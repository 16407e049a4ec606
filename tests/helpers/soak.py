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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import span
from values import COLLECTIVES, Call, equal, held, summed

import dist_prims

__all__ = ["Sample", "growth", "run"]

COUNTS = (1, 300, 5000)  # elements of 8 bytes: less than a message of the agreement, one phase, several
GROUPS, THREADS = 20, 8  # of a round
SAMPLES = 200  # for each run: what is kept would otherwise be growth
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1  # of mallopt()
Body = Callable[[Any, int], None]  # of calls: the group, and a number


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
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            files=sum(line.split()[3] != "00:00" for line in maps),
            mappings=len(maps),
        )


def growth(samples: list[Sample]) -> int:
    """Bytes by which the resident memory has grown: the medians of the first and the last fifth are compared."""
    fifth = max(len(samples) // 5, 1)
    first, last = (statistics.median(each.resident for each in part) for part in (samples[:fifth], samples[-fifth:]))
    return int(last - first)


def run(seconds: float, layout: str = "a a a", least_groups: int = 0) -> list[list[Sample]]:
    """Run the soak on a rank for each letter, which names its host; the samples of each rank after the warm-up.

    It goes on until ``least_groups`` have been made, also if that takes longer.
    """
    return span(layout, soak, seconds, least_groups, timeout=seconds * 1.5 + 120, group=120)


def soak(seconds: float, least_groups: int) -> list[Sample]:
    """What each rank does."""
    limit_arenas()
    began, groups, samples, due = time.monotonic(), 0, [Sample.of_now(0)], seconds / 4
    while groups < least_groups or goes_on(began, seconds):
        go_round(groups)
        groups += GROUPS
        if (passed := time.monotonic() - began) >= due:
            samples.append(Sample.of_now(groups))
            due = passed + seconds / SAMPLES
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


def go_round(number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    chosen = [members(number + each, size) for each in range(GROUPS)]
    groups = [dist.new_group(ranks) for ranks in chosen]
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for group, ranks in list(zip(groups, chosen, strict=True))[thread::THREADS]:
                for turn in range(len(CALLS) if rank in ranks else 0):
                    CALLS[(thread + turn) % len(CALLS)](group, number + turn)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in range(THREADS)]
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
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--layout", default="a a a")
    for rank, samples in enumerate(run(**vars(parser.parse_args()))):
        groups = [sample.groups for sample in samples]
        each = statistics.linear_regression(groups, [sample.resident for sample in samples]).slope
        print(f"rank {rank}: {each:.0f} bytes for each group, first {samples[0]}, last {samples[-1]}")


if __name__ == "__main__":
    main()
