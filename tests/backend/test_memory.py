"""Shared tensors, the direct call, and schedules that are pinned."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from reductions import all_reduce_algorithms, shared
from values import equal, held, noise, summed

import dist_prims
from dist_prims.schedules import Step, algorithm, unregister

Op = dist.ReduceOp


def mapped() -> int:
    """How many pieces of such memory this process has mapped, its own and others'."""
    return Path("/proc/self/maps").read_text().count("memfd:dist_prims")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_shared_tensors_give_the_same_bits(size: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        for count in (0, 1, 13, 40_003, 300_007):
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
                for op in (Op.SUM, Op.MAX) if dtype != torch.complex64 else (Op.SUM, Op.AVG):
                    given = noise(rank, torch.float32, count).to(dtype)
                    plain, tensor = given.clone(), shared(given)
                    dist.all_reduce(plain, op)
                    dist.all_reduce(tensor, op)
                    equal(tensor, plain, (count, dtype, op))

    spawn(body, size)


@pytest.mark.parametrize("with_shared", [1, 2])
def test_some_ranks_may_have_a_shared_tensor(with_shared: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        tensor = shared(held(rank, 50_000)) if rank < with_shared else held(rank, 50_000)
        for _ in range(3):
            tensor.copy_(held(rank, 50_000))
            dist.all_reduce(tensor)
            equal(tensor, summed(3, 50_000), "sum")

    spawn(body, 3)


def test_views_of_shared_tensors_are_shared() -> None:
    def body() -> None:
        rank = dist.get_rank()
        whole = dist_prims.empty((4, 100_000), torch.int64).zero_()
        row = whole[rank]  # at another place on each rank
        row.copy_(held(rank, 100_000))
        dist.all_reduce(row)
        equal(row, summed(2, 100_000), "row")
        assert whole.count_nonzero() <= 100_000  # nothing else was written
        across = whole[:, :25_000].t()  # not in one piece: by way of a copy
        across.fill_(1)
        dist.all_reduce(across)
        assert (across == 2).all()

    spawn(body, 2)


def test_a_call_on_a_destroyed_group_keeps_nothing() -> None:
    """An asynchronous call that raises must not keep its group: one mapping and a descriptor for each rank."""

    def body() -> None:
        before = mapped()
        for _ in range(3):
            group = dist.new_group([0, 1])
            backend = group._get_backend(torch.device("cpu"))
            backend.abort()
            with pytest.raises(RuntimeError, match="the group has been destroyed"):
                dist.all_reduce(torch.ones(10), group=group, async_op=True)
            dist.destroy_process_group(group)
            del group, backend
        gc.collect()
        assert mapped() == before, Path("/proc/self/maps").read_text()

    spawn(body, 2)


def test_torch_allocates_shared_tensors_through_the_backend() -> None:
    def body() -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.supports_tensor_alloc(torch.device("cpu"))
        before = mapped()
        tensor = backend.allocate_tensor(50_000, dtype=torch.float32, device=torch.device("cpu"))
        assert mapped() == before + 1
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()

    spawn(body, 2)


def test_a_forked_child_does_not_have_the_memory() -> None:
    def body() -> None:
        tensor = dist_prims.empty(1000).fill_(1)
        if (pid := os.fork()) == 0:
            assert mapped() == 0
            del tensor  # which harms no other process
            os._exit(0 if mapped() == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert tensor.sum() == 1000

    spawn(body, 2)


def test_the_direct_call() -> None:
    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group(backend="gloo")
        for of in (None, dist.group.WORLD, group):
            tensor = held(rank, 1000)
            dist_prims.all_reduce(tensor, group=of)
            equal(tensor, summed(3, 1000), of)
        dist_prims.all_reduce(largest := torch.tensor(rank), Op.MAX)
        assert largest.item() == 2
        with pytest.raises(ValueError, match="AVG cannot reduce bool"):
            dist_prims.all_reduce(torch.tensor(True), Op.AVG)

    spawn(body, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [3, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 5, 7))])
def test_a_pinned_schedule_gives_the_bits_of_its_order(size: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        for name in all_reduce_algorithms(size):
            group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce=name))
            for count in (0, 1, 5, 1031, 100_003):
                for dtype in (torch.float32, torch.bfloat16):
                    native, ours = (noise(rank, dtype, count) for _ in range(2))
                    dist.all_reduce(native, group=group)
                    dist_prims.all_reduce(ours, algorithm=name)
                    equal(native, ours, (name, count, dtype))
            tensor = torch.ones(1000) * rank
            dist.all_reduce(tensor, Op.AVG, group=group)
            equal(tensor, torch.full((1000,), (size - 1) / 2), name)

    spawn(body, size, timeout=100)


def test_a_schedule_of_ones_own_is_pinned() -> None:
    @algorithm("all_reduce", name="to_zero_and_back", chunks=1)
    def to_zero_and_back(size: int) -> Any:
        for peer in range(1, size):
            yield Step(src=peer, dst=0, chunk=0, reduce=True)
        for peer in range(1, size):
            yield Step(src=0, dst=peer, chunk=0)

    def body() -> None:
        group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="to_zero_and_back:1K-max"))
        for count in (1, 5000):
            tensor = held(dist.get_rank(), count)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            dist.isend(tensor.clone(), (dist.get_rank() + 1) % 3)  # messages of users are not mistaken for the plan's
            work.wait()
            equal(tensor, summed(3, count), count)
            dist.recv(torch.zeros_like(tensor), (dist.get_rank() - 1) % 3)

    try:
        spawn(body, 3)
    finally:
        unregister("all_reduce", "to_zero_and_back")
