"""Calls on several threads: the bits of one thread, and how many threads a call has. See csrc/tests for the pool."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn
from reductions import DTYPES

import dist_prims
from dist_prims.backend.compile_native import CORE
from dist_prims.backend.extension import extension
from dist_prims.backend.native_libraries import LIBRARIES

WITHOUT_KERNEL = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = 4_300_000  # of each rank: large enough for four threads, and no multiple of a share


def helpers() -> int:
    """The number of helper threads that this process has started."""
    return sum(file.read_text() == "dist_prims_copy\n" for file in Path("/proc/self/task").glob("*/comm"))


def data(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.arange(BYTES // dtype.itemsize, dtype=torch.int32) % (90 + dist.get_rank() + seed)).to(dtype)


def moved() -> list[torch.Tensor]:
    """The results of the calls whose copies several threads divide."""
    size, is_root = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    part = data(torch.uint8, 0)
    gathered = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(gathered, part)
    at_root = [torch.empty_like(part) for _ in range(size)] if is_root else None
    dist.gather(data(torch.uint8, 1), at_root, size - 1)
    return [*gathered, *(at_root or [])]


def reduced(dtype: torch.dtype) -> list[torch.Tensor]:
    """The sums of shared tensors, by torch.distributed and by dist_prims."""
    shared = dist_prims.empty(BYTES // dtype.itemsize, dtype).copy_(data(dtype, 2))
    dist.all_reduce(shared)
    first = shared.clone()
    dist_prims.all_reduce(shared)
    return [first, shared]


def test_several_threads_give_the_bits_of_one() -> None:
    def body() -> None:
        extension().assume_cores(8)
        sums = [partial(reduced, dtype) for dtype in DTYPES if dtype not in WITHOUT_KERNEL]
        calls: list[Callable[[], list[torch.Tensor]]] = [moved, *sums]
        for results in calls:
            torch.set_num_threads(1)
            expected = results()
            torch.set_num_threads(2 + dist.get_rank())
            for one, several in zip(expected, results(), strict=True):
                assert torch.equal(one.view(torch.uint8), several.view(torch.uint8)), results
        assert helpers() == 1 + dist.get_rank()

    spawn(body, 3)


def test_a_call_has_the_threads_that_torch_has_then() -> None:
    def body() -> None:
        extension().assume_cores(8)
        shared = dist_prims.empty(2 << 20)

        def sum_of_ranks(**options: Any) -> None:
            tensor = shared.fill_(dist.get_rank() + 1)
            work = dist.all_reduce(tensor, **options)
            if work is not None:
                work.wait()
            assert tensor.unique().tolist() == [3]

        torch.set_num_threads(1)
        sum_of_ranks()
        assert helpers() == 0
        torch.set_num_threads(3)
        sum_of_ranks(async_op=True)
        assert helpers() == 0  # the program computes meanwhile
        sum_of_ranks()
        assert helpers() == 2
        torch.set_num_threads(1 if dist.get_rank() else 5)
        sum_of_ranks()
        assert helpers() == (2 if dist.get_rank() else 4)

    spawn(body, 2)


def test_ranks_divide_the_cores_that_they_share() -> None:
    def body() -> None:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)  # the ranks of the world count in it too
        cores = sorted(os.sched_getaffinity(0))
        assert f"{len(cores)} cores for 2 ranks" in extension().describe_threads(64, 0)
        dist.barrier()
        os.sched_setaffinity(0, cores[:1])
        dist.barrier()
        assert extension().describe_threads(64, 0).startswith("1 in a call of 2 MB or more")

    spawn(body, 2)


def test_the_core_stays_in_memory() -> None:
    """Its helper threads would run code that is not there any more."""
    program = """if True:
        import _ctypes, ctypes, sys
        _ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)
        assert sys.argv[1] in open("/proc/self/maps").read()
    """
    subprocess.run([sys.executable, "-c", program, LIBRARIES / CORE], check=True, timeout=60)
