"""One rank of the tests of MPI, started by mpirun: ``python mpi_program.py CASE ...`` runs these cases.

Each rank is a host of its own, so that all messages of the group travel over MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from mpi4py import MPI

os.environ["DIST_PRIMS_HOST_ID"] = str(MPI.COMM_WORLD.rank)

import torch
import torch.distributed as dist
from values import every_collective
from wrapping import go_round, refuse

from dist_prims.backend import mpi_library, native_libraries
from dist_prims.errors import CommError, CommInterruptedError, CommTimeoutError, MismatchError

SECOND = timedelta(seconds=1)


def transport_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).transport


def case_values() -> None:
    assert transport_of(dist.group.WORLD) == ("mpi" if dist.get_world_size() > 1 else "")
    every_collective()


def case_small_pieces() -> None:
    """As if MPI could count to 6: a message is one element of a longer type."""
    patched: Any = mpi_library
    patched._LARGEST_COUNT, most = 6, patched._LARGEST_COUNT
    group = dist.new_group()
    patched._LARGEST_COUNT = most
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 13, 300_007):
        total = torch.arange(count) + rank
        dist.all_reduce(total, group=group)
        assert torch.equal(total, torch.arange(count) * size + size * (size - 1) // 2)
    whole = torch.empty(size * (size + 1) // 2)
    dist.all_gather([*whole.split([*range(1, size + 1)])], torch.full((rank + 1,), float(rank)), group)
    assert whole.tolist() == [float(peer) for peer in range(size) for _ in range(peer + 1)]


def case_tags() -> None:
    """The group has the tags above this one for itself."""
    largest = int(os.environ["LARGEST_TAG"])
    go_round(largest)
    refuse(largest)


def case_groups() -> None:
    everyone = list(range(dist.get_world_size()))
    for ranks in [everyone[::2], everyone[1:], everyone[::-1]]:
        group = dist.new_group(ranks, sort_ranks=False) if ranks else None
        if group is not None and dist.get_rank() in ranks:
            assert dist.get_rank(group) == ranks.index(dist.get_rank())
            places = torch.empty(len(ranks), dtype=torch.long)
            dist.all_gather_into_tensor(places, torch.tensor([dist.get_rank()]), group)
            assert places.tolist() == ranks
            dist.destroy_process_group(group)


def case_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    after, before, tags = (rank + 1) % size, (rank - 1) % size, [0, 1, 77, 31_000]
    boxes = {tag: torch.zeros(2) for tag in tags}
    waiting: list[Any] = [dist.irecv(boxes[tag], before, tag=tag) for tag in tags]
    dist.all_reduce(torch.ones(1))  # beside the messages
    for tag in reversed(tags):
        dist.send(torch.full((2,), float(tag + rank)), after, tag=tag)
    for work in waiting:
        work.wait()
    for tag in tags:
        assert boxes[tag].tolist() == [tag + before] * 2
    if rank == 0:
        box, senders = torch.zeros(1), set()
        for _ in range(size - 1):
            senders.add(sender := dist.recv(box))
            assert box.item() == sender
        assert senders == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def case_async() -> None:
    """A call that no thread waits for ends, too."""
    size = dist.get_world_size()
    ended, alone = threading.Event(), torch.ones(300_000)
    work: Any = dist.all_reduce(alone, async_op=True)
    work.get_future().then(lambda _: ended.set())
    assert ended.wait(20), "a work that no thread waits for must end, too"
    assert alone.unique().tolist() == [size]


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    said = "nothing"
    try:
        yield
    except kind as error:
        said = str(error)
    assert all(word in said for word in words), said


def group_of(seconds: float = 30) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=seconds))
    return group


def interrupt_call(group: Any) -> None:
    """Press Ctrl-C once this process waits in a call of the group: before the wait, the other ranks would time out."""
    while '"started"' not in group._get_backend(torch.device("cpu")).record():
        time.sleep(0.01)
    time.sleep(0.2)  # a receive is in the record from its post on, and Python still has to call wait()
    os.kill(os.getpid(), signal.SIGINT)


def case_faults() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    group = group_of()
    with raises(CommError, "rank"):
        late: Any = dist.irecv(torch.ones(1), before, group, tag=5)
        late.wait(timedelta(milliseconds=200))
    with raises(CommError, "rank"):  # the group has ended
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    group = group_of(0.5)
    if rank == 0:
        with raises(CommTimeoutError, "rank 0: rank 1 on host 1 has not replied in time", "within 500 ms"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    group = group_of()
    if rank == 0:
        threading.Thread(target=interrupt_call, args=(group,), daemon=True).start()
    with raises(KeyboardInterrupt if rank == 0 else CommInterruptedError, "" if rank == 0 else "rank 0 on host 0"):
        dist.recv(torch.ones(1), before, group)
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
    """A message of another length: an error, and the group lives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    if rank == 0:
        dist.isend(torch.ones(10), 1)
        dist.isend(torch.ones(10), 1)
    if rank == 1:
        with raises(MismatchError, "rank 1", "a message of more than the 20 bytes"):
            dist.recv(torch.ones(5), 0)
        with raises(MismatchError, "rank 0 sent a message of 40 bytes, and 80 are expected"):
            dist.recv(torch.ones(20), 0)
    dist.barrier()


def case_one_library() -> None:
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if "libmpi" in line and "r-xp" in line}
    assert len(mapped) == 1, mapped


def case_lacks() -> None:
    """Each thing that may be missing is named, with what to do."""
    assert mpi_library.unusable_reason() == ""
    patched: Any = mpi_library
    library, headers, folder = MPI.Get_library_version, patched.mpi_headers, native_libraries.LIBRARIES
    mpi_library._library.cache_clear()
    MPI.Get_library_version = lambda: "Another MPI 1.0"
    problem = "mpi4py has loaded an MPI with neither MPICH's nor Open MPI's ABI: Another MPI 1.0"
    assert mpi_library.unusable_reason() == problem
    MPI.Get_library_version = library
    patched.mpi_headers, native_libraries.LIBRARIES = dict, folder.parent / "empty"
    with raises(RuntimeError, "no group over MPI: the library of dist_prims for", "DIST_PRIMS_MPICC="):
        mpi_library.make([0], SECOND)
    patched.mpi_headers, native_libraries.LIBRARIES = headers, folder
    me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    assert mpi_library.group_unusable_reason([me], 0) == ""
    assert f"it is rank {me} of {size} in MPI.COMM_WORLD" in mpi_library.group_unusable_reason([me + 1], 0)
    assert f"it is rank {me} of {size} in MPI.COMM_WORLD" in mpi_library.group_unusable_reason([me, size], 0)


def case_finalize() -> None:
    """Someone else ends MPI, while a group is alive and a message is under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.irecv(torch.ones(1), (rank + 1) % size, tag=9) if size > 1 else None
    dist.barrier()
    MPI.Finalize()
    if work:
        with raises(CommError, "MPI to be finalised"):
            work.wait()
        with raises(CommError, "rank"):
            dist.all_reduce(torch.ones(1))


def case_stay() -> None:
    """Ends with a group alive, and with a message under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        dist.irecv(torch.ones(1), (rank + 1) % size, tag=9)


def main() -> None:
    dist.init_process_group("dist_prims", timeout=timedelta(seconds=30))
    for case in sys.argv[1:]:
        globals()[f"case_{case}"]()
        if dist.get_rank() == 0:
            print(case, flush=True)
    if "stay" not in sys.argv and "finalize" not in sys.argv:
        dist.barrier()  # rank 0 has the store
        dist.destroy_process_group()


main()
