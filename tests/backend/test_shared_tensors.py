"""Tensors of dist_prims.empty: what they cost, when their memory is freed, and who may write to it after an error."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn, store

import dist_prims
from dist_prims import GradientAverager
from dist_prims.errors import CommTimeoutError, MismatchError

PAGE = 4096
COUNT = 300_000  # elements
LIMIT = timedelta(seconds=50)


def allocated() -> int:
    """The bytes of all files out of which this process allocates shared tensors."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(descriptor).startswith("/memfd:dist_prims:tensors"):
                found += descriptor.stat().st_blocks * 512
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def test_thousands_of_tensors_take_few_descriptors() -> None:
    def body() -> None:
        open_now = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 8, open_now + 8))
        small = [dist_prims.empty(1) for _ in range(3000)]
        large = [dist_prims.empty(20_000).fill_(number) for number in range(1000)]
        assert len(os.listdir("/proc/self/fd")) <= open_now + 4
        for number in (0, 500, 999):
            dist.all_reduce(large[number])
            assert (large[number] == 2 * number).all()
        assert all((large[number] == number).all() for number in range(1, 1000) if number not in (500, 999))
        dist.all_reduce(small[7].fill_(1))
        assert small[7] == 2

    spawn(body, 2)


def test_released_memory_is_freed_while_a_peer_has_it_mapped() -> None:
    def body() -> None:
        before = allocated()
        tensor = dist_prims.empty(COUNT).fill_(1)
        dist.all_reduce(tensor)
        assert allocated() - before >= tensor.nbytes
        del tensor
        gc.collect()
        assert allocated() == before
        dist.barrier()

    spawn(body, 2)


def test_an_averager_that_is_removed_leaves_no_memory() -> None:
    def body() -> None:
        before = allocated()
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
        averager = GradientAverager(model, bucket_mb=5)
        for _ in range(3):  # in the second the order of the buckets changes
            model.zero_grad()
            model(torch.ones(2, 1024)).sum().backward()
        assert allocated() - before >= sum(each.nbytes for each in model.parameters())
        averager.remove()
        del averager
        model.zero_grad()
        gc.collect()
        assert allocated() == before
        dist.barrier()

    spawn(body, 2)


@contextmanager
def stalls(tensor: torch.Tensor, until: str) -> Iterator[None]:
    """A process that touches the middle of the second half of ``tensor`` stops there until the store has the key.

    Python's own handler of SIGSEGV only notes the signal, and the instruction is tried again.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(tensor[len(tensor) * 3 // 4 :].data_ptr() // PAGE * PAGE)

    def let_go() -> None:
        store().wait([until], LIMIT)
        libc.mprotect(page, PAGE, 3)  # reading and writing

    before = signal.signal(signal.SIGSEGV, lambda *_: None)
    assert libc.mprotect(page, PAGE, 0) == 0
    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGSEGV, before or signal.SIG_DFL)  # None is a handler of C


def at_once(tensors: list[torch.Tensor]) -> None:
    dist.all_reduce(tensors[1])


def directly(tensors: list[torch.Tensor]) -> None:
    dist_prims.all_reduce(tensors[1])


def several(tensors: list[torch.Tensor]) -> None:
    dist.group.WORLD.allreduce_coalesced(tensors).wait()


def until_wait_gives_up(tensors: list[torch.Tensor]) -> None:
    work = dist.all_reduce(tensors[1], async_op=True)
    work.wait(timedelta(milliseconds=300) if dist.get_rank() == 0 else LIMIT)


def incrementally(tensors: list[torch.Tensor]) -> None:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.incremental_reduce(tensors[1], 1 << 30, None).all_reduce(False).wait()


def part(tensors: list[torch.Tensor]) -> None:
    dist.all_reduce(tensors[1][100:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", [at_once, directly, several, until_wait_gives_up, incrementally, part])
def test_nothing_is_written_after_the_error(call: Callable[[list[torch.Tensor]], None]) -> None:
    """Rank 1 stops in the middle of its share, and goes on when rank 0 has raised and uses its tensors again."""

    def body() -> None:
        rank = dist.get_rank()
        tensors = [dist_prims.empty(COUNT).fill_(1) for _ in range(3)]
        dist.all_reduce(tensors[1])
        dist.group.WORLD.set_timeout(timedelta(milliseconds=300 if rank == 0 else 50_000))
        if rank == 0:
            with pytest.raises(CommTimeoutError):
                call(tensors)
            for each in tensors:
                each.fill_(7)
            store().set("raised", "")
            store().wait(["late"], LIMIT)
            for each in tensors:
                assert (each == 7).all()
        else:
            with (
                stalls(tensors[1], until="raised"),
                pytest.raises(CommTimeoutError, match="rank 0 has given up waiting"),
            ):
                call(tensors)
            store().set("late", "")

    spawn(body, 2)


def test_a_tensor_on_which_a_call_has_failed_serves_the_next_group() -> None:
    def body() -> None:
        rank = dist.get_rank()
        tensor = dist_prims.empty(COUNT).fill_(1)
        group = dist.new_group()
        group.set_timeout(timedelta(milliseconds=300))
        if rank == 0:
            with pytest.raises(CommTimeoutError):
                dist.all_reduce(tensor, group=group)
            store().set("raised", "")
        else:
            store().wait(["raised"], LIMIT)
        for turn in range(2):
            tensor.fill_(rank + turn)
            dist.all_reduce(tensor)
            assert (tensor == 1 + 2 * turn).all()
        if rank == 0:
            before = allocated()
            del tensor
            gc.collect()
            assert allocated() <= before

    spawn(body, 2)


def test_a_disagreement_leaves_tensors_shared() -> None:
    def body() -> None:
        before = allocated()
        tensor = dist_prims.empty(COUNT).fill_(1)
        size = allocated() - before
        with pytest.raises(MismatchError):
            dist.all_reduce(tensor if dist.get_rank() else tensor[1:])
        assert (tensor == 1).all()
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
        assert allocated() - before == size  # none of it has become private

    spawn(body, 2)


def test_forked_ranks_have_memory_of_their_own() -> None:
    """They inherit tensors of their parent, which they neither have nor harm, wherever their own ones lie."""
    inherited = [dist_prims.empty(COUNT).fill_(3) for _ in range(5)]

    def body() -> None:
        tensors = [dist_prims.empty(COUNT).fill_(1) for _ in range(5)]
        inherited.clear()
        for each in tensors:
            dist.all_reduce(each)
            assert (each == 2).all()

    spawn(body, 2)
    assert all((each == 3).all() for each in inherited)


def error_of(*sizes: int) -> str:
    """The error of the last allocation; those before it are written, and succeed."""
    tensors = [dist_prims.empty(size).fill_(1) for size in sizes[:-1]]
    assert all(each[-1] == 1 for each in tensors)
    with pytest.raises(RuntimeError) as caught:
        dist_prims.empty(sizes[-1])
    return str(caught.value)


def alone(body: Callable[[], str]) -> str:
    """What ``body`` returns in a process of its own, which may set its limits."""
    return dist_prims.spawn(body, 1, init=False, timeout=60)[0]


def test_little_address_space() -> None:
    """The first file is smaller then; nothing but the tensors' own size is needed."""

    def body() -> str:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20),) * 2)
        return error_of(1_000_000, 1_000_000, 1_000_000, 20_000_000)

    assert "Cannot allocate memory" in alone(body)


