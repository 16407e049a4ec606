"""Calls on several threads: the bits of one thread, and how many threads a call has. See csrc/tests for the pool."""

from __future__ import annotations

import os
import subprocess
import sys
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
from dist_prims.torch_compat import reduce_scatter_single

WITHOUT_KERNEL = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = 700_000  # of several slots, and no multiple of a share


def helpers() -> int:
    """The number of helper threads that this process has started."""
    return sum(file.read_text() == "dist_prims_copy\n" for file in Path("/proc/self/task").glob("*/comm"))


def data(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    if dtype in WITHOUT_KERNEL:
        return torch.randint(256, [BYTES], generator=generator, dtype=torch.uint8).view(dtype)
    return (torch.rand(BYTES // dtype.itemsize, generator=generator) * 100).to(dtype)


def results(dtype: torch.dtype, group: Any) -> list[torch.Tensor]:
    """The results of every collective."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    root = dist.get_global_rank(group, size - 1)
    moved = data(dtype, 0)
    dist.broadcast(moved, root, group)
    gathered = [torch.empty_like(moved) for _ in range(size)]
    dist.all_gather(gathered, data(dtype, 1), group)
    at_root = [torch.empty_like(moved) for _ in range(size)] if rank == size - 1 else None
    dist.gather(data(dtype, 2), at_root, root, group)
    scattered = torch.empty_like(moved)
    dist.scatter(scattered, [data(dtype, 3 + peer) for peer in range(size)] if at_root else None, root, group)
    exchanged = [torch.empty_like(moved) for _ in range(size)]
    dist.all_to_all(exchanged, [data(dtype, 10 + peer) for peer in range(size)], group)
    found = [moved, *gathered, *(at_root or []), scattered, *exchanged]
    if dtype in WITHOUT_KERNEL:
        return found
    reduced, summed = data(dtype, 20), data(dtype, 21)
    dist.all_reduce(reduced, group=group)
    dist.reduce(summed, root, group=group)
    shared = dist_prims.empty(len(summed), dtype).copy_(data(dtype, 22))
    dist_prims.all_reduce(shared, group=group)
    part = torch.empty_like(reduced)
    reduce_scatter_single(part, torch.cat([data(dtype, 30 + peer) for peer in range(size)]), group=group)
    return [*found, reduced, shared, part, *([summed] if at_root else [])]


def test_several_threads_give_the_bits_of_one() -> None:
    def body() -> None:
        large_one_shot = dist_prims.BackendOptions(one_shot_bytes=1 << 20)
        pair = dist.new_group([0, 1], pg_options=large_one_shot)  # also one shot of a part, if it fits
        for dtype in DTYPES:
            for group in [dist.group.WORLD, *([pair] if dist.get_rank() < 2 else [])]:
                torch.set_num_threads(1)
                expected = results(dtype, group)
                torch.set_num_threads(2 + dist.get_rank())
                for one, several in zip(expected, results(dtype, group), strict=True):
                    assert torch.equal(one.view(torch.uint8), several.view(torch.uint8)), dtype
        assert helpers() == 1 + dist.get_rank()

    def with_cores() -> None:
        extension().assume_cores(8)
        body()

    spawn(with_cores, 3)


def test_a_call_has_the_threads_that_torch_has_then() -> None:
    def body() -> None:
        extension().assume_cores(8)
        count = 1 << 20

        def sum_of_ranks(**options: Any) -> None:
            tensor = torch.full([count], float(dist.get_rank() + 1))
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
        assert extension().describe_threads(64, 0).startswith("1 in a call of 4 MB or more")

    spawn(body, 2)


def test_the_core_stays_in_memory() -> None:
    """Its helper threads would run code that is not there any more."""
    program = """if True:
        import _ctypes, ctypes, sys
        _ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)
        assert sys.argv[1] in open("/proc/self/maps").read()
    """
    subprocess.run([sys.executable, "-c", program, LIBRARIES / CORE], check=True, timeout=60)
