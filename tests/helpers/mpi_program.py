"""One rank of the tests of the MPI engine, started by mpirun: ``python mpi_program.py CASE ...`` runs these cases."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import reduce
from typing import Any

import overlapping
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import ReduceOp

from dist_prims.backend import mpi_library
from dist_prims.errors import CommError, CommTimeoutError

warnings.simplefilter("ignore", FutureWarning)  # torch gives reduce_scatter_tensor another name

NAME = "mpi_of_the_tests"
SECOND = timedelta(seconds=1)
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [torch.float8_e4m3fn, torch.float8_e5m2]
ADDED = [ReduceOp.SUM, ReduceOp.PRODUCT]
ORDERED = [*ADDED, ReduceOp.MIN, ReduceOp.MAX]
BITS = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
OPS: dict[torch.dtype, list[Any]] = {
    **{dtype: [*ORDERED, *BITS] for dtype in [*WHOLE, torch.bool]},
    **{dtype: [*ORDERED, ReduceOp.AVG] for dtype in REAL},
    **{dtype: [ReduceOp.SUM, ReduceOp.AVG] for dtype in COMPLEX},  # as torch allows
}
FOLDS: dict[Any, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.AVG: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: lambda a, b: a & b,
    ReduceOp.BOR: lambda a, b: a | b,
    ReduceOp.BXOR: lambda a, b: a ^ b,
}


def make(options: Any, given: Any) -> Any:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return mpi_library.make(list(ranks), options.timeout, **(given or {}))


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Such that no sum or product of four ranks is rounded in any type."""
    found = (torch.arange(count) * 7 + rank * 3) % 4
    return found.to(torch.float32).to(dtype) if dtype in MOVED else found.to(dtype)


def reduced(op: Any, dtype: torch.dtype, count: int, size: int) -> torch.Tensor:
    columns = zip(*(numbers(rank, count, dtype).tolist() for rank in range(size)), strict=True)
    total = [reduce(FOLDS[op], column) for column in columns]
    if op == ReduceOp.AVG:
        total = [complex(each.real / size, each.imag / size) if dtype in COMPLEX else each / size for each in total]
    exact = torch.float64 if dtype in REAL else torch.complex128 if dtype in COMPLEX else dtype
    return torch.tensor(total, dtype=exact).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tolist() == wanted.tolist(), (found, wanted)


def collectives(group: dist.ProcessGroup, counts: tuple[int, ...] = (0, 1, 5)) -> None:
    for dtype, ops in OPS.items():
        for count in counts:
            for op in ops:
                reductions(group, dtype, op, count)
    for dtype in [*OPS, *MOVED]:
        for count in counts:
            movements(group, dtype, count)
    dist.barrier(group)


def reductions(group: dist.ProcessGroup, dtype: torch.dtype, op: Any, count: int) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_global_rank(group, size - 1)
    wanted = reduced(op, dtype, count, size)
    tensor = numbers(rank, count, dtype)
    dist.all_reduce(tensor, op, group)
    same(tensor, wanted)
    tensor = numbers(rank, count, dtype)
    dist.reduce(tensor, root, op, group)
    same(tensor, wanted if rank == size - 1 else numbers(rank, count, dtype))
    wanted = reduced(op, dtype, count * size, size).split(count)[rank] if count else wanted
    tensor = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(tensor, numbers(rank, count * size, dtype), op, group)
    same(tensor, wanted)
    blocks = numbers(rank, count * size, dtype).split([count] * size)
    tensor = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(tensor, [block.clone() for block in blocks], op, group)
    same(tensor, wanted)


