"""One-sided access by ``dist._new_window``, which torch has since 2.15."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import run_ranks

import dist_prims

newest: Any = dist  # names that the pinned torch does not have
pytestmark = pytest.mark.skipif(not hasattr(newest, "_new_window"), reason="this torch has no windows (2.15 has)")
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]


def run(body: Callable[[], Any], size: int) -> list[Any]:
    return dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


def held(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 5 + rank).to(dtype)


def zeros(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return dist_prims.empty(shape, dtype=dtype).zero_()


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as found:
        call()
    return str(found.value)


def put_to_all() -> None:
    """Each rank writes its block into the tensor of every rank, itself included."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert newest._supports_window()
    for dtype in DTYPES:
        for count in (1, 1003):
            tensor = zeros(max(count * size, 4096), dtype)
            window = newest._new_window(tensor)
            work = [window.put(held(rank, count, dtype), to, rank * count, to % 2 == 0) for to in range(size)]
            assert all(each.is_completed() and each.wait() for each in work)
            for to in range(size):
                window.signal(to, False)
            for source in range(size):
                window.wait_signal(source, False)
            assert torch.equal(tensor[: count * size], torch.cat([held(each, count, dtype) for each in range(size)]))
            assert not tensor[count * size :].any()
            window.tensor_deregister()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_put_is_seen_after_the_signal(size: int) -> None:
    run(put_to_all, size)


def read_the_next() -> None:
    """Shapes differ by rank; a view of the tensor of a peer is that memory, and lives longer than its window."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following = (rank + 1) % size
    tensor = zeros((rank + 1, 2, 1024))
    window = newest._new_window()
    assert "no tensor is registered" in error_of(lambda: window.map_remote_tensor(0))
    window.tensor_register(tensor)
    assert "already" in error_of(lambda: window.tensor_register(tensor))
    assert window.get_attr(following).access_type.name == "UNIFIED"
    view = window.map_remote_tensor(following)
    assert view.shape == (following + 1, 2, 1024)
    view[-1, 1] = rank + 1  # written in the memory of the next rank
    dist.barrier()
    assert tensor[-1, 1].eq((rank - 1) % size + 1).all()
    assert not tensor[-1, 0].any()
    window.tensor_deregister()
    assert "registered no tensor" in error_of(window.tensor_deregister)
    other = zeros(4096, dtype=torch.int64)
    window.tensor_register(other)  # a window may be used again
    window = None
    assert view[-1, 1].eq(rank + 1).all()
    dist.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_a_mapped_tensor_is_the_memory_of_the_peer(size: int) -> None:
    run(read_the_next, size)


def count_signals() -> None:
    """Signals are counted, in order, for each window by itself, and asynchronous ones too."""
    rank = dist.get_rank()
    first, second = newest._new_window(), newest._new_window()
    if rank == 0:
        for _ in range(50):
            first.signal(1, True)
        second.signal(1, False)
    else:
        second.wait_signal(0, False)
        waits = [first.wait_signal(0, True) for _ in range(50)]
        assert all(each.wait() for each in waits)
    number = torch.zeros(1)
    if rank == 0:  # a message of a user with the tag 0 is no signal
        late = first.wait_signal(1, True)
        dist.recv(number, 1, tag=0)
        assert not late.is_completed()
        dist.barrier()
        assert late.wait()
    else:
        dist.send(number + 7, 0, tag=0)
        dist.barrier()
        first.signal(0, False)
    assert number == (7 if rank == 0 else 0)


def test_signals_are_counted_by_window() -> None:
    run(count_signals, 2)


def refuse() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shared, ordinary = zeros(2048), torch.zeros(2048)
    what = error_of(lambda: newest._new_window(ordinary if rank == 1 else shared))  # on all ranks alike
    assert "rank 1 gives a tensor that its peers cannot map; make it with dist_prims.empty" in what
    what = error_of(lambda: newest._new_window(shared.view(2, 1024).T if rank == 0 else shared))
    assert "rank 0 gives a tensor that is not contiguous" in what
    what = error_of(lambda: newest._new_window(shared.view(*[1] * 16, 2048)))
    assert "more than 16 dimensions" in what
    window = newest._new_window(shared[10:])
    assert "rank 5 is not in a group of 2 ranks" in error_of(lambda: window.put(ordinary, 5, 0, False))
    assert "rank 5 is not in a group" in error_of(lambda: window.signal(5, False))
    what = error_of(lambda: window.put(ordinary, 0, 1, False))
    assert "2048 elements at offset 1 do not fit into the 2038 elements of rank 0" in what
    assert "offset -1" in error_of(lambda: window.put(ordinary[:1], 0, -1, False))
    assert "gives Long for a tensor of Float" in error_of(lambda: window.put(ordinary[:1].long(), 0, 0, False))
    window.put(ordinary[:0], 0, 2038, False)
    window.put(torch.full((2048, 2), 3.0)[:5, 0], (rank + 1) % size, 0, False)  # not contiguous here
    dist.barrier()
    assert shared[10:15].eq(3).all()
    assert not shared[15:].any()
    assert not shared[:10].any()


def test_bad_input_is_refused_on_every_rank() -> None:
    run(refuse, 2)


def wait_too_long() -> str:
    window = newest._new_window()
    options = import_module("torch._C._distributed_c10d").WaitSignalOptions()
    options.timeout = timedelta(seconds=1)
    if dist.get_rank() == 0:
        return error_of(lambda: window.wait_signal(1, False, options))
    return error_of(lambda: dist.recv(torch.zeros(1), 0))


def test_a_wait_for_a_signal_has_a_deadline() -> None:
    waited, received = run(wait_too_long, 2)
    assert "1000 ms in wait_signal(from rank 1, window 0)" in waited, waited
    assert "deadlock, rank 1 waits for rank 0, rank 0 waits for rank 1" in received, received


def die_in_a_wait(rank: int) -> None:
    window = newest._new_window(zeros(2048))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "rank 1" in error_of(lambda: window.wait_signal(1, False))
    assert "rank 1" in error_of(lambda: window.put(torch.zeros(1), 1, 0, False))


def test_a_death_is_named_in_a_wait_for_a_signal(tmp_path: Path) -> None:
    assert run_ranks(die_in_a_wait, 2, tmp_path) == [None, -signal.SIGKILL]