def test_a_limit_on_the_size_of_files() -> None:
    def body() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return error_of(*[50_000] * 20, 10_000_000)

    error = alone(body)
    assert "cannot reserve 40001536 bytes of shared memory" in error
    assert "ulimit -f" in error


def test_no_descriptor_is_left() -> None:
    def body() -> str:
        dist_prims.empty(1)  # imports what it needs; so little takes no descriptor
        taken = [os.dup(0) for _ in range(200)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, taken[-1] + 1))
        error = error_of(50_000)
        os.close(taken[0])  # to report the error takes one
        return error

    assert "Too many open files" in alone(body)


def test_more_than_the_control_group_may_have(control_group: Path) -> None:
    """An error, where the kernel would kill a process of the group."""
    (control_group / "memory.limit_in_bytes").write_text(str(2 << 30))

    def body() -> str:
        (control_group / "cgroup.procs").write_text(str(os.getpid()))
        return error_of(25_000_000, 700_000_000)

    message = alone(body)
    assert "cannot reserve 2800001024 bytes of shared memory: the machine or the control group" in message


def test_a_shape_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        dist_prims.empty((2, -1))
    with pytest.raises(RuntimeError, match="overflow"):
        dist_prims.empty((1 << 40, 1 << 40))


def test_a_large_reduction_has_the_threads_that_torch_has_then() -> None:
    """One rank that has all cores; csrc/tests/shares_test.cpp has several ranks."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")

    def body() -> None:
        tensor = dist_prims.empty(16 << 20).fill_(1)
        seen: list[str] = []
        over = threading.Event()

        def observe() -> None:
            while not over.is_set():
                for file in Path("/proc/self/task").glob("*/comm"):
                    try:
                        seen.extend({file.read_text().strip()} & {"dist_prims_fold"})
                    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
                        continue

        observer = threading.Thread(target=observe)
        observer.start()
        try:
            for threads, is_async in ((1, False), (2, True)):
                torch.set_num_threads(threads)
                for _ in range(20):
                    work = dist.all_reduce(tensor, async_op=is_async)
                    while work is not None and not work.is_completed():
                        pass  # a wait would reduce on this thread
                assert not seen
            deadline = time.monotonic() + 60
            while not seen and time.monotonic() < deadline:
                dist.all_reduce(tensor)
            assert seen
            torch.set_num_threads(1)  # a forked rank has no threads of OpenMP: the comparison would wait for them
            assert (tensor == 1).all()
        finally:
            over.set()
            observer.join()

    spawn(body, 1)