def movements(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first, last = dist.get_global_rank(group, 0), dist.get_global_rank(group, size - 1)
    mine, every = numbers(rank, count, dtype), [numbers(peer, count, dtype) for peer in range(size)]
    tensor = mine.clone()
    dist.broadcast(tensor, last, group)
    same(tensor, every[-1])
    found = [torch.empty_like(mine) for _ in every]
    dist.all_gather(found, mine, group)
    whole = torch.empty(count * size, dtype=dtype)
    dist.all_gather_into_tensor(whole, mine, group)
    same(whole, torch.cat(every))
    gathered = [torch.empty_like(mine) for _ in every]
    dist.gather(mine, gathered if rank == 0 else None, first, group)
    for peer in range(size):
        same(found[peer], every[peer])
        if rank == 0:
            same(gathered[peer], every[peer])
    tensor = torch.empty_like(mine)
    dist.scatter(tensor, [each.clone() for each in every] if rank == 0 else None, first, group)
    same(tensor, mine)
    found = [torch.empty_like(mine) for _ in every]
    dist.all_to_all(found, [mine.clone() for _ in every], group)
    same(torch.cat(found), torch.cat(every))
    whole = torch.empty(count * size, dtype=dtype)
    dist.all_to_all_single(whole, mine.repeat(size), group=group)
    same(whole, torch.cat(every))


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def case_values() -> None:
    collectives(world())


def case_small_pieces() -> None:
    """As if MPI could count to 6."""
    group = dist.new_group(backend=NAME, pg_options={"largest_count": 6})
    collectives(group, (0, 1, 13))
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(20) + rank
    other = torch.empty_like(tensor)
    works: list[Any] = [dist.isend(tensor, (rank + 1) % size, group), dist.irecv(other, (rank - 1) % size, group)]
    if size > 1:
        for work in works:
            work.wait()
        same(other, torch.arange(20) + (rank - 1) % size)
        with raises(CommError, "lengths have no common divisor above 4"):
            dist.all_gather(
                [torch.empty(5 + 2 * (peer > 0)) for peer in range(size)], torch.ones(5 + 2 * (rank > 0)), group
            )


def case_layouts() -> None:
    """Tensors that do not lie in one piece, uneven blocks, and memory that is input and output at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) // 2
    tensor = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    assert not tensor.is_contiguous()
    dist.all_reduce(tensor)
    same(tensor, torch.arange(6.0).view(2, 3).t() * total)
    factor = torch.full((4,), float(rank))
    dist.all_reduce(factor, dist._make_nccl_premul_sum(0.5))
    same(factor, torch.full((4,), 0.5 * sum(range(size))))
    whole = torch.full((size, 3), -1.0)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    same(whole, torch.arange(float(size)).repeat_interleave(3).view(size, 3))
    every = torch.arange(size * 2.0)
    dist.reduce_scatter_tensor(every[rank * 2 : rank * 2 + 2], every)
    same(every[rank * 2 : rank * 2 + 2], torch.arange(size * 2.0)[rank * 2 : rank * 2 + 2] * size)
    columns = [torch.zeros(peer + 1, 4)[:, 1] for peer in range(size)]
    dist.all_gather(columns, torch.full((rank + 1,), float(rank)))
    for peer, column in enumerate(columns):
        same(column, torch.full((peer + 1,), float(peer)))
    sent, received = [(rank + peer) % 3 for peer in range(size)], [(rank + peer) % 3 for peer in range(size)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, torch.full((sum(sent), 2), float(rank)), received, sent)
    same(out, torch.repeat_interleave(torch.arange(float(size)), torch.tensor(received))[:, None].repeat(1, 2))
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.PRODUCT)
    product = torch.tensor([1j, 2])
    world().allreduce([product], options).wait()  # torch's own all_reduce refuses it
    same(product, reduce(torch.mul, [torch.tensor([1j, 2])] * size))
    one, two = torch.ones(2), torch.ones(3) * 2
    dist.all_reduce_coalesced([one, two])
    same(torch.cat([one, two]), torch.tensor([1.0, 1, 2, 2, 2]) * size)


def case_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    for ranks in [everyone[::2], everyone[1:], everyone[::-1]]:
        group = dist.new_group(ranks, backend=NAME, sort_ranks=False) if ranks else None
        if rank in ranks and group is not None:
            assert dist.get_rank(group) == ranks.index(rank)
            movements(group, torch.float32, 3)
            reductions(group, torch.bfloat16, ReduceOp.SUM, 3)
            dist.destroy_process_group(group)


def case_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    backend: Any = world()._get_backend(torch.device("cpu"))
    limit = backend.largest_tag
    assert limit >= 32_766
    with raises(ValueError, f"tag {limit + 1} is not from 0 to {limit}"):
        dist.isend(torch.ones(1), after, tag=limit + 1) if size > 1 else world().send([torch.ones(1)], 0, limit + 1)
    if size == 1:
        return
    tags = [0, 1, 77, limit]
    boxes = {tag: torch.zeros(2) for tag in tags}
    waiting: list[Any] = [dist.irecv(boxes[tag], before, tag=tag) for tag in tags]
    total = torch.ones(1)
    dist.all_reduce(total)  # beside the messages
    for tag in reversed(tags):
        dist.send(torch.full((2,), float(tag % 1000 + rank)), after, tag=tag)
    for work in waiting:
        work.wait()
    for tag in tags:
        same(boxes[tag], torch.full((2,), float(tag % 1000 + before)))
    if rank == 0:
        box, senders = torch.zeros(1), set()
        for _ in range(size - 1):
            sender = dist.recv(box)
            assert box.item() == sender
            senders.add(sender)
        assert senders == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def case_async() -> None:
    """Many at once, waited for in another order; and some that no rank waits for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((100,), float(rank + number)) for number in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in [*range(0, 50, 3), *range(50)]:
        works[number].wait()
        same(tensors[number], torch.full((100,), float(sum(range(size)) + size * number)))
    ended = threading.Event()
    alone = torch.ones(300_000)
    future = dist.all_reduce(alone, async_op=True).get_future()
    future.then(lambda _: ended.set())
    assert ended.wait(20), "a work that no thread waits for must end, too"
    same(alone, torch.full((300_000,), float(size)))
    time.sleep(0.05)
    before = time.thread_time(), time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before[1] < 0.1, "a thread that has nothing to do must sleep"


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    said = "nothing"
    try:
        yield
    except kind as error:
        said = str(error)
    assert all(word in said for word in words), said


def group_of(seconds: float = 30) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=NAME, timeout=timedelta(seconds=seconds))
    return group


def case_overlap() -> None:
    overlapping.check((0, 1, 5, 1000))


def case_faults() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    group = group_of()
    with raises(CommTimeoutError, f"rank {rank} of {size}, mpi:recv, from rank {before}, tag 5: 200 ms"):
        late: Any = dist.irecv(torch.ones(1), before, group, tag=5)
        late.wait(timedelta(milliseconds=200))
    with raises(CommTimeoutError, "200 ms"):  # the group has ended
        dist.all_reduce(torch.ones(1), group=group)
    group = group_of(0.3)
    if rank == 0:
        with raises(CommTimeoutError, f"rank 0 of {size}, mpi:all_reduce, call number 1: 300 ms"):
            dist.all_reduce(torch.ones(1), group=group)
    group = group_of()
    backend = group._get_backend(torch.device("cpu"))
    threading.Timer(0.2, backend.abort).start()
    start = time.monotonic()
    with raises(CommError, "aborted"):
        dist.recv(torch.ones(1), before, group)
    assert time.monotonic() - start < 5
    group = group_of()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with raises(KeyboardInterrupt):
        dist.recv(torch.ones(1), before, group)
    group = group_of(0.5)
    if rank != 1:
        with raises(CommTimeoutError, "timed out in monitoredBarrier", f"no sign of rank {int(rank == 0)}"):
            group.monitored_barrier(timedelta(seconds=0.5))  # type: ignore[attr-defined]
    dist.barrier()
    if rank < 2:
        with raises(CommTimeoutError, "making a group of 0, 1: no sign of"):
            if rank == 0:
                mpi_library.make([0, 1], timedelta(seconds=0.3))
            else:
                raise CommTimeoutError("making a group of 0, 1: no sign of")
    with raises(ValueError, "a group must contain the calling rank, and no rank twice"):
        mpi_library.make([after], SECOND)
    dist.barrier()


def case_truncation() -> None:
    """A message of another length, and a collective with other counts: an error, and the process lives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_of(5)
    if size == 1:
        return
    if rank == 0:
        dist.isend(torch.ones(10), 1, group)
        dist.isend(torch.ones(10), 1, group)
    if rank == 1:
        with raises(CommError, f"rank 1 of {size}, mpi:recv, from rank 0, tag 0: MPI says:", "runcat"):
            dist.recv(torch.ones(5), 0, group)
        with raises(CommError, "rank 0 sent a message of 40 bytes, and 80 are expected"):
            dist.recv(torch.ones(20), 0, group)
    dist.barrier()


def case_ddp() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = []
    for backend in (NAME, "gloo"):
        group = dist.new_group(backend=backend)
        torch.manual_seed(0)
        whole = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        model = torch.nn.parallel.DistributedDataParallel(whole, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step * size + rank)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        found: list[Any] = [parameter.grad for parameter in model.parameters()]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    torch.testing.assert_close(*gradients)


def case_one_library() -> None:
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if "libmpi" in line and "r-xp" in line}
    assert len(mapped) == 1, mapped


def case_lacks() -> None:
    """Each thing that may be missing is named, with what to do."""
    assert mpi_library.unusable_reason() == ""
    patched: Any = mpi_library
    library, folder = MPI.Get_library_version, patched.LIBRARIES
    mpi_library._library.cache_clear()
    MPI.Get_library_version = lambda: "Another MPI 1.0"
    assert (
        mpi_library.unusable_reason()
        == "mpi4py has loaded an MPI with neither MPICH's nor Open MPI's ABI: Another MPI 1.0"
    )
    MPI.Get_library_version = library
    patched.LIBRARIES = folder / "empty"
    with raises(RuntimeError, "no group over MPI: the library of dist_prims for", "DIST_PRIMS_MPICC="):
        mpi_library.make([0], SECOND)
    patched.LIBRARIES = folder
    me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    assert mpi_library.group_unusable_reason([me], 0) == ""
    assert f"it is rank {me} of {size} in MPI.COMM_WORLD" in mpi_library.group_unusable_reason([me + 1], 0)
    assert f"it is rank {me} of {size} in MPI.COMM_WORLD" in mpi_library.group_unusable_reason([me, size], 0)


def case_finalize() -> None:
    """Someone else ends MPI, while a group is alive and work is under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.irecv(torch.ones(1), (rank + 1) % size, tag=9) if size > 1 else None
    MPI.Finalize()
    if work:
        with raises(CommError, "MPI to be finalised, before this is done"):
            work.wait()
    with raises(CommError, "MPI has been finalised"):
        dist.all_reduce(torch.ones(1))


def case_stay() -> None:
    """Ends with a group alive, and with work under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        dist.irecv(torch.ones(1), (rank + 1) % size, tag=9)


def main() -> None:
    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
    dist.init_process_group(NAME, timeout=timedelta(seconds=30))
    for case in sys.argv[1:]:
        globals()[f"case_{case}"]()
        if dist.get_rank() == 0:
            print(case, flush=True)
    if "stay" not in sys.argv:
        dist.destroy_process_group()


main()
